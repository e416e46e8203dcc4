"""FP8 and FP4 number formats as data: a literal each, everything else derived.

A code of a signed format with `e` exponent and `m` mantissa bits is `s | E | T` (1 + e + m = 8 bits, of E2M1 4), worth

    (-1)**s * 2**(E - bias) * (1 + T / 2**m)     for E > 0   (normal)
    (-1)**s * 2**(1 - bias) * (T / 2**m)         for E == 0  (subnormal, and zero)

except for the codes that a format reserves: NaN, and in E5M2 also Inf. E8M0 has neither sign, mantissa nor
zero: code E is worth 2**(E - 127).

The two OCP formats spend their top codes differently. E5M2 keeps IEEE's Inf and NaN. E4M3 ("fn": finite)
has no Inf and gives up only mantissa 111 of the top exponent for NaN, so its largest value is 448 and not
240. The "fnuz" pair (finite, unsigned zero) moves NaN to the code of -0 and shifts the bias by one. E2M1 has neither NaN nor Inf; its dtype
holds two codes a byte.

Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0, tables 1 and 2, for E4M3 and E5M2; OCP
Microscaling Formats (MX) 1.0, sections 5.3.3 and 5.4, for E2M1 and E8M0; Noune et al. 2022, arXiv 2206.02915, for fnuz.
Of `torch.finfo` only `max` is taken: it has a wrong eps for e5m2fnuz.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Format:
    """One format of 8 or 4 bits; sizes are in bits."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    dtype: torch.dtype

    @property
    def max(self) -> float:
        """The largest finite value. Asked of torch, since with `dynamic=True` torch.compile takes a stored float for a variable,
        which a backward pass cannot be the first to read (torch 2.13); what finfo says is a constant to it."""
        # torch 2.13 has no finfo of the packed dtype
        return 6.0 if self.dtype == torch.float4_e2m1fn_x2 else torch.finfo(self.dtype).max

    @property
    def emax(self) -> int:
        """The exponent of the largest finite value: `2**emax <= max < 2**(emax + 1)`."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_normal(self) -> float:
        """The smallest positive value with full precision."""
        return math.ldexp(
            1.0, (self.mantissa_bits > 0) - self.bias
        )  # E8M0: exponent 0 is one more power of two

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


E4M3FN = Format("e4m3fn", 4, 3, 7, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 5, 2, 15, torch.float8_e5m2)
E4M3FNUZ = Format("e4m3fnuz", 4, 3, 8, torch.float8_e4m3fnuz)
E5M2FNUZ = Format("e5m2fnuz", 5, 2, 16, torch.float8_e5m2fnuz)
E8M0FNU = Format("e8m0fnu", 8, 0, 127, torch.float8_e8m0fnu)
E2M1FN = Format("e2m1fn", 2, 1, 1, torch.float4_e2m1fn_x2)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0FNU, E2M1FN)}
ELEMENT_FORMATS: tuple[Format, ...] = (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)  # one code a byte; E8M0 holds scales

_KNOWN: dict[object, Format] = {key: f for f in FORMATS.values() for key in (f.name, f.dtype)}
_ELEMENT_DTYPES: frozenset[torch.dtype] = frozenset(f.dtype for f in ELEMENT_FORMATS)


def as_element_format(which: Format | torch.dtype | str) -> Format:
    """The FP8 format of a dtype (`torch.float8_e4m3fn`) or name ("e4m3fn"), which tensor elements may have; a Format as it is.

    Raises:
        ValueError: unknown; the message lists the known names. Or E8M0, which holds scales, or E2M1, which has a cast of its own.
    """
    fmt = which if isinstance(which, Format) else _KNOWN.get(which)
    if fmt is None:
        raise ValueError(f"{which!r} is no FP8 format; known: {', '.join(FORMATS)} and their torch dtypes")
    # By dtype: to compare formats field by field took a third of Dynamo's time
    if fmt.dtype not in _ELEMENT_DTYPES:
        names = ", ".join(f.name for f in ELEMENT_FORMATS)
        if fmt == E2M1FN:
            raise ValueError(
                f"{fmt.name} has two codes a byte, this takes one of {names}; fp8core.four_bits.quantize_lines casts to it"
            )
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
