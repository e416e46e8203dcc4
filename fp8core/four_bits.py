"""Casts to E2M1 with block scales, NVFP4 and MXFP4, and back: plain PyTorch on any device.

    code           0    1    2    3    4    5    6    7        8 to 15: the same with a minus sign
    magnitude      0   0.5   1   1.5   2    3    4    6

NVFP4 has a scale for each 16 elements along the contracted axis, or for each square of 16 by 16, and one for the tensor:

    s_enc    = min(6 * 448 / amax, float32 max)          1 / s_enc is `tensor_scale_inv`; amax 0 gives s_enc 1
    s_block  = e4m3(min(amax_block * (s_enc / 6), 448))  `scale_inv`; below e4m3's normal range subnormal, then zero
    codes    = e2m1(x * min(1 / (s_block * tensor_scale_inv), float32 max))
    x'       = codes * s_block * tensor_scale_inv

each operation rounded to float32 in this order, as in Transformer Engine (`NVFP4QuantizerRef` and `core_nvfp4.cuh`, commit
1a4d3b0d; its Python reference loses the sign of zero). A block of zeros has scale 0 and codes 0; a block far below the
tensor's amax has scale 0 too, and comes back as zeros. torchao 0.18 (`nvfp4_quantize`) multiplies in another order, which
moves a scale to its neighbour now and then, and lets no block scale fall below 2**-6.

MXFP4 ("1x32") has an E8M0 scale for each 32 elements and none for the tensor, see `fp8core.scaling.mx_scale_code`.

E2M1 has no NaN. A block that holds Inf or NaN has a scale of NaN. In NVFP4 the tensor shares a scale: Inf makes s_enc 0, so that
all block scales are 0 or NaN, and `tensor_scale_inv` Inf; NaN makes it NaN. Either way the group comes back as NaN throughout.

Other sources: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149; OCP Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from fp8core import scaling
from fp8core.formats import E2M1FN, E4M3FN, Format
from fp8core.scaling import BLOCKS, Operand, check_hp, mx_scale, mx_scale_code, without_grad

if TYPE_CHECKING:
    from fp8core.scaling import Granularity, MxMode

HADAMARD = 16  # of a transform: NVFP4's block
# Transformer Engine's fixed vector (`get_wgrad_sign_vector`)
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_FLOAT32_MAX = torch.finfo(torch.float32).max
_SIXTH = 0.1666666716337204  # the float32 next to 1/6


class FourBitCast(Protocol):
    """The fields of `fp8core.recipe.Cast` that `quantize_lines` reads."""

    @property
    def format(self) -> Format: ...
    @property
    def granularity(self) -> Granularity: ...
    @property
    def rounding(self) -> str: ...
    @property
    def hadamard(self) -> tuple[int, ...] | None: ...
    @property
    def mx_mode(self) -> MxMode: ...


def encode(x: torch.Tensor, draws: torch.Tensor | None = None) -> torch.Tensor:
    """Rounds to E2M1: to nearest, ties to even, or stochastically; saturates at 6.

    Codes of magnitude y are min(2y, y + 2, y / 2 + 4), each term a line that is exact in one binade and above the code in the
    others. Rounded before the sum, so once.

    Args:
        x: float32, any shape, scaled already.
        draws: float32 of x's shape, see `fp8core.philox.uniform`: x between its neighbours a and b goes to b with probability
            (x - a) / (b - a), to within 2**-22, and a value of e2m1 stays as it is. None: nearest.

    Returns:
        uint8 of x's shape, a code 0 to 15 an element. -0 keeps its sign; NaN gives a zero of its sign.
    """
    middle = x.abs()
    low, high = middle * 2, middle * 0.5
    for term in (low, middle, high):
        if draws is None:
            term.round_()
        else:
            term.add_(draws).floor_()
    codes = (
        low.clamp_(max=middle.add_(2)).clamp_(max=high.add_(4)).clamp_(max=7)
    )  # in place: a quarter of the time is memory's
    sign = x.view(torch.int32) >> 28  # its lowest bits are s, E, E, E
    return codes.to(torch.int8).bitwise_or_(sign.to(torch.int8).bitwise_and_(8)).view(torch.uint8)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """The values of E2M1 codes (uint8, 0 to 15, any shape), float32, exact."""
    magnitude = (codes & 7).view(torch.int8)
    halves = torch.maximum(torch.maximum(magnitude, magnitude * 2 - 4), magnitude * 4 - 16)
    return halves.float().mul_(0.5 - (codes >> 3).float())  # the sign of a half; -0 keeps its own


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte: element 2i in the low four bits, element 2i + 1 in the high ones.

    This is the order of torch (`Float4_e2m1fn_x2.h`: "val1 : val0" from bit 7 down) and of cuBLAS (CUDA_R_4F_E2M1).

    Args:
        codes: uint8 [..., K], K even.

    Returns:
        uint8 [..., K / 2], contiguous: a view of float4_e2m1fn_x2, for which Inductor (torch 2.13) has no buffers on a CPU.
    """
    return (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous()


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The codes that `pack` packed: uint8 [..., K] of uint8 [..., K / 2]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def block_scales(
    x: torch.Tensor,
    granularity: Granularity,
    dim: int,
    amax: torch.Tensor | None = None,
    mx_mode: MxMode = "rceil",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The decoding scales of x, see the module docstring.

    Args:
        x: float32, bfloat16 or float16; a matrix for "16x16".
        granularity: "1x16" or "16x16" (NVFP4), "1x32" (MXFP4).
        dim: the contracted dimension.
        amax: of the tensor that shares NVFP4's second scale, float32, 0-dimensional, where x is a part of it; None: x's own.
        mx_mode: how "1x32" rounds its scales, see `fp8core.scaling.mx_scale_code`.

    Returns:
        (scale_inv, tensor_scale_inv): scale_inv of x's shape with `dim` reduced to its number of blocks, so squares are
        repeated for each line; float8_e4m3fn, and tensor_scale_inv float32, 0-dimensional. Of "1x32" float8_e8m0fnu and None.

    Raises:
        TypeError, ValueError: as `fp8core.scaling.amax`.
    """
    of_blocks = scaling.amax(x, granularity, dim)
    if granularity == "1x32":
        return mx_scale_code(of_blocks, E2M1FN, mx_mode), None
    if granularity == "16x16":
        other = 1 - dim % 2
        of_blocks = of_blocks.repeat_interleave(BLOCKS[granularity], other).narrow(other, 0, x.shape[other])
    if amax is None:
        amax = of_blocks.amax() if of_blocks.numel() else of_blocks.new_zeros(())
    # In float64: a compiler approximates a division in float32, see `fp8core.scaling`
    encode_scale = (E2M1FN.max * E4M3FN.max / amax.double()).float().clamp(max=_FLOAT32_MAX)
    encode_scale = torch.where(amax == 0, 1.0, encode_scale)
    scale_inv = (of_blocks * (encode_scale * _SIXTH)).clamp(max=E4M3FN.max).to(E4M3FN.dtype)
    return scale_inv, encode_scale.double().reciprocal().float()


def hadamard(x: torch.Tensor, dim: int, signs: tuple[int, ...]) -> torch.Tensor:
    """The random Hadamard transform (x * signs) @ H / 4 of each 16 neighbours along dim, H Sylvester's matrix.

    It is orthogonal, so that the product of two operands transformed along the contracted axis is that of the operands. Sums
    are formed by four steps of additions in one order, so that any device makes the same bits. Transformer Engine multiplies
    by the matrix, and rounds to bfloat16.

    Args:
        x: float32, bfloat16 or float16, any shape.
        dim: the dimension, a multiple of 16.
        signs: sixteen, each 1 or -1.

    Returns:
        float32 of x's shape.

    Raises:
        ValueError: the size of dim, or the signs.
    """
    if len(signs) != HADAMARD or not set(signs) <= {-1, 1}:
        raise ValueError(f"signs {signs}; expected {HADAMARD} of 1 or -1, as fp8core.four_bits.SIGNS")
    dim %= x.dim()
    check_multiple(x.shape[dim], HADAMARD, "the Hadamard transform")
    # A number and no list: what is copied to a GPU can't be captured in a graph
    negative = sum(1 << place for place, sign in enumerate(signs) if sign < 0)
    bits = torch.arange(HADAMARD, device=x.device).view(-1, *[1] * (x.dim() - 1 - dim))
    blocks = x.float().unflatten(dim, (x.shape[dim] // HADAMARD, HADAMARD))
    blocks = blocks * (0.25 - 0.5 * (negative >> bits & 1))
    for half in (1, 2, 4, 8):
        pairs = blocks.unflatten(dim + 1, (HADAMARD // (2 * half), 2, half))
        first, second = pairs.unbind(dim + 2)
        blocks = torch.stack((first + second, first - second), dim + 2).flatten(dim + 1, dim + 3)
    return blocks.flatten(dim, dim + 1)


def quantize_lines(
    x: torch.Tensor, cast: FourBitCast, dim: int, draws: torch.Tensor | None = None
) -> Operand:
    """The whole cast of a matrix: transform, scales, codes; as lines along the contracted dimension.

    Args:
        x: float32, bfloat16 or float16 [M, K], any layout.
        cast: a cast to e2m1.
        dim: the contracted dimension; 1: the lines are x's rows, 0: its columns.
        draws: of stochastic rounding, see `encode`; float32 of x's shape.

    Returns:
        Operand: qdata uint8 [lines, contracted / 2], packed, scale_inv [lines, contracted / block], both contiguous, and
        tensor_scale_inv, see `block_scales`.

    Raises:
        TypeError: x's dtype.
        ValueError: x is no matrix, the contracted size no multiple of the block, the cast none to e2m1, draws missing or
            left over.
    """
    check_hp(x)
    if cast.format != E2M1FN or x.dim() != 2:
        raise ValueError(
            f"{cast.format.name} of shape {tuple(x.shape)}; this casts a matrix to {E2M1FN.name}"
        )
    if (cast.rounding == "stochastic") != (draws is not None):
        given = "without draws" if draws is None else "with draws"
        raise ValueError(
            f"rounding {cast.rounding!r} {given}; stochastic rounding takes draws (fp8core.philox.uniform), no other does"
        )
    dim, block = dim % 2, BLOCKS[cast.granularity]
    check_multiple(x.shape[dim], block, f"e2m1 with {cast.granularity} scales")
    x = without_grad(x).float()
    if cast.hadamard is not None:
        x = hadamard(x, dim, cast.hadamard)
    scale_inv, tensor_scale_inv = block_scales(x, cast.granularity, dim, mx_mode=cast.mx_mode)
    if tensor_scale_inv is None:
        scale = mx_scale(scale_inv)
    else:
        scale = (scale_inv.float() * tensor_scale_inv).double().reciprocal().float().clamp(max=_FLOAT32_MAX)
    scaled = x.unflatten(dim, (scale.shape[dim], block)) * scale.unsqueeze(dim + 1)
    codes = encode(scaled.flatten(dim, dim + 1), draws)
    if dim == 0:
        codes, scale_inv = codes.t(), scale_inv.t()
    return Operand(pack(codes), scale_inv.contiguous(), tensor_scale_inv)


def dequantize(operand: Operand, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The lines that an operand of e2m1 stands for.

    A code times its block's scale is exact in float32 (e4m3: 6 significant bits), the scale of the tensor comes last. A GEMM
    takes the exact part, `operand._replace(tensor_scale_inv=None)`, and both tensors' scales after the sum.

    Args:
        operand: as `quantize_lines` returns it.
        dtype: of the result; float64 is exact.

    Returns:
        [lines, contracted].
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    values = decode(unpack(operand.qdata)).to(compute)
    scale = operand.scale_inv.to(compute)
    lines, blocks = scale.shape
    block = BLOCKS["1x16" if operand.scale_inv.dtype == E4M3FN.dtype else "1x32"]
    values = (values.view(lines, blocks, block) * scale[..., None]).view(values.shape)
    if operand.tensor_scale_inv is not None:
        values = values * operand.tensor_scale_inv.to(compute)
    return values.to(dtype)


def check_multiple(size: int, block: int, what: str) -> None:
    """Refuses a contracted dimension that blocks do not divide.

    Raises:
        ValueError: names the size, the nearest that fit, and the way out.
    """
    if size % block:
        below = size - size % block
        raise ValueError(
            f"{size} elements along the contracted dimension: {what} needs a multiple of {block}, the nearest are {below} "
            f"and {below + block}; pad it, or leave this GEMM in high precision"
        )
