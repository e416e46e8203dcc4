"""Python calls of one eager forward and backward pass: the regression test of what tests/benchmarks/test_host_time.py times.

Oracle: the counts of torchao's Float8Linear of the same recipe.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from host_time import SIZE, python_calls, stubbed_kernels, training_step
from torch import nn

import fp8core
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


def test_a_shape_that_is_refused_is_refused_again() -> None:
    """Shapes that fit are remembered; one that doesn't fit is not."""
    layer = float8_linear("tensorwise", "auto")
    for tokens in (SIZE, 17, 17):
        with pytest.raises(ValueError, match="17 tokens") if tokens == 17 else nullcontext():
            layer(torch.randn(tokens, SIZE, dtype=torch.bfloat16))


# Of a step by stubbed kernels, and by plain operators
LIMITS = {"tensorwise": (46, 71), "rowwise": (41, 73), "delayed": (53, 90)}


def own_files(step: Callable[[], object]) -> dict[str, int]:
    """Functions of fp8core that a step enters, by file; those of torch depend on its version and on who watches."""
    home = str(Path(fp8core.__file__).parent)
    return {file: count for file, count in python_calls(step).items() if file.startswith(home)}


def own_calls(step: Callable[[], object]) -> int:
    return sum(own_files(step).values())


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_a_plain_pass_reads_few_files(name: str) -> None:
    """What a reader must open to follow it; oracle: the count by which the layer is one page and its primitives."""
    assert len(own_files(training_step(float8_linear(name, "auto")))) <= 8


@pytest.mark.parametrize("name", LIMITS)
def test_own_python_calls_of_a_step(name: str) -> None:
    with stubbed_kernels():
        step = training_step(float8_linear(name, "always"))
        stubbed = own_calls(step)
        assert stubbed == own_calls(step)
    step = training_step(float8_linear(name, "auto"))
    plain = own_calls(step)
    assert plain == own_calls(step)
    assert stubbed <= LIMITS[name][0]
    assert plain <= LIMITS[name][1]
