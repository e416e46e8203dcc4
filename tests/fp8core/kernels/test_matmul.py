"""matmul: every scaling, ragged edges, and the choice of accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core.kernels import ops, reference
from fp8core.proof.adders import Register
from fp8core.proof.verify.oracle import TiledOperand
from fp8core.proof.verify.products import as_summed

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("tensorwise", "rowwise", "1x128 x 128x128", "1x128 x 1x128")


def operands(scaling: str, M: int, N: int, K: int, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, ...]:
    """(a, b_t, scale_inv_a, scale_inv_b); all positive, with rows of very different size where scales allow it."""
    spread = torch.logspace(-2, 2, M)[:, None] if scaling != "tensorwise" else torch.ones(M, 1)
    left, right = torch.rand(M, K) * spread, torch.rand(N, K)
    if scaling == "tensorwise":
        a, scale_a = reference.cast(left, reference.amax(left), dtype, False)
        b, scale_b = reference.cast(right, reference.amax(right), E4M3, False)
    elif scaling == "rowwise":
        a, scale_a = reference.cast_rowwise(left, dtype, False)
        b, scale_b = reference.cast_rowwise(right, E4M3, False)
    else:
        a, scale_a = reference.cast_1x128(left, dtype, False)
        if scaling.endswith("128x128"):
            b, _, scale_b = reference.cast_128x128_both(right, E4M3, False)
        else:
            b, scale_b = reference.cast_1x128(right, E4M3, False)
    return a, b, scale_a, scale_b


def exact(args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The product of the codes with their scales in float64, by expanding every scale."""
    a, b, scale_a, scale_b = args

    def expand(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = codes.double()
        for dim in range(scale.dim()):
            if 1 < scale.shape[dim] < codes.shape[dim] or (dim == 0 and scale.shape[0] < codes.shape[0]):
                scale = scale.repeat_interleave(128, dim).narrow(dim, 0, codes.shape[dim])
        return wide * scale.double()

    return expand(a, scale_a) @ expand(b, scale_b).t()


@pytest.mark.parametrize("promote_every", [0, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("size", [(17, 63, 48), (130, 252, 400), (64, 16, 63), (1300, 300, 32)], ids=str)
def test_product(
    scaling: str, size: tuple[int, int, int], dtype: torch.dtype, promote_every: int, device: torch.device
) -> None:
    """Oracle: the reference on the same codes, all positive, which a bad accumulator cannot hide in. E5M2 on the left, as
    grad_output; the last size has more tiles than programs, and bands of tiles that are not full.

    It sums in float64, on a GPU as the model of the accumulator does (`fp8core.proof.adders`). Bound: K float32
    additions, on a GPU one more in the last of 13 bits: the largest distance seen on an H200.
    """
    M, N, K = size
    args = operands(scaling, M, N, K, dtype)
    got = ops.matmul(*(t.to(device) for t in args), torch.float32, promote_every).cpu().double()
    want = exact(args)
    if device.type == "cuda":
        a, b_t, scale_a, scale_b = args
        blocks = scaling.startswith("1x128")  # each block of K leaves the unit by itself
        left, right = TiledOperand.given(a, scale_a), TiledOperand.given(b_t, scale_b)
        want = as_summed(left, right, Register(13, 128 * (blocks or promote_every > 0)), slice(None))
    bound = (K + 4) * 2.0**-24 + (2.0**-13 if device.type == "cuda" else 0.0)
    error = ((got - want).abs() / want).max()
    assert error <= bound, f"{float(error)} > {bound}"


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_output_dtype(out_dtype: torch.dtype, device: torch.device) -> None:
    """Oracle: the same kernel's float32 result, rounded by `Tensor.to`."""
    args = [t.to(device) for t in operands("rowwise", 48, 80, 64)]
    got = ops.matmul(*args, out_dtype, 128)
    want = ops.matmul(*args, torch.float32, 128).to(out_dtype)
    step = torch.finfo(out_dtype).eps
    assert got.dtype == out_dtype
    assert ((got.float() - want.float()).abs() <= step * want.float().abs()).all()


def test_refusals(device: torch.device) -> None:
    args: list[Any] = [t.to(device) for t in operands("rowwise", 32, 48, 64)]
    with pytest.raises(ValueError, match="promote_every is 7; expected one of 0, 32, 64, 128"):
        ops.matmul(*args, torch.float32, 7)
    with pytest.raises(ValueError, match="fit no recipe for M=32, N=48, K=64"):
        ops.matmul(args[0], args[1], args[2][:5], args[3], torch.float32, 0)
    with pytest.raises(ValueError, match=r"got \[32, 64\] and \[64, 48\]"):
        ops.matmul(args[0], args[1].t(), args[2], args[3], torch.float32, 0)
