"""The rate of matrix products that a device reaches here and now, by which a time that cannot be is known."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from harness.timing.timers import Timer

CUBES = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}
SAMPLES = 3
_reached: dict[str, float] = {}  # by kind of device: the best rate up to now


def reaches(flops_per_s: float, device: str, timer: Timer) -> bool:
    """Whether products in fp32, bf16 or FP8 reach a rate; larger ones are tried until one does, so that most cost little."""
    kind = torch.device(device).type
    if flops_per_s <= _reached.get(kind, 0.0):
        return True
    # A library may have threads of its own, which torch's settings do not limit.
    cores = len(os.sched_getaffinity(0)) / torch.get_num_threads() if kind == "cpu" else 1.0
    for cube in CUBES[kind]:
        for product in _products(cube, device):
            rate = 2e3 * cube**3 / min(timer.block(product, SAMPLES)) * max(cores, 1.0)
            _reached[kind] = max(rate, _reached.get(kind, 0.0))
            if flops_per_s <= rate:
                return True
    return False


def _products(cube: int, device: str) -> Iterator[Callable[[], object]]:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(cube, cube, device=device, dtype=dtype)
        yield lambda x=x: torch.mm(x, x)  # type: ignore[misc]
    if torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        codes, one = x.to(torch.float8_e4m3fn), torch.ones((), device=device)
        given = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        yield lambda: torch._scaled_mm(codes, codes.t(), **given)
