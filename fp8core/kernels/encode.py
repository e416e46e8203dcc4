"""float32 -> FP8 codes inside a Triton kernel, and the amax and scale arithmetic that goes with it.

    code      = RNE(clamp(v, -fp8_max, +fp8_max))        round to nearest, ties to even; Inf saturates, NaN stays NaN
    scale     = fp8_max / max(amax, AMAX_FLOOR)          optionally with its mantissa bits cleared
    scale_inv = 1 / scale

bit for bit as `fp8core.cast` and `fp8core.scaling` have them. Two encoders, chosen at compile time:

native      `cvt.rn.satfinite`, one instruction for two elements, on sm_89 and newer. It is the whole formula: the PTX
            ISA has it give the largest finite value with the sign of the input where the input is larger or infinite,
            and NaN for NaN. Written as assembly, because Triton 3.6 makes two roundings of it on sm_89 (through
            float16), and no clamp before it, which would double the instructions of a cast.
bit         integer operations on the float32 bits plus one float32 addition. For the interpreter, whose own
            FP8 conversion loses mantissa carries and saturates nothing, and for every older GPU.

The reference divides in float64 and rounds the quotient to float32. Here one correctly rounded float32
division gives the same bits: rounding a quotient twice is innocent when the wider format has at least 2p + 2
bits of precision, and 53 >= 2 * 24 + 2 (S. Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter
30(3), 1995). That holds for normal results, and 448 / 3.4e38 is normal. A power of two needs no division: its
exponent is a difference of exponents, see `scale_of`.

Magnitudes are compared as integers. The bits of |x| sort like |x|, Inf above all finite values and NaN above
Inf, so an integer maximum propagates NaN, needs no order of evaluation and has an atomic.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

import math
import struct

import triton
import triton.language as tl

from fp8core.formats import E4M3FN, E5M2
from fp8core.scaling import AMAX_FLOOR


def _float32_at_least(value: float) -> float:
    """The smallest float32 >= value > 0."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    rounded = struct.unpack("<f", struct.pack("<I", bits))[0]
    return rounded if rounded >= value else struct.unpack("<f", struct.pack("<I", bits + 1))[0]


E4M3_MAX = tl.constexpr(E4M3FN.max)
E5M2_MAX = tl.constexpr(E5M2.max)
# `amax < AMAX_FLOOR` in float64 is `amax < FLOOR` for every float32 amax; below it the scale is a constant.
FLOOR = tl.constexpr(_float32_at_least(AMAX_FLOOR))
AMAX_FLOOR_FLOAT64 = tl.constexpr(AMAX_FLOOR)
INFINITE_BITS = tl.constexpr(struct.unpack("<I", struct.pack("<f", math.inf))[0])
NAN_BITS = tl.constexpr(0x7FC0_0000)
FLOOR_BITS = tl.constexpr(struct.unpack("<I", struct.pack("<f", FLOOR.value))[0])
E4M3_EMAX, E5M2_EMAX = tl.constexpr(E4M3FN.emax), tl.constexpr(E5M2.emax)
MANTISSA_OF_MAX = tl.constexpr(0x60_0000)  # of 448 and of 57344: both are 1.75 * 2**emax

# Four float32 -> four codes in one register. The first source of `cvt` becomes the upper byte.
_FOUR_CODES = (
    "{{ .reg .b16 lower, upper; cvt.rn.satfinite.{0}x2.f32 lower, $2, $1; "
    "cvt.rn.satfinite.{0}x2.f32 upper, $4, $3; mov.b32 $0, {{lower, upper}}; }}"
)
E4M3_ASM, E5M2_ASM = (tl.constexpr(_FOUR_CODES.format(name)) for name in ("e4m3", "e5m2"))


