"""ops: operators that tracers understand, and the plain reference behind them on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_facts import E4M3, ONE, calls
from torch.library import opcheck

from fp8core.kernels import ops


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
