"""Float8Tensor: what it holds, what it does with views, and that nothing else happens silently."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch

from fp8core import E4M3FN, E5M2, Float8Tensor, quantize
from fp8core.cast import scale_and_cast

aten = torch.ops.aten
GRANULARITIES = ("tensorwise", "rowwise")


def assert_same(got: Float8Tensor, want: Float8Tensor) -> None:
    assert isinstance(got, Float8Tensor)
    assert got.dtype == want.dtype
    assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
    assert torch.equal(got.scale_inv, want.scale_inv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantize_wraps_the_reference_cast(granularity: str, dtype: torch.dtype) -> None:
    """Oracle: cast.scale_and_cast, itself checked against other libraries."""
    x = torch.randn(17, 63).to(dtype).t()
    q = quantize(x, torch.float8_e5m2, granularity, dim=0, power_of_two=True)
    codes, scale_inv = scale_and_cast(x, E5M2, granularity, dim=0, power_of_two=True)
    assert (q.dtype, q.shape, q.stride(), q.device) == (dtype, x.shape, x.stride(), x.device)
    assert (q.granularity, q.format) == (granularity, E5M2)
    assert torch.equal(q.qdata.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(q.scale_inv, scale_inv)
    assert q.dequantize().dtype == dtype
    assert torch.equal(q.dequantize(torch.float64), codes.double() * scale_inv.double())


REARRANGEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "contiguous of t": lambda x: x.t().contiguous(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "rows": lambda x: x[128:],
    "columns": lambda x: x[:, 128:384],
    "every third column": lambda x: x[:, 2:40:3],
    "view": lambda x: x.view(4, 64, 512),
    "reshape": lambda x: x.reshape(2, 128, 512),
    "flat": lambda x: x.view(-1),
    "copy": copy.deepcopy,
}
BLOCKS = {"every third column", "flat"}
CUT = {  # what would cut scaling groups
    ("tensorwise", 1): set(),
    ("rowwise", 1): {"flat"},
    ("rowwise", 0): {"flat", "view", "reshape"},
    ("1x128", 1): BLOCKS,
    ("1x32", 1): BLOCKS,
    ("128x128", 1): BLOCKS | {"view", "reshape"},
}


@pytest.mark.parametrize(("granularity", "dim"), CUT)
@pytest.mark.parametrize("what", REARRANGEMENTS)
def test_rearranging_moves_codes_and_scales_together_or_is_refused(
    granularity: str, dim: int, what: str
) -> None:
    """Oracle: the same operation on the dequantised tensor."""
    q = quantize(torch.randn(256, 512) * torch.logspace(-3, 3, 256)[:, None], E4M3FN, granularity, dim=dim)
    operation = REARRANGEMENTS[what]
    if what in CUT[granularity, dim]:
        with pytest.raises(NotImplementedError, match="would cut"):
            operation(q)
        return
    got, want = operation(q), operation(q.dequantize())
    assert isinstance(got, Float8Tensor)
    assert got.granularity == granularity
    assert (got.shape, got.stride()) == (want.shape, want.stride())
    assert torch.equal(got.dequantize(), want)


UNKNOWN: dict[str, Callable[[Float8Tensor], object]] = {
    "add": lambda q: q + 1,
    "mm": lambda q: q @ q.t(),
    "sum": lambda q: q.sum(),
    "mul": lambda q: q * 2,
    "cat": lambda q: torch.cat([q, q]),
    "copy_": lambda q: torch.empty(16, 48).copy_(q),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_unknown_operations_raise_and_name_the_way_out(what: str) -> None:
    """Never a silent dequantise: not even where torch has a kernel for the FP8 dtype (mul, mm)."""
    q = quantize(torch.randn(16, 48), E4M3FN)
    with pytest.raises(NotImplementedError, match=r"call \.dequantize\(\) first, or fp8core\.scaled_mm"):
        UNKNOWN[what](q)


def test_conversion_changes_what_is_advertised_and_not_the_codes() -> None:
    q = quantize(torch.randn(16, 48), E4M3FN, "rowwise")
    as_bf16 = q.to(torch.bfloat16)
    assert as_bf16.dtype == as_bf16.dequantize().dtype == torch.bfloat16
    assert as_bf16.qdata.dtype == torch.float8_e4m3fn
    assert torch.equal(as_bf16.qdata.view(torch.uint8), q.qdata.view(torch.uint8))
    moved = q.to("meta")
    assert moved.device.type == moved.scale_inv.device.type == "meta"


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_saves_and_loads_without_pickled_code(granularity: str) -> None:
    """Oracle: the tensor that was saved; `weights_only=True` needs nothing but `import fp8core`."""
    q = quantize(torch.randn(16, 48, dtype=torch.bfloat16), E5M2, granularity)
    buffer = io.BytesIO()
    torch.save({"q": q}, buffer)
    buffer.seek(0)
    assert_same(torch.load(buffer, weights_only=True)["q"], q)


def test_views_in_inference_mode() -> None:
    """Oracle: those outside of it. Of what was made before, as autograd refuses an inference tensor as its view."""
    q = quantize(torch.randn(16, 32), torch.float8_e4m3fn)
    with torch.inference_mode():
        assert torch.equal(q.t().dequantize(), q.dequantize().t())
        assert quantize(torch.randn(16, 32), torch.float8_e4m3fn).t().shape == (32, 16)
