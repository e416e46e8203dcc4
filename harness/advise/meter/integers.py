"""The integer instructions of sm_80 to sm_120 that decide where a program goes, evaluated for one thread.

A value is a number (32 bits, unsigned) or a string: why it is unknown ("load", "float", "barrier", or an opcode). Any
unknown operand makes the result unknown. Semantics: NVIDIA prints names of instructions only (CUDA Binary Utilities);
each rule here is checked by a test on code whose PTX is known.
"""

from __future__ import annotations

import math
import re
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Value = int | str
Truth = bool | str
MASK = 0xFFFF_FFFF


def signed(value: int) -> int:
    """32 bits as a two's-complement number."""
    return value - (1 << 32) if value & 0x8000_0000 else value


def literal(text: str) -> int | None:
    """An immediate operand as 32 bits; floats by their bits; None for anything else."""
    if re.fullmatch(r"-?0x[0-9a-f]+", text) or re.fullmatch(r"-?\d+", text):
        return int(text, 0) & MASK
    special = {"+INF": math.inf, "-INF": -math.inf, "INF": math.inf}
    if text in special:
        return int(struct.unpack("<I", struct.pack("<f", special[text]))[0])
    if re.fullmatch(r"-?\d*\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+", text):
        return int(struct.unpack("<I", struct.pack("<f", float(text)))[0])
    return None


def unknown(values: Sequence[Value | Truth]) -> str | None:
    """The first reason among the values; None where all are known."""
    return next((value for value in values if isinstance(value, str)), None)


def multiply_add(parts: set[str], a: int, b: int, c: int, carry: int = 0) -> tuple[int, ...]:
    """IMAD: one 32-bit result, or the two halves of a wide one; c is 64 bits for WIDE and HI."""
    is_unsigned = "U32" in parts
    x, y = (a, b) if is_unsigned else (signed(a), signed(b))
    if "WIDE" in parts:
        wide = (x * y + c) & 0xFFFF_FFFF_FFFF_FFFF
        return wide & MASK, wide >> 32
    if "HI" in parts:
        return ((x * y + c) >> 32 & MASK,)
    return (a * b + c + carry & MASK,)


def shift(parts: set[str], low: int, by: int, high: int) -> int:
    """SHF: a funnel shift of high:low."""
    is_signed = any(p in parts for p in ("S32", "S64"))
    by &= 63 if {"U64", "S64"} & parts else 31 if "W" in parts else MASK
    both = (high << 32) | low
    if is_signed and both >> 63:
        both -= 1 << 64
    by = min(by, 64)
    if "L" in parts:
        moved = both << by
        return (moved >> 32 if "HI" in parts else moved) & MASK
    if "HI" in parts:
        return (both >> 32) >> by & MASK
    return both >> by & MASK


def shifted_add(parts: set[str], a: int, b: int, high: int, by: int, carry: int) -> tuple[int, int]:
    """LEA: (sum, carry out) of a << by and b; with HI the upper half of high:a."""
    if "HI" in parts:
        wide = signed(a) if "SX32" in parts else (high << 32) | a
        moved = (wide << by) >> 32
    else:
        moved = a << by
    total = (moved & MASK) + b + carry
    return total & MASK, total >> 32


def look_up(table: int, a: int, b: int, c: int) -> int:
    """LOP3: any function of three words, given as its truth table."""
    result = 0
    for row in range(8):
        if table >> row & 1:
            term = MASK
            for word, bit in ((a, 4), (b, 2), (c, 1)):
                term &= word if row & bit else ~word & MASK
            result |= term
    return result


def look_up_truth(table: int, inputs: Sequence[Truth]) -> Truth:
    """PLOP3: the same of three predicates; known wherever every reading of an unknown one gives the same."""
    results = set()
    for row in range(8):
        bits = (bool(row & 4), bool(row & 2), bool(row & 1))
        if all(isinstance(have, str) or have == bit for have, bit in zip(inputs, bits, strict=True)):
            results.add(bool(table >> row & 1))
    if len(results) == 1:
        return results.pop()
    return unknown(inputs) or "PLOP3"


COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


def compare(parts: Sequence[str], a: int, b: int, lower: bool) -> bool:
    """ISETP: with EX the upper halves, `lower` being what the lower halves gave."""
    relation = next(part for part in parts if part in COMPARISONS)
    x, y = (a, b) if "U32" in parts else (signed(a), signed(b))
    if "EX" in parts and x == y:
        return lower
    return COMPARISONS[relation](x, y)


def combine(parts: Sequence[str], result: bool, other: Truth) -> Truth:
    """The last step of a comparison: AND, OR or XOR with one more predicate."""
    if "OR" in parts:
        return True if result else other
    if "XOR" in parts:
        return other if isinstance(other, str) else result != other
    return other if result else False


def permute(a: int, selector: int, b: int) -> int:
    """PRMT: four bytes picked from b:a; bit 3 of a selector spreads the sign."""
    source = [(((b << 32) | a) >> (8 * i)) & 0xFF for i in range(8)]
    result = 0
    for i in range(4):
        nibble = selector >> (4 * i) & 0xF
        byte = source[nibble & 7]
        if nibble & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * i)
    return result


def as_float(bits: int) -> float:
    """32 bits as a float32."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def float_bits(value: float) -> int:
    """The bits of the nearest float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def from_integer(parts: set[str], value: int) -> int:
    """I2F, rounding up with RP: one step of the division by a number that is not known when compiled."""
    number = value if "U32" in parts else signed(value)
    bits = float_bits(float(number))
    if "RP" in parts and as_float(bits) < number:
        bits += 1
    return bits


def to_integer(parts: set[str], bits: int) -> int:
    """F2I, truncating."""
    value = as_float(bits)
    limits = (0, MASK) if "U32" in parts else (-(1 << 31), (1 << 31) - 1)
    if math.isnan(value):
        return 0
    return int(max(limits[0], min(limits[1], value))) & MASK


def reciprocal(bits: int) -> int:
    """MUFU.RCP of a finite number other than 0: within one unit in the last place of the hardware's."""
    value = as_float(bits)
    return float_bits(1.0 / value) if value else 0x7F80_0000
