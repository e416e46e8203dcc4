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
CALLS, ROUNDS = 40, 25
FP8 = torch.float8_e4m3fn


def training_step(layer: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    """One forward and backward pass of a layer [SIZE, SIZE] on SIZE tokens, gradients of both operands included."""
    x = torch.randn(SIZE, SIZE, dtype=dtype, requires_grad=True)
    gradient = torch.randn(SIZE, SIZE, dtype=dtype)

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


class _Bare(torch.autograd.Function):
    """The calls into torch and into kernels of a tensorwise layer, and nothing else: no check, no choice, no wrapper."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        amax, cast = ops.implementation("amax", x), ops.implementation("cast_both", x, FP8)
        codes, codes_t, scale_inv = cast(x, amax(x), FP8, False)
        weight_codes, weight_codes_t, weight_scale_inv = cast(weight, amax(weight), FP8, False)
        ctx.save_for_backward(codes_t, scale_inv, weight_codes_t, weight_scale_inv)
        return torch._scaled_mm(codes, weight_codes.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes_t, _, weight_codes_t, _ = ctx.saved_tensors
        amax, cast = ops.implementation("amax", grad), ops.implementation("cast_both", grad, FP8)
        grad_codes, grad_codes_t, _ = cast(grad, amax(grad), FP8, False)
        return (
            torch._scaled_mm(grad_codes, weight_codes_t.t()),
            torch._scaled_mm(grad_codes_t, codes_t.t()),
        )


class BareLinear(nn.Linear):
    """The floor of a tensorwise Float8Linear under `stubbed_kernels`: one autograd function with the same operator calls."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Bare.apply(input, self.weight)
        return result


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


def paired_ratio(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float, float]:
    """Time of `first` / time of `second`: the median over rounds that time both in turn, then microseconds of each.

    The time of this thread, in which a backward pass on the CPU runs too: what other processes take does not count.
    """

    def microseconds(step: Callable[[], object]) -> float:
        started = time.thread_time()
        for _ in range(CALLS):
            step()
        return (time.thread_time() - started) / CALLS * 1e6

    for step in (first, second):
        microseconds(step)
    rounds = []
    for index in range(ROUNDS):
        order = (first, second) if index % 2 else (second, first)
        times = {step: microseconds(step) for step in order}
        rounds.append((times[first] / times[second], times[first], times[second]))
    ratios, ours, theirs = zip(*rounds, strict=True)
    return statistics.median(ratios), statistics.median(ours), statistics.median(theirs)
