"""The profiler as a counter of FP8 GEMMs, for `fp8core.verify`.

It counts the operators that really ran, compiled or not. A TorchDispatchMode would not do: compiled code passes it by.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FP8_GEMM_OPS = (
    "aten::_scaled_mm",
    "aten::_scaled_mm_v2",
    "aten::_scaled_grouped_mm",
    "fp8core::matmul",
)
# Attention kernels are built of CUTLASS too, and call themselves so
GEMM_KERNEL = re.compile(r"^(?!.*(flash|fmha|attention)).*(gemm|nvjet|cutlass|xmma|matmul)", re.IGNORECASE)
# cuBLAS writes e4m3 as q and e5m2 as r into the names of its nvjet kernels
FP8_KERNEL = re.compile(r"e4m3|e5m2|fp8|float8|nvjet_(sm\d+_)?[qr]{2}", re.IGNORECASE)


@dataclass
class Profiled:
    """What a profiler saw of a step; filled in when the step has ended.

    Attributes:
        counted: FP8 GEMMs that ran.
        fp8_share: of the GEMM kernels' time, in FP8 ones; None off CUDA.
        compiled: how many of them ran in compiled code.
    """

    counted: int = 0
    fp8_share: float | None = None
    compiled: int = 0


@contextmanager
def profiler_events(on_gpu: bool) -> Iterator[list[Any]]:
    """Profiles a block: operators, and kernels on a GPU; the list is filled once the block has ended without an exception."""
    # Kineto writes each start to stderr otherwise; without a GPU the older tracer starts a second faster
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    events: list[Any] = []
    with profile(use_kineto=on_gpu, use_device="cuda" if on_gpu else None) as profiler:
        yield events
        if on_gpu:
            torch.cuda.synchronize()
    events += profiler.function_events or []


@contextmanager
def profiling(on_gpu: bool) -> Iterator[Profiled]:
    """Profiles one step; what it saw is there once the block has ended without an exception."""
    seen = Profiled()
    with profiler_events(on_gpu) as events:
        yield seen
    gemms = fp8_gemms(events)
    seen.counted = len(gemms)
    seen.compiled = sum(
        any(caller.name.startswith(("CompiledFunction", "Torch-Compiled Region")) for caller in callers(gemm))
        for gemm in gemms
    )
    if on_gpu:
        times: Counter[bool] = Counter()
        for event in events:
            if event.device_type == DeviceType.CUDA and GEMM_KERNEL.search(event.name):
                times[FP8_KERNEL.search(event.name) is not None] += event.self_device_time_total
        seen.fp8_share = times[True] / times.total() if times.total() else 0.0


def fp8_gemms(events: Iterable[Any]) -> list[Any]:
    """Calls of `FP8_GEMM_OPS` among a profiler's `function_events`; a call within such a call is the same one.

    A dispatch mode, such as that of selective activation checkpointing, shows an operator above it and again below.
    """
    calls = [event for event in events if event.name in FP8_GEMM_OPS]
    return [call for call in calls if not any(caller.name in FP8_GEMM_OPS for caller in callers(call))]


def callers(event: Any) -> Iterator[Any]:
    """The events of the host within which one ran, innermost first."""
    while (event := event.cpu_parent) is not None:
        yield event
