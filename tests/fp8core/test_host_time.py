"""Python calls of one eager forward and backward pass: the regression test of what tests/benchmarks/test_host_time.py times.

Oracle: the counts of torchao's Float8Linear of the same recipe.
"""

from __future__ import annotations

import os

import pytest
import torch
from host_time import SIZE, python_calls, training_step
from torch import nn

from fp8core import Float8Linear
from fp8core.gemm import torch_mm
from fp8core.recipe import recipe_named


def float8_linear(name: str, kernels: str) -> Float8Linear:
    base = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
    return Float8Linear.from_float(base, recipe_named(name).with_kernels(kernels))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU with AMX costs on top is not what a step on a GPU costs its host."""
    monkeypatch.setattr(torch_mm, "_HAS_AMX", False)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_fewer_python_calls_than_torchao(name: str) -> None:
    """Oracle: torchao 0.18, whose layer does the same arithmetic."""
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    torchao = pytest.importorskip("torchao.float8")
    from torchao.float8.float8_linear import Float8Linear as TheirLinear

    base = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
    theirs = TheirLinear.from_float(base, torchao.Float8LinearConfig.from_recipe_name(name))
    ours = python_calls(training_step(float8_linear(name, "auto"))).total()
    assert ours < python_calls(training_step(theirs)).total()
