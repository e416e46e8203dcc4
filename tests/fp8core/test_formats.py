"""formats: every constant and all 256 codes against ml_dtypes, and against the tables of the specifications."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fp8core import formats
from fp8core.formats import E4M3FN, E5M2, E8M0FNU, FORMATS, Format

ml_dtypes = pytest.importorskip("ml_dtypes")

ALL = list(FORMATS.values())


def oracle(fmt: Format) -> type:
    return getattr(ml_dtypes, f"float8_{fmt.name}")


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_all_256_codes_decode_as_in_ml_dtypes_and_torch(fmt: Format) -> None:
    """Oracles: ml_dtypes' decoding of every byte, sign of zero included; torch's of the dtype that the format names."""
    expected = np.arange(256, dtype=np.uint8).view(oracle(fmt)).astype(np.float64)
    got = np.array([fmt.decode(code) for code in range(256)])
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(expected[got == 0]))
    torchs = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).to(torch.float64)
    np.testing.assert_array_equal(got, torchs.numpy())


# max, code of max, min normal, overflow threshold; OFP8 1.0 tables 1 and 2, MX 1.0 section 5.4
SPECIFIED = {
    "e4m3fn": (448.0, 0x7E, 2**-6, 464.0),
    "e5m2": (57344.0, 0x7B, 2**-14, 61440.0),
    "e4m3fnuz": (240.0, 0x7F, 2**-7, 248.0),
    "e5m2fnuz": (57344.0, 0x7F, 2**-15, 61440.0),
    "e8m0fnu": (2.0**127, 0xFE, 2.0**-127, 1.5 * 2.0**127),
}


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_derived_constants(fmt: Format) -> None:
    """Oracles: ml_dtypes.finfo, and the tables of the specifications, typed in by hand."""
    info = ml_dtypes.finfo(oracle(fmt))
    assert fmt.max == float(info.max)
    got = (fmt.max, fmt.max_code, fmt.min_normal, fmt.overflow_threshold)
    assert got == SPECIFIED[fmt.name]
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.mantissa_bits == info.nmant
    assert fmt.eps == (float(info.eps) if fmt is not E8M0FNU else 1.0)


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_flags_agree_with_the_codes(fmt: Format) -> None:
    """Oracle: the decoded values themselves."""
    assert fmt.has_inf == any(math.isinf(v) for v in fmt.values)
    assert fmt.has_negative_zero == any(v == 0 and math.copysign(1, v) < 0 for v in fmt.values)
    assert fmt.signed == any(v < 0 for v in fmt.values)
    assert 2.0**fmt.emax <= fmt.max < 2.0 ** (fmt.emax + 1)
    assert fmt.has_subnormals == (0.0 in fmt.values)


def test_lookup_by_dtype_name_and_self() -> None:
    """Oracle: the table."""
    for fmt in ALL:
        assert formats.as_format(fmt) is formats.as_format(fmt.dtype) is formats.as_format(fmt.name) is fmt


def test_native_pair_on_mi300_is_fnuz(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: ATen's `_scaled_mm_is_fnuz`; the device is faked."""
    assert formats.native_pair() == (E4M3FN, E5M2) or torch.version.hip

    class Properties:
        gcnArchName = "gfx942:sramecc+:xnack-"  # noqa: N815  # torch's name

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert [f.name for f in formats.native_pair()] == ["e4m3fnuz", "e5m2fnuz"]
