"""Backend "triton": its own rules, every pair of scales at any size, and what fast accumulation chooses.

Its kernel is proven in `kernels/test_matmul.py` (interpreter, GPU) and `kernels/test_aot.py`; on a CPU the operator's
plain twin multiplies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core import BACKENDS, E4M3FN, E4M3FNUZ, E5M2, RECIPES, Float8Linear, quantize, scaled_mm
from fp8core.gemm import triton_mm

PAIRS = (
    ("tensorwise", "tensorwise"),
    ("rowwise", "rowwise"),
    ("rowwise", "tensorwise"),
    ("1x128", "128x128"),
    ("128x128", "1x128"),
    ("1x128", "1x128"),
)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(17, 63, 5), (1, 130, 129), (150, 270, 140), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("granularities", PAIRS, ids=" x ".join)
def test_product(granularities: tuple[Any, Any], size: tuple[int, int, int], out_dtype: torch.dtype) -> None:
    """Oracle: the float64 reference on the same codes: K float32 additions and one rounding; rows of unlike size."""
    M, K, N = size
    a = torch.rand(M, K) * torch.logspace(-2, 2, M)[:, None]
    qa, qb = (
        quantize(a, E5M2, granularities[0], dim=1),
        quantize(torch.rand(N, K), E4M3FN, granularities[1], dim=1),
    )
    want = scaled_mm(qa, qb.t(), torch.float64, backend="reference")
    got = scaled_mm(qa, qb.t(), out_dtype, backend="triton")
    bound = (K + 4) * 2.0**-24 + torch.finfo(out_dtype).eps / 2
    assert got.dtype == out_dtype
    assert (((got.double() - want) / want).abs() <= bound).all()


def test_fast_accumulation_is_the_choice_not_to_promote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what the operator is asked for, GEMM by GEMM of a layer whose recipe sums fast in the forward pass."""
    asked: list[int] = []
    real = triton_mm.ops.matmul

    def matmul(*args: Any) -> torch.Tensor:
        asked.append(args[-1])
        return real(*args)

    monkeypatch.setattr(triton_mm.ops, "matmul", matmul)
    layer = Float8Linear(32, 48, config=RECIPES["tensorwise"].with_backend("triton"))
    layer(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert asked == [0, 128, 128]


def test_its_rules_are_its_own() -> None:
    """Oracle: by hand: no size is refused, results of any dtype; formats, scales and devices are."""
    rules = BACKENDS["triton"]
    for size in ((1, 1, 1), (17, 100, 10), (0, 16, 16)):
        for granularity in ("tensorwise", "rowwise", "1x128", "128x128"):
            assert rules.unsupported(*size, E5M2, E5M2, granularity, torch.float32) is None
    for arguments, said in (
        ((16, 16, 16, E4M3FN, E4M3FN, "1x32"), "1x32"),
        ((16, 16, 16, E4M3FNUZ, E4M3FN), "not e4m3fnuz"),
        ((16, -1, 16, E4M3FN, E4M3FN), "K=-1"),
        ((16, 16, 16, E4M3FN, E4M3FN, "rowwise", torch.float64), "out_dtype"),
    ):
        assert said in str(rules.unsupported(*arguments))
    assert "mps" in str(rules.device_reason("mps", E4M3FN, E4M3FN))
