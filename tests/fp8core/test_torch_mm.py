"""Backend "torch": on a CPU with AMX, where torch 2.13 multiplies by single scales through oneDNN, and beside torch's public call."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.fx_passes import micro_pipeline_tp
from torch.nn import functional
from torch.torch_version import TorchVersion

from fp8core import E4M3FN, E4M3FNUZ, E5M2, quantize, scaled_mm
from fp8core.gemm import torch_mm

if TYPE_CHECKING:
    from fp8core.formats import Format
    from fp8core.scaling import Granularity
    from fp8core.tensor import Float8Tensor


def operands(M: int, K: int, N: int, a: Format, b: Format) -> tuple[Float8Tensor, Float8Tensor]:
    generator = torch.Generator().manual_seed(M + K + N)
    x, w = (torch.randn(rows, K, generator=generator) for rows in (M, N))
    return quantize(x, a), quantize(w, b).t()


SHAPES = [(1, 16, 16), (33, 128, 48), (17, 0, 32), (0, 16, 16)]
PAIRS = [(E4M3FN, E4M3FN), (E4M3FN, E5M2), (E4M3FNUZ, E4M3FNUZ)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "pair", "compiled"),
    [*((shape, pair, False) for shape in SHAPES for pair in PAIRS), (SHAPES[1], PAIRS[1], True)],
)
def test_single_scales_never_reach_onednn_and_the_bits_are_those_without_it(
    shape: tuple[int, int, int],
    pair: tuple[Format, Format],
    compiled: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: torch's own loops, oneDNN off and single scales. On a CPU without AMX, what would be done with it."""
    a, b = operands(*shape, *pair)
    monkeypatch.setattr(torch_mm, "_HAS_AMX", True)
    torch.compiler.reset()
    multiply = torch.compile(scaled_mm, backend="aot_eager", fullgraph=True) if compiled else scaled_mm
    product = multiply(a, b, dtype, backend="torch")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    own = torch._scaled_mm(a.qdata, b.qdata, scale_a=a.scale_inv, scale_b=b.scale_inv, out_dtype=dtype)
    assert torch.equal(product, own)


def test_onednn_is_off_within_a_product_and_back_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's own switch, read in the call; left alone on other CPUs, and for scales of rows."""
    seen = []
    real = torch._scaled_mm

    def spied(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(torch.backends.mkldnn.enabled)
        return real(*args, **kwargs)

    a, b = operands(32, 16, 48, E4M3FN, E4M3FN)
    monkeypatch.setattr(torch, "_scaled_mm", spied)
    assert torch.backends.mkldnn.enabled
    for has_amx in (True, False):
        monkeypatch.setattr(torch_mm, "_HAS_AMX", has_amx)
        scaled_mm(a, b, backend="torch")
        assert torch.backends.mkldnn.enabled
    with pytest.raises(ZeroDivisionError), torch_mm._WITHOUT_ONEDNN:
        1 / 0  # noqa: B018 - what fails within
    assert (seen, torch.backends.mkldnn.enabled) == ([False, True], True)


HAS_IT_ON_CPU = TorchVersion(torch.__version__) >= "2.13"  # 2.11 has not; 2.12 was not tried


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not HAS_IT_ON_CPU, reason="no public product on a CPU")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    ("granularity", "dtype"),
    [("tensorwise", torch.bfloat16), ("tensorwise", torch.float32), ("rowwise", torch.bfloat16)],
)
@pytest.mark.parametrize("fast", [False, True])
def test_the_public_product_has_the_same_bits(
    device: str, granularity: Granularity, dtype: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: `torch.nn.functional.scaled_mm`, on a CPU without oneDNN."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 128, generator=generator).to(device) for rows in (48, 32))
    a, b = quantize(x, E4M3FN, granularity), quantize(w, E4M3FN, granularity).t()
    kinds = functional.ScalingType
    kind = kinds.TensorWise if granularity == "tensorwise" else kinds.RowWise
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    public = functional.scaled_mm(
        a.qdata, b.qdata, a.scale_inv, kind, b.scale_inv, kind, output_dtype=dtype, use_fast_accum=fast
    )
    assert torch.equal(scaled_mm(a, b, dtype, use_fast_accum=fast, backend="torch"), public)


def test_async_tensor_parallelism_knows_the_private_product_alone() -> None:
    """Why the private one is called; where this fails, `fp8core.gemm.torch_mm` can call the public one."""
    source = inspect.getsource(micro_pipeline_tp)
    assert "aten._scaled_mm.default" in source
    assert "_scaled_mm_v2" not in source
