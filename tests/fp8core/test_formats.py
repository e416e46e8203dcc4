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
def test_all_256_codes_decode_as_in_ml_dtypes(fmt: Format) -> None:
    """Oracle: ml_dtypes' decoding of every byte, sign of zero included; NaN as a class."""
    expected = np.arange(256, dtype=np.uint8).view(oracle(fmt)).astype(np.float64)
    for code in range(256):
        got, want = fmt.decode(code), float(expected[code])
        assert (math.isnan(got) and math.isnan(want)) or (
            got == want and math.copysign(1, got) == math.copysign(1, want)
        ), f"{fmt.name} code {code:#04x}: {got} != {want}"


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_all_256_codes_decode_as_in_torch(fmt: Format) -> None:
    """Oracle: torch's own conversion of the dtype that the format names."""
    got = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).to(torch.float64)
    torch.testing.assert_close(
        got, torch.tensor(fmt.values, dtype=torch.float64), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_derived_constants_equal_finfo_of_ml_dtypes(fmt: Format) -> None:
    """Oracle: ml_dtypes.finfo, and torch.finfo for max."""
    info = ml_dtypes.finfo(oracle(fmt))
    assert fmt.max == float(info.max) == torch.finfo(fmt.dtype).max
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.mantissa_bits == info.nmant
    assert fmt.eps == (float(info.eps) if fmt is not E8M0FNU else 1.0)


# max, code of max, min normal, overflow threshold; OFP8 1.0 tables 1 and 2, MX 1.0 section 5.4
SPECIFIED = {
    "e4m3fn": (448.0, 0x7E, 2**-6, 464.0),
    "e5m2": (57344.0, 0x7B, 2**-14, 61440.0),
    "e4m3fnuz": (240.0, 0x7F, 2**-7, 248.0),
    "e5m2fnuz": (57344.0, 0x7F, 2**-15, 61440.0),
    "e8m0fnu": (2.0**127, 0xFE, 2.0**-127, 1.5 * 2.0**127),
}


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_derived_constants_equal_the_specification(fmt: Format) -> None:
    """Oracle: the tables of the specifications, typed in by hand."""
    got = (fmt.max, fmt.max_code, fmt.min_normal, fmt.overflow_threshold)
    assert got == SPECIFIED[fmt.name]


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_flags_agree_with_the_codes(fmt: Format) -> None:
    """Oracle: the decoded values themselves."""
    assert fmt.has_inf == any(math.isinf(v) for v in fmt.values)
    assert fmt.has_negative_zero == any(v == 0 and math.copysign(1, v) < 0 for v in fmt.values)
    assert fmt.signed == any(v < 0 for v in fmt.values)
    assert fmt.nan_codes == {c for c, v in enumerate(fmt.values) if math.isnan(v)}
    assert 2.0**fmt.emax <= fmt.max < 2.0 ** (fmt.emax + 1)
    assert fmt.has_subnormals == (0.0 in fmt.values)


@pytest.mark.parametrize("fmt", formats.ELEMENT_FORMATS, ids=lambda f: f.name)
def test_overflow_threshold_is_where_unsaturated_rounding_leaves_the_format(fmt: Format) -> None:
    """Oracle: ml_dtypes, which does not saturate: at the tie the even code wins, above it nothing finite does."""
    tie = np.array(
        [fmt.overflow_threshold, np.nextafter(np.float32(fmt.overflow_threshold), np.float32(0))], "f4"
    )
    above = np.nextafter(np.float32(fmt.overflow_threshold), np.float32(np.inf))
    at_tie, below = tie.astype(oracle(fmt)).astype(np.float64)
    assert below == fmt.max
    assert (at_tie == fmt.max) == (fmt.max_code % 2 == 0)
    assert not np.isfinite(np.float64(above.astype(oracle(fmt))))


def test_lookup_by_dtype_name_and_self() -> None:
    """Oracle: the table."""
    for fmt in ALL:
        assert formats.as_format(fmt) is formats.as_format(fmt.dtype) is formats.as_format(fmt.name) is fmt


@pytest.mark.parametrize("bad", ["e4m3", torch.bfloat16, "fp8"])
def test_unknown_format_lists_the_known_ones(bad: object) -> None:
    with pytest.raises(ValueError, match=r"is no FP8 format; known: e4m3fn, e5m2"):
        formats.as_format(bad)


def test_scale_format_is_refused_for_elements() -> None:
    with pytest.raises(ValueError, match="e8m0fnu holds scales"):
        formats.as_element_format(E8M0FNU)


@pytest.mark.parametrize("code", [-1, 256])
def test_code_outside_a_byte(code: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.255"):
        E5M2.decode(code)


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
