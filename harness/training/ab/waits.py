"""Which rank the others wait for.

Where collectives join all ranks their steps take equally long, whoever is slow. So the steps that lead into a block, which
are not timed, are profiled: what a rank needs for its own part of a step is the time of the step less that in which a
collective was under way and nothing else ran here. Whoever comes last into a collective finds all others there already,
and waits least.

On a CPU a collective is under way from when it is handed to gloo until it is done, and what else runs is operators; on a
GPU both are kernels, those of NCCL (RCCL) by their names. No GPU has run this yet.
"""

from __future__ import annotations

import math
import os
import statistics
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile, record_function

from harness.store.effect import MIN_ROUNDS
from harness.store.stats import t_interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Span = tuple[float, float]

STANDS_OUT = 1.1  # a rank whose own part of a step is so much longer than the others'
_SURELY = 1.05  # and with its whole interval above this
_WORTH_NAMING = 0.05  # of a whole step
_STEP = "harness.ab step"
_HOST_COLLECTIVES = ("gloo:", "ucc:", "mpi:")
_WRAPPERS = ("c10d::", "_c10d_functional::", "record_param_comms", "FSDP::")  # they may wait themselves


@contextmanager
def watched(on_gpu: bool) -> Iterator[list[float]]:
    """Profiles one step; the list then holds what this rank needed for its own part, in milliseconds."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes each start to stderr otherwise
    found: list[float] = []
    with profile(use_kineto=on_gpu, use_device="cuda" if on_gpu else None) as profiler:
        with record_function(_STEP):
            yield found
        if on_gpu:
            torch.cuda.synchronize()
    found.append(own_ms(profiler.function_events or []))


def own_ms(events: Iterable[Any]) -> float:
    """What a rank needed for its own part of a profiled step.

    Args:
        events: of the profiler, in microseconds.

    Returns:
        Milliseconds; NaN where the step itself is not among the events.
    """
    step: list[Span] = []
    waits: list[Span] = []
    kernels: list[Span] = []
    operators: list[Span] = []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if event.device_type == DeviceType.CUDA:
            if not getattr(event, "is_user_annotation", False):
                is_collective = "nccl" in event.name.lower() or "rccl" in event.name.lower()
                (waits if is_collective else kernels).append(span)
        elif event.name == _STEP:
            step.append(span)
        elif event.name.startswith(_HOST_COLLECTIVES):
            waits.append(span)
        elif not event.cpu_children and not event.is_async and not event.name.startswith(_WRAPPERS):
            operators.append(span)
    if len(step) != 1:
        return math.nan
    start, end = step[0]
    end = max([end, *(k[1] for k in kernels), *(w[1] for w in waits)]) if kernels else end
    inside = [(max(a, start), min(b, end)) for a, b in waits if a < end and b > start]
    busy = kernels or operators
    # Waiting alone: what both cover, less what is busy
    waited = _length([*inside, *busy]) - _length(busy)
    return (end - start - waited) / 1e3


def _length(spans: Iterable[Span]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def slowest(rounds: Sequence[Sequence[float]], step_ms: float) -> tuple[int, float, float] | None:
    """The rank that the others wait for.

    Args:
        rounds: of each round what each rank needed for its own part of a step; a round of which one is not known is left
            out. Steps of one round share what disturbs them, so the round is the unit.
        step_ms: a whole step, of which own parts may be little.

    Returns:
        Rank, its time over the median of the others', and by how many milliseconds it exceeds that; None where no rank
        surely stands out: the 95 % interval over rounds, widened for the number of ranks, must lie above 1.05, the ratio
        be 1.1 or more, and the excess at least 5 % of a whole step.
    """
    known = [each for each in rounds if all(t > 0 for t in each)]
    found = _outlier([[math.log(t) for t in each] for each in known], math.log(_SURELY), math.log(STANDS_OUT))
    if found is None:
        return None
    rank, log_ratio = found
    ms = statistics.median(each[rank] for each in known) * (1 - math.exp(-log_ratio))
    return (rank, math.exp(log_ratio), ms) if ms >= _WORTH_NAMING * step_ms else None


def latest(rounds: Sequence[Sequence[float]], step_ms: float) -> tuple[int, float] | None:
    """The rank that begins its steps later than the others, as one does that waits for its loader.

    Args:
        rounds: milliseconds between steps, of each round for each rank.
        step_ms: a step, by which they are judged.

    Returns:
        Rank, and by how many milliseconds it exceeds the median of the others; None where no rank surely stands out.
    """
    found = _outlier([[gap / step_ms for gap in each] for each in rounds], _SURELY - 1, STANDS_OUT - 1)
    return None if found is None else (found[0], found[1] * step_ms)


def _outlier(rounds: Sequence[Sequence[float]], surely: float, stands_out: float) -> tuple[int, float] | None:
    """The rank that most exceeds the median of the others, and by how much on average; None without one."""
    whole = [each for each in rounds if len(each) > 1 and all(map(math.isfinite, each))]
    if len(whole) < MIN_ROUNDS:
        return None
    found = []
    for rank in range(len(whole[0])):
        excess = [
            each[rank] - statistics.median([t for other, t in enumerate(each) if other != rank])
            for each in whole
        ]
        low, _ = t_interval(excess, 1 - 0.05 / len(whole[0]))
        if low > surely and statistics.fmean(excess) >= stands_out:
            found.append((statistics.fmean(excess), rank))
    return (max(found)[1], max(found)[0]) if found else None
