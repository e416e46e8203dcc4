"""amax and scale: from the largest magnitude of a group to the factor that fits it into an FP8 format.

    amax      = max |x|                                  over the scaling group, in float32
    scale     = fp8_max / max(amax, AMAX_FLOOR)          high precision -> FP8: multiply by it
    scale_inv = 1 / scale                                FP8 -> high precision: what every GEMM takes

Both are the true quotient, rounded once to float32. Eager PyTorch turns `number / float32 tensor` into a reciprocal and a
multiplication, which is one ulp off for about a quarter of all values, so there the number is a tensor. A compiler may
approximate a division in float32; it divides in float64, where a second rounding hides that. `scale_inv` is the reciprocal of the
*rounded* scale and never a second division from amax, or backends would disagree by one ulp.

With `power_of_two` the scale is rounded down to a power of two by clearing its mantissa bits. This is exact.
`exp2(floor(log2(scale)))`, as in torchao 0.18, rounds *up* when the scale lies 1 to 5 ulp below a power of
two, because the float32 logarithm rounds to an integer there; elsewhere both are equal.

One rule for each special group (docs/numerics.md, section 3):

    amax 0, or an empty group    the floor 1e-12 acts: scale is finite, zeros stay zeros
    amax Inf                     scale 0, scale_inv Inf: every element of the group comes back as NaN
    amax NaN                     scale and scale_inv NaN: every element of the group comes back as NaN

so that a non-finite input can never turn into plausible finite output.

Blocks that don't divide a dimension leave a shorter last block. An E8M0 scale ("1x32", MX) is a bare power of
two, stored as its biased exponent; `mx_scale_code` makes it by integer arithmetic, from the bits of amax.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import nn

from fp8core.arguments import check_known, check_type
from fp8core.formats import E2M1FN, E8M0FNU, FORMATS, Format, as_element_format


def _amax_floor() -> float:
    """What keeps the scale of an all-zero group finite, as torchao `float8_utils.EPS`.

    A constant of code and no global: with `dynamic=True` Dynamo (torch 2.13) takes a float that it reads from a global for
    a variable of the first layer that reads it, and fails at the second (lift_tracked_freevar_to_input).
    """
    return 1e-12


AMAX_FLOOR = _amax_floor()
Granularity = Literal[
    "tensorwise", "rowwise", "1x128", "128x128", "1x32", "1x16", "16x16"
]  # see `fp8core.recipe`
GRANULARITIES: tuple[str, ...] = get_args(Granularity)
MxMode = Literal["floor", "ceil", "rceil", "even"]
MX_MODES: tuple[str, ...] = get_args(MxMode)
HP_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)

BLOCK = 128  # of "1x128" and "128x128"
MX_BLOCK = 32  # of "1x32": OCP MX 1.0, section 5.1
FOUR_BIT_BLOCK = 16  # of "1x16" and "16x16": NVFP4, arXiv 2509.25149
BLOCKS = {
    "1x128": BLOCK,
    "128x128": BLOCK,
    "1x32": MX_BLOCK,
    "1x16": FOUR_BIT_BLOCK,
    "16x16": FOUR_BIT_BLOCK,
}

# Tensors: a number divided by a tensor would be a reciprocal and a product, see above. (dtype, halved)
_LARGEST = {
    (fmt.dtype, halved): torch.tensor(fmt.max / (1 + halved), device="cpu")
    for fmt in FORMATS.values()
    if fmt is not E8M0FNU
    for halved in (False, True)
}
_INFINITY_BITS = 0x7F80_0000  # of float32; every bit pattern from here on is Inf or NaN
_MAGNITUDE_BITS = 0x7FFF_FFFF  # all but the sign
_SIGN_AND_EXPONENT = -0x0080_0000  # 0xFF80_0000 as int32: all but the 23 mantissa bits of a float32


class Operand(NamedTuple):
    """Codes with what decodes them.

    Attributes:
        qdata: FP8 codes; or uint8, lines of E2M1 codes packed along the contracted axis, two a byte.
        scale_inv: decoding scales.
        tensor_scale_inv: NVFP4's second level, float32, 0-dimensional.
    """

    qdata: torch.Tensor
    scale_inv: torch.Tensor
    tensor_scale_inv: torch.Tensor | None = None


def check_hp(x: torch.Tensor, what: str = "x") -> None:
    """Refuses what no FP8 cast takes.

    Raises:
        TypeError: no tensor, or not float32, bfloat16 or float16. float64 is refused rather than rounded twice: through
            float32 about a quarter of the values near a midpoint of two codes go to the wrong one.
    """
    if isinstance(x, torch.Tensor) and x.dtype in HP_DTYPES:
        return
    check_type(what, x, torch.Tensor)
    hint = "; call .float() first if double rounding is acceptable" if x.dtype == torch.float64 else ""
    raise TypeError(f"{what} has dtype {x.dtype}; expected float32, bfloat16 or float16{hint}")


def without_grad(x: torch.Tensor) -> torch.Tensor:
    """x detached from autograd; x itself where that changes nothing, since in eager mode a view costs as much as a sum."""
    return x.detach() if x.requires_grad and torch.is_grad_enabled() else x


def amax(x: torch.Tensor, granularity: Granularity = "tensorwise", dim: int = -1) -> torch.Tensor:
    """The largest magnitude of each scaling group.

    Args:
        x: float32, bfloat16 or float16, any layout; a matrix for "128x128" and "16x16".
        granularity: see `fp8core.recipe`; "rowwise" and "1xN" reduce along `dim`.
        dim: the contracted dimension; ignored by "tensorwise" and squares.

    Returns:
        float32: 0-dimensional, or of x's rank with `dim` reduced to 1 (rowwise) or to its number of blocks.
        NaN where a group holds a NaN, Inf where it holds an Inf and no NaN, 0 for an empty group.

    Raises:
        TypeError: dtype, see `check_hp`.
        ValueError: unknown granularity, `dim` outside of x, or squares of anything but a matrix.
    """
    check_hp(x)
    if granularity not in GRANULARITIES:
        check_known("granularity", granularity, GRANULARITIES)
    magnitude = without_grad(x).abs()
    if granularity == "tensorwise":
        return (magnitude.amax() if x.numel() else magnitude.new_zeros(())).float()
    if granularity in ("128x128", "16x16"):
        if x.dim() != 2:
            raise ValueError(f"{granularity} scaling is defined for a matrix, not for shape {tuple(x.shape)}")
        block = BLOCKS[granularity]
        return _block_amax(_block_amax(magnitude, block, 0), block, 1).float()
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"dim {dim} is outside of a tensor of shape {tuple(x.shape)}; {granularity} scaling needs one"
        )
    if granularity != "rowwise":
        return _block_amax(magnitude, BLOCKS[granularity], dim).float()
    if x.shape[dim] == 0:
        shape = list(x.shape)
        shape[dim] = 1
        return x.new_zeros(shape, dtype=torch.float32)
    return magnitude.amax(dim, keepdim=True).float()


def compute_scale(
    amax: torch.Tensor, fmt: Format | torch.dtype | str, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scale = fp8_max / amax` and its reciprocal `scale_inv`.

    >>> import torch
    >>> from fp8core.formats import E4M3FN
    >>> scale, scale_inv = compute_scale(torch.tensor(2.0), E4M3FN)
    >>> scale.item(), scale_inv.item()  # 448 / 2 takes amax to the largest E4M3 value
    (224.0, 0.004464285913854837)
    >>> compute_scale(torch.tensor(2.0), E4M3FN, power_of_two=True)[0].item()
    128.0

    `amax * scale` may exceed fp8_max by one ulp of float32 (8.7 % of all amax), which the cast rounds away.

    Args:
        amax: non-negative, any shape, float32; see `amax`.
        fmt: the target format.
        power_of_two: round scale down to a power of two.

    Returns:
        (scale, scale_inv), both float32 of amax's shape; special values as in the module docstring.

    Raises:
        ValueError: fmt is no element format.
    """
    fmt, amax = as_element_format(fmt), without_grad(amax)
    if torch.compiler.is_compiling() or type(amax) is not torch.Tensor:  # or traced by other means
        scale = (fmt.max / amax.double().clamp(min=_amax_floor())).float()
        if power_of_two:  # The mask alone would turn NaN into Inf; the minimum is NaN where either is
            scale = torch.minimum(scale, (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32))
        return scale, scale.double().reciprocal().float()
    # The same bits in fewer operators; a zero of either sign is below the floor
    scale = _LARGEST[fmt.dtype, power_of_two] / amax.clamp_min(AMAX_FLOOR)
    if power_of_two:
        # Half a scale is fraction * 2**e, and the fraction, in [0.5, 1), divided by that is 2**-e: exact; NaN stays
        scale_inv = torch.frexp(scale)[0].clamp_min_(0.5).div_(scale)
        return scale_inv.reciprocal(), scale_inv
    return scale, scale.reciprocal()


