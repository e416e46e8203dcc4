"""The rate of matrix products that a device reaches here and now, by which a time that cannot be is known."""

from __future__ import annotations

import os
from time import process_time  # read before any arm could replace it; without the load of others
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.timing.timers import Timer

CUBES = (256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = 3
LONG_S = 0.02  # a larger product than one that takes so long reaches no more
_reached: dict[str, float] = {}  # by kind of device: the best rate up to now


def reaches(flops_per_s: float, device: str, timer: Timer) -> bool:
    """Whether products in fp32, bf16 or FP8 reach a rate; larger ones are tried until one does, so that most cost little.

    On a CPU by the time that this process had its cores, and for all of them: neighbours make no arm too fast.
    """
    kind = torch.device(device).type
    if flops_per_s <= _reached.get(kind, 0.0):
        return True
    fp8 = kind == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    for dtype in (torch.float32, torch.bfloat16, *((torch.float8_e4m3fn,) if fp8 else ())):
        for cube in CUBES:
            call = _product(cube, device, dtype)
            seconds = min(_seconds(call, timer) for _ in range(SAMPLES))
            _reached[kind] = max(2.0 * cube**3 / seconds, _reached.get(kind, 0.0))
            if flops_per_s <= _reached[kind]:
                return True
            if seconds > LONG_S:
                break
    return False


def _seconds(call: Callable[[], object], timer: Timer) -> float:
    if timer.method != "perf_counter":
        return 1e-3 * min(timer.block(call, 1))
    begin = process_time()
    call()
    return max(process_time() - begin, 1e-9) / len(os.sched_getaffinity(0))


def _product(cube: int, device: str, dtype: torch.dtype) -> Callable[[], object]:
    if dtype is not torch.float8_e4m3fn:
        x = torch.ones(cube, cube, device=device, dtype=dtype)
        return lambda: torch.mm(x, x)
    codes, one = torch.ones(cube, cube, device=device).to(dtype), torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        codes, codes.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
