"""ops: operators that tracers understand, and the plain reference behind them on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_facts import E4M3, ONE, calls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from fp8core.formats import E4M3FNUZ
from fp8core.kernels import ops, reference


def arguments(name: str, x: torch.Tensor) -> tuple[Any, ...]:
    """A call of the operator on x [M, K]."""
    if name == "matmul":
        codes = x.to(E4M3)
        return codes, codes, ONE, ONE, torch.bfloat16, 0
    return calls(x)[name]


@pytest.mark.parametrize("shape", [(48, 160), (1, 17), (130, 1)], ids=str)
@pytest.mark.parametrize("name", ops.OPERATORS)
def test_fake_equals_real(name: str, shape: tuple[int, int]) -> None:
    """Oracle: torch's `opcheck`: shapes, strides and dtypes of the shape-only twin; no output aliases anything."""
    args = arguments(name, torch.randn(shape).bfloat16())
    checks = ("test_faketensor",) if name == "matmul" else ("test_schema", "test_faketensor")
    opcheck(ops.OPERATORS[name], args, test_utils=checks)  # torch cannot compare FP8 inputs before and after


def test_fnuz_goes_to_the_reference() -> None:
    """Oracle: reference. The kernels encode OCP formats only; fnuz must not come out as one of those."""
    x = torch.randn(16, 32)
    assert ops.implementation("cast", x, E4M3FNUZ.dtype) is reference.cast
    codes, _ = ops.cast(x, reference.amax(x), E4M3FNUZ.dtype, False)
    assert codes.dtype == E4M3FNUZ.dtype
    assert codes.float().abs().max() == 240


@pytest.mark.parametrize("name", ["cast_both", "cast_rowwise_both", "cast_1x128_both", "cast_mx_both"])
def test_fake_traces_cuda_without_cuda(name: str) -> None:
    """Oracle: shapes of the real call. A fake CUDA tensor must trace on a machine without CUDA."""
    real = getattr(ops, name)(*arguments(name, torch.randn(40, 70)))
    with FakeTensorMode():
        x, one = torch.empty(40, 70, device="cuda"), torch.empty((), device="cuda")
        args = arguments(name, torch.empty(40, 70))[1:]
        fake = getattr(ops, name)(x, *(one if arg is ONE else arg for arg in args))
    assert [f.shape for f in fake] == [r.shape for r in real]
    assert all(f.device.type == "cuda" for f in fake)