def mx_scale_code(
    amax: torch.Tensor, fmt: Format | torch.dtype | str, mode: MxMode = "rceil"
) -> torch.Tensor:
    """The E8M0 code e + 127 of an MX block's decoding scale X = 2**e; with emax = 8 (e4m3), 15 (e5m2) or 2 (e2m1):

        floor   e = floor(log2(amax)) - emax         OCP MX 1.0; saturates an amax of significand above 1.75
        ceil    e = ceil(log2(amax)) - emax
        rceil   e = ceil(log2(amax / fp8_max))       NVIDIA's; the smallest X that saturates nothing
        even    e = floor(log2(amax rounded half up to the element's mantissa)) - emax

    Integer arithmetic on the bits of amax, so exact: no logarithm, and no `.to(float8_e8m0fnu)`, which rounds.

    >>> import torch
    >>> for mode in MX_MODES:
    ...     print(mode, mx_scale_code(torch.tensor(500.0), "e4m3fn", mode).view(torch.uint8).item() - 127)
    floor 0
    ceil 1
    rceil 1
    even 1

    Args:
        amax: non-negative float32, any shape.
        fmt: the element format.
        mode: one of the above.

    Returns:
        float8_e8m0fnu of amax's shape. Code 0 (X = 2**-127) for an amax of 0 or too small, and for an empty
        group; code 255 (NaN) for Inf or NaN, which turns the whole block into NaN.

    Raises:
        ValueError: unknown mode, or fmt is no element format.
    """
    fmt = fmt if fmt == E2M1FN else as_element_format(fmt)
    check_known("MX rounding mode", mode, MX_MODES)
    # A reduction may return a NaN with its sign bit set, which as an integer would lie below all numbers
    bits = without_grad(amax).float().contiguous().view(torch.int32) & _MAGNITUDE_BITS
    mantissa = bits & ~_SIGN_AND_EXPONENT
    exponent = bits >> 23
    if mode == "ceil":
        exponent = exponent + (mantissa != 0).int()
    elif mode == "rceil":
        significand_of_max = int((fmt.max / 2**fmt.emax - 1) * 2**23)
        exponent = exponent + (mantissa > significand_of_max).int()
    elif mode == "even":
        exponent = (bits.clamp(max=_INFINITY_BITS) + (1 << (22 - fmt.mantissa_bits))) >> 23
    code = (exponent - fmt.emax).clamp(0, 254)
    code = torch.where(bits >= _INFINITY_BITS, 255, code)
    return code.to(torch.uint8).view(E8M0FNU.dtype)


