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
import re
import statistics
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch._C._autograd import DeviceType
from torch.autograd.profiler import record_function

from fp8core.profiled_gemms import profiler_events
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
def profiled(on_gpu: bool) -> Iterator[list[Any]]:
    """`profiler_events` of one step, which is an event itself."""
    with profiler_events(on_gpu) as events, record_function(_STEP):
        yield events


def own_ms(events: Iterable[Any]) -> float:
    """What a rank needed for its own part of a profiled step.

    Args:
        events: of the profiler, in microseconds.

    Returns:
        Milliseconds; NaN where the step itself is not among the events.
    """
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for event in events:
        spans[_kind(event)].append((event.time_range.start, event.time_range.end))
    waits, kernels = spans["wait"], spans["kernel"]
    if len(spans["step"]) != 1:
        return math.nan
    ((start, end),) = spans["step"]
    if kernels:
        end = max(end, *(last for _, last in (*kernels, *waits)))
    inside = [(max(a, start), min(b, end)) for a, b in waits if a < end and b > start]
    busy = kernels or spans["operator"]
    # Waiting alone: what both cover, less what is busy
    waited = _length([*inside, *busy]) - _length(busy)
    return (end - start - waited) / 1e3


def _kind(event: Any) -> str:
    """ "step", "wait" (a collective), "kernel", "operator", or "" for what counts for nothing."""
    if event.device_type == DeviceType.CUDA:
        if getattr(event, "is_user_annotation", False):
            return ""
        return "wait" if re.search("nccl|rccl", event.name, re.IGNORECASE) else "kernel"
    if event.name == _STEP:
        return "step"
    if event.name.startswith(_HOST_COLLECTIVES):
        return "wait"
    return "" if event.cpu_children or event.is_async or event.name.startswith(_WRAPPERS) else "operator"


def _length(spans: Iterable[Span]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def slow_rank(
    steps: Sequence[Sequence[float]], own: Sequence[Sequence[float]], gaps: Sequence[Sequence[float]]
) -> str:
    """The rank that the others wait for, and for what; "" if none surely stands out.

    That is: the 95 % interval over rounds, widened for the number of ranks, lies above 1.05, the ratio is 1.1 or more, and
    the excess at least 5 % of a whole step. Steps of one round share what disturbs them, so the round is the unit. A rank
    that waits for its loader begins its steps later than the others. Of both what costs more is named.

    Args:
        steps: milliseconds of a whole step, of each round for each rank.
        own: of that the rank's own part, likewise; whole steps are compared where it was not seen.
        gaps: milliseconds between steps, likewise.
    """
    if not steps:
        return ""
    step_ms = statistics.median(map(max, steps))
    costs = [(0.0, "")]
    known = [each for each in own or steps if all(t > 0 for t in each)]
    logs = [[math.log(t) for t in each] for each in known]
    if found := _outlier(logs, math.log(_SURELY), math.log(STANDS_OUT)):
        log_ratio, rank = found
        ms = statistics.median(each[rank] for each in known) * (1 - math.exp(-log_ratio))
        if ms >= _WORTH_NAMING * step_ms:
            part = "for its own part of a step" if own else "a step"
            costs.append((ms, f"rank {rank} takes about {100 * math.expm1(log_ratio):.0f} % longer {part}"))
    if found := _outlier([[gap / step_ms for gap in each] for each in gaps], _SURELY - 1, STANDS_OUT - 1):
        ms = found[0] * step_ms
        costs.append(
            (ms, f"rank {found[1]} spends about {ms:.3g} ms more between steps (data loader, logging)")
        )
    what = max(costs)[1]
    return what and f"{what} than the other ranks: all wait for it"


def _outlier(rounds: Sequence[Sequence[float]], surely: float, stands_out: float) -> tuple[float, int] | None:
    """By how much on average one rank most exceeds the median of the others, and which; None without one."""
    whole = [each for each in rounds if len(each) > 1 and all(map(math.isfinite, each))]
    if len(whole) < MIN_ROUNDS:
        return None
    found = []
    for rank in range(len(whole[0])):
        excess = [each[rank] - statistics.median([*each[:rank], *each[rank + 1 :]]) for each in whole]
        low, _ = t_interval(excess, 1 - 0.05 / len(whole[0]))
        if low > surely and statistics.fmean(excess) >= stands_out:
            found.append((statistics.fmean(excess), rank))
    return max(found, default=None)
