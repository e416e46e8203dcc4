"""formats: every constant, and all 256 codes of the dtype, against ml_dtypes and the tables of the specifications."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hard_inputs import values

from fp8core import formats
from fp8core.formats import E2M1FN, E4M3FN, E5M2, E8M0FNU, FORMATS, Format

ml_dtypes = pytest.importorskip("ml_dtypes")

ALL = [
    fmt for fmt in FORMATS.values() if fmt is not E2M1FN
]  # whose 16 codes test_four_bits.py holds to ml_dtypes


def oracle(fmt: Format) -> type:
    return getattr(ml_dtypes, f"float8_{fmt.name}")


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_all_256_codes_of_the_dtype_decode_as_in_ml_dtypes(fmt: Format) -> None:
    """Oracle: ml_dtypes' decoding of every byte, sign of zero included."""
    expected = np.arange(256, dtype=np.uint8).view(oracle(fmt)).astype(np.float64)
    got = values(fmt).numpy()
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(expected[got == 0]))
    assert 2.0**fmt.emax <= fmt.max == np.nanmax(got[np.isfinite(got)]) < 2.0 ** (fmt.emax + 1)


# bias, max, min normal, overflow threshold; OFP8 1.0 tables 1 and 2, MX 1.0 section 5.4
SPECIFIED = {
    "e4m3fn": (7, 448.0, 2**-6, 464.0),
    "e5m2": (15, 57344.0, 2**-14, 61440.0),
    "e4m3fnuz": (8, 240.0, 2**-7, 248.0),
    "e5m2fnuz": (16, 57344.0, 2**-15, 61440.0),
    "e8m0fnu": (127, 2.0**127, 2.0**-127, 1.5 * 2.0**127),
}


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_derived_constants(fmt: Format) -> None:
    """Oracles: ml_dtypes.finfo, and the tables of the specifications, typed in by hand."""
    info = ml_dtypes.finfo(oracle(fmt))
    assert fmt.max == float(info.max)
    got = (fmt.bias, fmt.max, fmt.min_normal, fmt.overflow_threshold)
    assert got == SPECIFIED[fmt.name]
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.mantissa_bits == info.nmant
    assert fmt.eps == (float(info.eps) if fmt is not E8M0FNU else 1.0)
    assert fmt.exponent_bits == info.bits - info.nmant - (fmt is not E8M0FNU)


def test_lookup_by_dtype_name_and_self() -> None:
    """Oracle: the table."""
    for fmt in formats.ELEMENT_FORMATS:
        assert all(formats.as_element_format(which) is fmt for which in (fmt, fmt.dtype, fmt.name))


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