def mx_scale(code: torch.Tensor) -> torch.Tensor:
    """1 / X as float32, exact: what x is multiplied by. NaN for code 255.

    Args:
        code: float8_e8m0fnu. Code 254 would need 2**-127, a subnormal; it is exact too.
    """
    exponent = 127 - code.view(torch.uint8).int()
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return torch.where(code.view(torch.uint8) == 255, torch.nan, scale)


def broadcast_block_scales(scale: torch.Tensor, shape: torch.Size, block: int | None = None) -> torch.Tensor:
    """Scales of blocks repeated so that they broadcast to `shape`; others are returned as they are.

    Args:
        scale: float32 or float8_e8m0fnu; each size 1, that of `shape`, or its number of blocks.
        shape: of the codes.
        block: elements of a block; None: 32 for float8_e8m0fnu, else 128.

    Returns:
        float32, broadcastable to shape.
    """
    if block is None:
        block = MX_BLOCK if scale.dtype == E8M0FNU.dtype else BLOCK
    scale = scale.float()
    for dim, size in enumerate(shape if scale.dim() else ()):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scale


def _block_amax(magnitude: torch.Tensor, block: int, dim: int) -> torch.Tensor:
    """The largest of each `block` neighbours along dim; the last block may be shorter."""
    dim %= magnitude.dim()
    size = magnitude.shape[dim]
    missing = -size % block
    if missing:
        fill = [0, 0] * (magnitude.dim() - 1 - dim) + [0, missing]
        magnitude = nn.functional.pad(magnitude, fill)
    blocks = magnitude.unflatten(dim, (-1, block)) if size else magnitude.unflatten(dim, (0, block))
    return blocks.amax(dim + 1)
