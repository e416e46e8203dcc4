"""Peer `example`: a cast and a product that are not ours, measured in the same rounds and checked like every other arm."""

from __future__ import annotations

import torch

from harness.peers import Peer


def missing(device: str) -> str | None:
    """Why it can't run on a device, with the way to get it; None where it can."""
    return None


def version() -> str:
    """The library that is measured."""
    return str(torch.__version__)


def cast(x: torch.Tensor, dtype: torch.dtype, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x [M, K], and the float32 scale_inv ([] or [M, 1]) that multiplies them to come back."""
    top = torch.finfo(dtype).max
    amax = x.abs().amax() if granularity == "tensorwise" else x.abs().amax(dim=-1, keepdim=True)
    scale = (top / amax.double().clamp(min=1e-12)).float()
    return (x.float() * scale).clamp(-top, top).to(dtype), scale.reciprocal()


def gemm(
    a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, fast: bool
) -> torch.Tensor:
    """D [M, N] in bfloat16 of codes a [M, K] row-major and b [K, N] column-major."""
    return torch._scaled_mm(
        a, b, scale_a=a_scale_inv, scale_b=b_scale_inv, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


PEER = Peer(
    arm="example",
    doc="the example of docs/examples/extension",
    missing=missing,
    version=version,
    recipes=("tensorwise", "rowwise"),
    modes=("eager",),
    cast=cast,
    gemm=gemm,
)
