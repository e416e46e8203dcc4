"""Oracles: eager results for values, Dynamo's own counters for what was compiled."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from harness.timing import compiling
from harness.timing.compiling import CompileWatch, compile_unavailable, fresh_compile

needs_compiler = pytest.mark.skipif(
    compile_unavailable("cpu") is not None, reason=f"compile arms are off: {compile_unavailable('cpu')}"
)
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
SHAPES = [(4, 4 + n) for n in range(3)]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    compiling.reset()


def double(x: Tensor) -> Tensor:
    return x * 2 + 1


@needs_compiler
@torch._dynamo.config.patch(recompile_limit=2)
def test_each_shape_is_a_graph_and_one_function_of_too_many_is_an_error_and_never_eager() -> None:
    """One compiled arm a shape, as in a sweep: more of them than torch's limit of recompilations, here 2 in place of 8."""
    total, one = CompileWatch(), fresh_compile(double)
    for n, shape in enumerate(SHAPES):
        watch = CompileWatch()
        x = torch.randn(shape)
        compiled = fresh_compile(double)
        assert torch.equal(compiled(x), double(x))
        assert watch.fault() == ""
        watch = CompileWatch()
        assert torch.equal(compiled(x), double(x))
        assert watch.steady_fault() == ""
        if n < 2:
            one(x)
    assert total.summary()["compile_graphs"] == len(SHAPES) + 2
    with pytest.raises(FailOnRecompileLimitHit, match="Hard failure"):
        one(torch.randn(SHAPES[2]))


def test_an_arm_that_ran_eager_is_seen() -> None:
    """The stance turns torch.compile off from outside, as TORCHDYNAMO_DISABLE=1 does."""
    compiled = fresh_compile(double)
    watch = CompileWatch()
    with torch.compiler.set_stance("force_eager"):
        compiled(torch.randn(4, 4))
    assert "ran eager" in watch.fault()
    assert watch.summary()["compile_graphs"] == 0


def test_counters_that_were_cleared_hide_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {name: Counter[str]() for name in ("stats", "graph_break", "inductor", "aot_autograd")}
    monkeypatch.setattr("torch._dynamo.utils.counters", counters)
    counters["stats"]["unique_graphs"] = 5
    watch = CompileWatch()
    counters["stats"]["unique_graphs"] = 1
    assert watch.steady_fault()


def test_what_is_not_a_function_is_refused() -> None:
    for thing in (torch.nn.Linear(2, 2), functools.partial(double), torch.sin):
        with pytest.raises(TypeError, match="wrap it in one"):
            fresh_compile(thing)


def test_a_missing_compiler_is_named_with_the_way_out() -> None:
    """In a process of its own, because inductor reads CXX when it is imported."""
    program = "from harness.timing.compiling import compile_unavailable; print(compile_unavailable('cpu'))"
    environment = {**os.environ, "CXX": "no-such-compiler"}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "no-such-compiler does not run" in said
    assert "CXX" in said