@triton.jit
def encode(v, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """float32 block -> uint8 codes of E4M3FN or E5M2, round to nearest even, saturating; NaN -> NaN."""
    if NATIVE:
        return _encode_native(v, E5M2)
    return _encode_bits(v, E5M2)


@triton.jit
def _encode_native(v, E5M2: tl.constexpr):
    ASM: tl.constexpr = E5M2_ASM if E5M2 else E4M3_ASM
    return tl.inline_asm_elementwise(ASM, "=r,f,f,f,f", [v], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def _encode_bits(v, E5M2: tl.constexpr):
    MANTISSA_BITS: tl.constexpr = 2 if E5M2 else 3
    BIAS: tl.constexpr = 15 if E5M2 else 7
    MAX_CODE: tl.constexpr = 0x7B if E5M2 else 0x7E
    DROP: tl.constexpr = 23 - MANTISSA_BITS
    bits = v.to(tl.uint32, bitcast=True)
    sign = (bits >> 24).to(tl.int32) & 0x80
    magnitude = (bits & 0x7FFFFFFF).to(tl.int32)

    # Normal range: half an ulp less one, plus the lowest bit that is kept, then drop the tail and rebias. A
    # carry out of the mantissa moves into the exponent by itself. No overflow: 0x7fffffff would need the
    # sign bit, so NaN is taken out first.
    is_nan = magnitude > INFINITE_BITS
    magnitude = tl.where(is_nan, 0, magnitude)
    rounded = magnitude + ((1 << (DROP - 1)) - 1) + ((magnitude >> DROP) & 1)
    normal = (rounded >> DROP) - ((127 - BIAS) << MANTISSA_BITS)

    # Subnormal range, |v| < 2**(1 - BIAS): adding a constant whose ulp is the subnormal step makes the float32
    # adder round; the difference of the bits is the code.
    ANCHOR: tl.constexpr = ((127 - BIAS) + DROP + 1) << 23
    anchor = tl.full(v.shape, ANCHOR, tl.int32).to(tl.float32, bitcast=True)
    small = tl.where(magnitude < ((128 - BIAS) << 23), magnitude, 0)
    subnormal = (small.to(tl.float32, bitcast=True) + anchor).to(tl.int32, bitcast=True) - ANCHOR

    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    code = tl.where(code > MAX_CODE, MAX_CODE, code)
    code = tl.where(is_nan, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def widen(x):
    """bfloat16, float16 or float32 block -> float32, exactly.

    bfloat16 by a shift of its bits, which is what a GPU does: the interpreter's own conversion is wrong for
    subnormals.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(v, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """float32 block -> bfloat16, float16 or float32, round to nearest even; NaN -> NaN.

    bfloat16 by integer operations where the native path is off: the interpreter's own conversion truncates.
    """
    if dtype == tl.bfloat16 and not NATIVE:
        bits = v.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > INFINITE_BITS, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return v.to(dtype)


@triton.jit
def magnitude_bits(x):
    """bfloat16, float16 or float32 block -> the float32 bits of |x| as int32; they sort as magnitudes do."""
    return widen(x).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """float32 amax -> float32 scale, as `fp8core.scaling.compute_scale`.

    The power of two below 1.75 * 2**emax / (m * 2**e) is 2**(emax - e), or half of that if m > 1.75: adding
    0x1fffff to the bits of amax carries into e exactly then.
    """
    if POWER_OF_TWO:
        TOP: tl.constexpr = 127 + (E5M2_EMAX if E5M2 else E4M3_EMAX)
        bits = amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        raised = (tl.maximum(bits, FLOOR_BITS) + (0x7FFFFF - MANTISSA_OF_MAX)) & INFINITE_BITS
        scale = (TOP << 23) - (raised - (127 << 23))
        scale = tl.where(bits >= INFINITE_BITS, tl.where(bits > INFINITE_BITS, NAN_BITS, 0), scale)
        return scale.to(tl.float32, bitcast=True)
    MAX: tl.constexpr = E5M2_MAX if E5M2 else E4M3_MAX
    AT_FLOOR: tl.constexpr = (E5M2_MAX if E5M2 else E4M3_MAX) / AMAX_FLOOR_FLOAT64
    scale = tl.div_rn(tl.full(amax.shape, MAX, tl.float32), amax)
    return tl.where(amax < FLOOR, AT_FLOOR, scale)


@triton.jit
def reciprocal(scale, POWER_OF_TWO: tl.constexpr = False):
    """Correctly rounded 1 / scale, float32; 1 / 0 is Inf. POWER_OF_TWO: of such scales, without a division."""
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        inverse = tl.where(bits == 0, INFINITE_BITS, (254 << 23) - bits)
        return tl.where(bits > INFINITE_BITS, NAN_BITS, inverse).to(tl.float32, bitcast=True)
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def tensor_scale(
    amax_ptr,
    scale_inv_bits_ptr,
    FACTOR: tl.constexpr,  # 2**margin
    DELAYED: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """The scale that the amax in memory asks for; program 0 leaves its reciprocal behind, as bits.

    With DELAYED by a maximum, since another program may have written NaN there already, see `leave_amax`.
    """
    scale = scale_of(tl.load(amax_ptr) * FACTOR, E5M2, POWER_OF_TWO)
    if tl.program_id(0) == 0:
        bits = reciprocal(scale, POWER_OF_TWO).to(tl.int32, bitcast=True)
        if DELAYED:
            tl.atomic_max(scale_inv_bits_ptr, bits & 0x7FFFFFFF, sem="relaxed")
        else:
            tl.store(scale_inv_bits_ptr, bits)
    return scale


@triton.jit
def leave_amax(largest_bits, seen_bits_ptr, scale_inv_bits_ptr):
    """Adds a program's largest magnitude to the tensor's. Inf or NaN also make scale_inv NaN.

    A scale from an earlier step saturates Inf to a plausible number; so the whole tensor comes back as NaN. Both
    are maxima of bits over slots that start at 0, the same in any order of the programs.
    """
    tl.atomic_max(seen_bits_ptr, largest_bits, sem="relaxed")
    tl.atomic_max(scale_inv_bits_ptr, NAN_BITS, mask=largest_bits >= INFINITE_BITS, sem="relaxed")
