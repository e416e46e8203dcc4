"""The few PTX instructions of fp8core's assembly, carried out by NumPy as the PTX ISA describes them.

    cvt.rn.satfinite.{e4m3,e5m2}x2.f32 d, a, b   a into the upper byte of d, b into the lower; to nearest, ties to even; a
                                                 magnitude above the largest finite value, or Inf, gives that value with
                                                 the sign of the input; NaN gives NaN, 0x7f
    mov.b32 d, {a, b}                            two halves into one register, a the lower
    prmt.b32 d, a, b, 0xnnnn                     byte i of d is byte n_i of the eight bytes {b, a}, counted from a's lowest

Source: PTX ISA 8.7, sections "cvt", "mov" and "prmt".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint32]

MANTISSA_BITS_AND_BIAS = {"e4m3": (3, 7), "e5m2": (2, 15)}
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}


def finite_values(element: str) -> NDArray[np.float64]:
    """Values of codes 0 .. the largest finite one, ascending, from the definition of the format (OCP OFP8)."""
    bits, bias = MANTISSA_BITS_AND_BIAS[element]
    codes = np.arange(LARGEST_CODE[element] + 1)
    exponent, mantissa = codes >> bits, codes & ((1 << bits) - 1)
    normal = (1 + mantissa / (1 << bits)) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, mantissa / (1 << bits) * 2.0 ** (1 - bias), normal)


def satfinite(x: NDArray[np.float32], element: str) -> Words:
    """`cvt.rn.satfinite` of one float32: its code."""
    values = finite_values(element)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        magnitude = np.abs(x.astype(np.float64))  # exact
    above = np.searchsorted(values, magnitude).clip(1, len(values) - 1)
    lower, upper = values[above - 1], values[above]
    middle = (lower + upper) / 2  # exact: few bits
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    codes = np.where(up, above, above - 1)
    codes = np.where(magnitude > values[-1], len(values) - 1, codes)  # Inf too
    codes = np.where(np.isnan(x), 0x7F, codes | (np.signbit(x) << 7))
    return codes.astype(np.uint32)


def run(assembly: str, outputs: int, inputs: list[NDArray[np.float32]] | list[Words]) -> list[Words]:
    """Registers $0 .. of an assembly text whose inputs follow its outputs.

    Raises:
        ValueError: an instruction that this model lacks.
    """
    names = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for text in filter(None, (part.strip() for part in assembly.strip().strip("{}").split(";"))):
        opcode, rest = text.split(None, 1)
        if opcode == ".reg":
            continue
        if opcode == "mov.b32" and (found := re.fullmatch(r"(\$\d+), \{(\w+), (\w+)\}?", rest)):
            names[found[1]] = names[found[2]] | (names[found[3]] << 16)
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        if found := re.fullmatch(r"cvt\.rn\.satfinite\.(e\dm\d)x2\.f32", opcode):
            upper, lower = (satfinite(names[source], found[1]) for source in sources)
            names[target] = (upper << 8) | lower
        elif opcode == "prmt.b32":
            first, second = (names[source] for source in sources[:2])
            selector = int(sources[2], 16)
            eight = [(word >> (8 * i)) & 0xFF for word in (first, second) for i in range(4)]
            names[target] = sum(eight[selector >> (4 * i) & 7] << np.uint32(8 * i) for i in range(4))
        else:
            raise ValueError(f"no model of {text!r}")
    return [names[f"${i}"] for i in range(outputs)]
