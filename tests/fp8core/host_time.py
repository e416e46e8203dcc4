"""What a layer costs on the host: its kernels replaced by results made before, and Python calls counted.

Counts are the same in each run where times are not, so a regression test can hold them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from fp8core.kernels import ops

SIZE = 16  # the smallest layer that FP8 matrix units take: its arithmetic is nothing beside its dispatch
FP8 = torch.float8_e4m3fn


def training_step(layer: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    """One forward and backward pass of a square layer on as many tokens, gradients of both operands included."""
    size: Any = layer.in_features
    x = torch.randn(size, size, dtype=dtype, requires_grad=True)
    gradient = torch.randn(size, size, dtype=dtype)

    def step() -> None:
        layer(x).backward(gradient)
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None

    return step


@contextmanager
def stubbed_kernels() -> Iterator[None]:
    """Casts by kernels return what they returned the first time; an FP8 GEMM is a bfloat16 one of the same size.

    What is left of a Float8Linear with `kernels="always"` is its host time and the three GEMMs of an nn.Linear.
    """
    real, known = ops.implementation, {}
    operands = torch.randn(SIZE, SIZE, dtype=torch.bfloat16)

    def implementation(name: str, x: torch.Tensor, *dtypes: torch.dtype) -> Callable[..., Any]:
        def kernel(*args: Any) -> Any:
            key = (name, x.shape, *dtypes)
            if key not in known:
                known[key] = real(name, x, *dtypes)(*args)
            return known[key]

        return kernel

    def gemm(a: torch.Tensor, b: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.mm(operands, operands)

    with mock.patch.object(ops, "implementation", implementation), mock.patch("torch._scaled_mm", gemm):
        yield


def python_calls(step: Callable[[], object]) -> Counter[str]:
    """Python functions that one step enters, by file; C functions are not counted."""
    for _ in range(3):
        step()
    entered: Counter[str] = Counter()

    def count(frame: Any, event: str, _: object) -> None:
        if event == "call":
            entered[frame.f_code.co_filename] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return entered


def paired_ratio(
    first: Callable[[], object], second: Callable[[], object], calls: int = 40, count: int = 25
) -> tuple[float, float, float]:
    """Time of `first` / time of `second`: the median over `count` rounds that time `calls` of both in turn, then microseconds.

    The time of this thread, in which a backward pass on the CPU runs too: what other processes take does not count.
    """

    def microseconds(step: Callable[[], object]) -> float:
        started = time.thread_time()
        for _ in range(calls):
            step()
        return (time.thread_time() - started) / calls * 1e6

    for step in (first, second):
        microseconds(step)
    rounds = []
    for index in range(count):
        order = (first, second) if index % 2 else (second, first)
        times = {step: microseconds(step) for step in order}
        rounds.append((times[first] / times[second], times[first], times[second]))
    ratios, ours, theirs = zip(*rounds, strict=True)
    return statistics.median(ratios), statistics.median(ours), statistics.median(theirs)
