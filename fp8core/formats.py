"""FP8 number formats as data: a literal each, everything else derived.

A code of a signed format with `e` exponent and `m` mantissa bits is `s | E | T` (1 + e + m = 8 bits), worth

    (-1)**s * 2**(E - bias) * (1 + T / 2**m)     for E > 0   (normal)
    (-1)**s * 2**(1 - bias) * (T / 2**m)         for E == 0  (subnormal, and zero)

except for the codes that a format reserves: NaN, and in E5M2 also Inf. E8M0 has neither sign, mantissa nor
zero: code E is worth 2**(E - 127).

The two OCP formats spend their top codes differently. E5M2 keeps IEEE's Inf and NaN. E4M3 ("fn": finite)
has no Inf and gives up only mantissa 111 of the top exponent for NaN, so its largest value is 448 and not
240. The "fnuz" pair (finite, unsigned zero) moves NaN to the code of -0 and shifts the bias by one.

Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0, tables 1 and 2, for E4M3 and E5M2; OCP
Microscaling Formats (MX) 1.0, section 5.4, for E8M0; Noune et al. 2022, arXiv 2206.02915, for fnuz.
Constants are not read from `torch.finfo`, which has no smallest subnormal and a wrong eps for e5m2fnuz.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Format:
    """One 8-bit format; `_derive` fills in the last three fields. Sizes are in bits, codes are 0..255."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    dtype: torch.dtype
    nan_codes: frozenset[int]
    has_inf: bool
    has_negative_zero: bool
    signed: bool
    has_subnormals: bool  # False: exponent 0 is one more power of two, and there is no zero
    values: tuple[float, ...] = field(
        repr=False, compare=False
    )  # of all 256 codes, in the order of the codes
    max_code: int  # of the largest finite value
    max: float  # the largest finite value

    @property
    def largest(self) -> float:
        """`max`, for code that torch.compile traces: with `dynamic=True` it takes a stored float for a variable, which a
        backward pass cannot be the first to read (torch 2.13); what finfo says is a constant to it."""
        return torch.finfo(self.dtype).max

    def decode(self, code: int) -> float:
        """The exact value of one code; NaN and Inf where the format says so.

        Raises:
            ValueError: code outside 0..255.
        """
        if not 0 <= code <= 255:
            raise ValueError(f"code {code} of {self.name} is outside 0..255")
        return self.values[code]

    @property
    def emax(self) -> int:
        """The exponent of the largest finite value: `2**emax <= max < 2**(emax + 1)`."""
        return math.frexp(self.largest)[1] - 1

    @property
    def min_normal(self) -> float:
        """The smallest positive value with full precision."""
        return math.ldexp(1.0, (1 if self.has_subnormals else 0) - self.bias)

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger value."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def overflow_threshold(self) -> float:
        """The midpoint between `max` and the value that one more code would have had.

        Unsaturated rounding overflows above it. The tie itself goes to the even code: to `max` in E4M3FN
        (464 -> 448), to overflow in E5M2 and both fnuz formats, whose largest code is odd.
        """
        return self.max + math.ldexp(self.eps, self.emax) / 2

    @property
    def short(self) -> str:
        """Exponent and mantissa bits only (`e4m3`), the name used for FLOPs by dtype and in `repr`."""
        return f"e{self.exponent_bits}m{self.mantissa_bits}"


def _derive(
    name: str,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    dtype: torch.dtype,
    nan_codes: Iterable[int],
    *,
    has_inf: bool = False,
    has_negative_zero: bool = True,
    signed: bool = True,
    has_subnormals: bool = True,
) -> Format:
    """A Format with its value table; stored rather than computed on demand, since every cast reads `max`."""
    nan_codes = frozenset(nan_codes)

    def decode(code: int) -> float:
        if code in nan_codes:
            return math.nan
        sign = -1.0 if signed and code & 0x80 else 1.0
        exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
        mantissa = code & (2**mantissa_bits - 1)
        if has_inf and exponent == 2**exponent_bits - 1:
            return sign * math.inf
        if exponent == 0 and has_subnormals:
            return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
        return sign * math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)

    values = tuple(decode(code) for code in range(256))
    largest, max_code = max((value, code) for code, value in enumerate(values) if math.isfinite(value))
    return Format(
        name,
        exponent_bits,
        mantissa_bits,
        bias,
        dtype,
        nan_codes,
        has_inf,
        has_negative_zero,
        signed,
        has_subnormals,
        values,
        max_code,
        largest,
    )


E4M3FN = _derive("e4m3fn", 4, 3, 7, torch.float8_e4m3fn, {0x7F, 0xFF})
E5M2 = _derive("e5m2", 5, 2, 15, torch.float8_e5m2, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}, has_inf=True)
E4M3FNUZ = _derive("e4m3fnuz", 4, 3, 8, torch.float8_e4m3fnuz, {0x80}, has_negative_zero=False)
E5M2FNUZ = _derive("e5m2fnuz", 5, 2, 16, torch.float8_e5m2fnuz, {0x80}, has_negative_zero=False)
E8M0FNU = _derive(
    "e8m0fnu",
    8,
    0,
    127,
    torch.float8_e8m0fnu,
    {0xFF},
    has_negative_zero=False,
    signed=False,
    has_subnormals=False,
)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0FNU)}
ELEMENT_FORMATS: tuple[Format, ...] = (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)  # E8M0 holds scales, not elements

_BY_DTYPE: dict[torch.dtype, Format] = {f.dtype: f for f in FORMATS.values()}
_ELEMENT_DTYPES: frozenset[torch.dtype] = frozenset(f.dtype for f in ELEMENT_FORMATS)


def as_format(which: Format | torch.dtype | str) -> Format:
    """The format of a dtype (`torch.float8_e4m3fn`) or name ("e4m3fn"); a Format is returned as it is.

    Raises:
        ValueError: unknown; the message lists the known names.
    """
    if isinstance(which, Format):
        return which
    found = _BY_DTYPE.get(which) if isinstance(which, torch.dtype) else FORMATS.get(which)
    if found is None:
        raise ValueError(f"{which!r} is no FP8 format; known: {', '.join(FORMATS)} and their torch dtypes")
    return found


def as_element_format(which: Format | torch.dtype | str) -> Format:
    """`as_format` that refuses E8M0, which can hold scales but no tensor elements."""
    fmt = which if isinstance(which, Format) else as_format(which)
    # By dtype: to compare formats field by field took a third of Dynamo's time
    if fmt.dtype not in _ELEMENT_DTYPES:
        names = ", ".join(f.name for f in ELEMENT_FORMATS)
        raise ValueError(f"{fmt.name} holds scales, not tensor elements; expected one of {names}")
    return fmt


def native_pair() -> tuple[Format, Format]:
    """The (e4m3, e5m2) pair that this machine's matrix units take: fnuz on AMD gfx942 (MI300), OCP elsewhere.

    Source: ATen `ScaledBlas.cpp`, `_scaled_mm_is_fnuz`.
    """
    if torch.version.hip is not None and torch.cuda.is_available():
        arch: str = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName
        if arch.startswith("gfx942"):
            return E4M3FNUZ, E5M2FNUZ
    return E4M3FN, E5M2
