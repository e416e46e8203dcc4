"""Backend "reference": dequantise, then multiply in high precision. The oracle, and the emulation.

    tensorwise, rowwise    D = ((codes_A @ codes_B) * scale_inv_A) * scale_inv_B
    1x128, 128x128         D = sum over blocks g of K: ((codes_A,g @ codes_B,g) * scale_inv_A,g) * scale_inv_B,g
    1x32 (MX)              D = (codes_A * 2**e_A) @ (codes_B * 2**e_B)
    e2m1, 1x16 or 1x32     the same with the scales of blocks; a code times an e4m3 scale has 6 significant bits

FP8 codes are exact in float32, and so is the product of two; scaling after the sum rounds less often than
scaling before it, and a power of two does not round at all. The sum is formed in float64 if `out_dtype` is
float64 and in float32 otherwise. Any shape, layout, format pair and device is accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import library
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fp8core import four_bits
from fp8core.formats import E8M0FNU
from fp8core.gemm import layout
from fp8core.gemm.backend import Backend
from fp8core.scaling import BLOCK, Operand, broadcast_block_scales

if TYPE_CHECKING:
    from fp8core.formats import Format


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """A [M, K] @ B [K, N] with their scales: see `fp8core.gemm.scaled_mm`. `use_fast_accum` has no meaning here."""
    compute = torch.float64 if out_dtype == torch.float64 else torch.float32
    if torch.uint8 in (a.dtype, b.dtype):
        K = a.shape[1] << (a.dtype == torch.uint8)
        made: torch.Tensor = _four_bit_mm(a, b.t(), scale_inv_a, scale_inv_b.t(), K, out_dtype)
        return made
    left, right = a.to(compute), b.to(compute)
    if scale_inv_a.dtype == E8M0FNU.dtype:
        left = left * broadcast_block_scales(scale_inv_a, a.shape).to(compute)
        return torch.mm(left, right * broadcast_block_scales(scale_inv_b, b.shape).to(compute)).to(out_dtype)
    if scale_inv_a.dim() == 0:
        return (torch.mm(left, right) * scale_inv_a.to(compute) * scale_inv_b.to(compute)).to(out_dtype)
    (M, K), N = a.shape, b.shape[1]
    length = BLOCK if scale_inv_a.shape[1] == -(-K // BLOCK) else K  # of one block: 128, or rowwise all of K
    total = left.new_zeros((M, N))
    groups = scale_inv_a.shape[1]
    if not torch.compiler.is_compiling() and shapes_alone(a):
        groups = min(
            groups, 2
        )  # the second meets what the first left behind; every further one finds the same
    for group in range(groups):
        along_k = slice(group * length, (group + 1) * length)
        of_a = broadcast_block_scales(scale_inv_a[:, group : group + 1], torch.Size((M, 1))).to(compute)
        of_b = broadcast_block_scales(scale_inv_b[group : group + 1], torch.Size((1, N))).to(compute)
        total += torch.mm(left[:, along_k], right[along_k]) * of_a * of_b
    return total.to(out_dtype)


@library.custom_op("fp8core::four_bit_mm", mutates_args=())
def _four_bit_mm(
    a: torch.Tensor,
    b_t: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    K: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """A [M, K] @ B_t [N, K].T, of which one at least is packed e2m1; an operator, so that who looks on knows what ran."""
    compute = torch.float64 if out_dtype == torch.float64 else torch.float32
    left, right = (
        four_bits.dequantize(Operand(codes, scale_inv), compute)
        if codes.dtype == torch.uint8
        else codes.to(compute) * broadcast_block_scales(scale_inv, codes.shape).to(compute)
        for codes, scale_inv in ((a, scale_inv_a), (b_t, scale_inv_b))
    )
    tf32 = torch.backends.cuda.matmul.allow_tf32 if a.is_cuda else False
    if not tf32:
        return torch.mm(left, right.t()).to(out_dtype)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return torch.mm(left, right.t()).to(out_dtype)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = True


_four_bit_mm.register_fake(
    lambda a, b_t, _a, _b, _K, out_dtype: a.new_empty((a.shape[0], b_t.shape[0]), dtype=out_dtype)
)


class ShapesAlone(FakeTensorMode):
    """Fake tensors of which nobody asks but sizes and lifetimes: a loop over the blocks of K ends with its second pass.

    Only for what is thrown away afterwards: what is traced, or whose operators are counted, needs `FakeTensorMode`.

    Args:
        kernels: they stand for tensors on a GPU that has fp8core's kernels, whichever device they are made on.
    """

    def __init__(self, *, kernels: bool = False) -> None:
        super().__init__()
        self.kernels = kernels


def shapes_alone(tensor: torch.Tensor) -> ShapesAlone | None:
    """The mode that it was made under; None of every other tensor."""
    mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
    return mode if isinstance(mode, ShapesAlone) else None


class Reference(Backend):
    """`matmul` as a backend; `bf16_only` as that of the backend that it stands in for. It refuses nothing but broken blocks of e2m1."""

    is_fp8 = False

    def __init__(self, name: str, bf16_only: frozenset[str] = frozenset()) -> None:
        self.name, self.bf16_only = name, bf16_only

    matmul = staticmethod(matmul)

    def shape_reason(
        self,
        M: int,
        K: int,
        N: int,
        a_fmt: Format | torch.dtype | str,
        b_fmt: Format | torch.dtype | str,
        granularity: str = "tensorwise",
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> str | None:
        """Why e2m1 can't be cast along K."""
        return layout.block_reason(K, a_fmt, b_fmt, granularity)
