"""Suite `links`: how fast bytes go between ranks, by pair of ranks, by operation and by size.

A case is a size and a number of ranks, an arm an operation. Rows are of a pair (`part` "0>1": a message from rank 0 to rank 1;
"0-1": a collective of the two) and of all ranks at once ("0-1-2-3"); `resolved.ends` says by rank which host and device that
is. Each gives seconds and the two bandwidths of nccl-tests (`harness.machine.links`). Before they are timed the bytes that
arrive are compared with those that were sent.

The ranks are those that torchrun has started, on any number of hosts; else as many as are asked for are started here.
One rank has no link, and its rows are skipped: nothing was judged. gloo carries CPUs' bytes and says nothing about NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.machine import ranks, torchrun
from harness.machine.link_times import RankTimes, Survey, calls, measure
from harness.machine.links import (
    ALL_GATHER,
    ALL_REDUCE,
    METRIC,
    REDUCE_SCATTER,
    SEND,
    Members,
    bandwidths,
    groups,
    undivided,
)
from harness.store.cause import Cause
from harness.suites.common import refuse_shapes, with_defaults
from harness.timing.workload import ArmInfo, Axis, Series, Trial, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from harness.store.case import Case, Scalar

__all__ = ["METRIC"]  # of a row that says why there is none

TIMEOUT_S = 600.0  # of all rounds of all pairs
ROUNDS_SHARE = 0.5  # of it, after which no other round begins: a slow pair takes rounds, not the whole matrix
LEAST_S = 2.0  # that rounds go on, since another process's burst lasts as long as some
MOST_ROUNDS = 50
ALL = "all"
MOST = 32  # ranks: 496 pairs, one after the other

AXES: Mapping[str, Axis] = {
    "ranks": Axis(
        "processes; all: those of torchrun, else a rank for each GPU here", words=(ALL,), default=ALL
    ),
    "kib": Axis("KiB of the message, of what is gathered or of what is reduced"),
    "rounds": Axis("samples of each pair, at least", default=7),
}
ARMS: Mapping[str, ArmInfo] = {
    SEND: ArmInfo("a message from one rank to another, and 4 bytes back"),
    ALL_REDUCE: ArmInfo("the sum of all ranks' data, in all ranks"),
    ALL_GATHER: ArmInfo("the shards of all ranks, in all ranks"),
    REDUCE_SCATTER: ArmInfo("the sum of all ranks' data, a shard in each"),
}


def points(
    shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
) -> list[dict[str, Scalar]]:
    """No linked axes; a size must be given.

    Raises:
        ValueError: no size, or named shapes, for which there is no use.
    """
    refuse_shapes("links", shapes, "sizes by axes.kib")
    if "kib" not in axes:
        raise ValueError("suite links needs axes.kib, the size of a message in KiB")
    return with_defaults([{}], axes, AXES)


def world(case: Case, device: str) -> int:
    """How many ranks a case takes here."""
    if dict(case.axes)["ranks"] != ALL:
        return case.integer("ranks")
    if torchrun.started() or device != "cuda":
        return max(1, torchrun.started())
    import torch

    return max(1, torch.cuda.device_count())


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """One rank, too many of them, or too few GPUs."""
    count, started = world(case, device), torchrun.started()
    if count == 1:
        return Unsupported(
            "device",
            "not judged: one rank, which has no link; start several by ranks=N on one machine, or by "
            "torchrun --nnodes=N ... -m harness sweep=fleet",
        )
    if count > MOST:
        return Unsupported(
            "device",
            f"{count} ranks have {count * (count - 1) // 2:,} pairs; at most {MOST} ranks: measure each node by itself, "
            "and between nodes with --nproc-per-node=1",
        )
    if started > 1 and started != count:
        why = (
            f"ranks={count}, and torchrun has started {started}; leave ranks= out, or run it without torchrun"
        )
        return Unsupported("device", why)
    missing = None if started else ranks.gpus_missing(count, device)
    return Unsupported("device", missing) if missing else None


def work(case: Case) -> float:
    """Bytes of a message."""
    return 1024.0 * case.integer("kib")


def trial(case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]) -> Trial:
    """Times all groups of ranks, round by round."""
    size, count = 1024 * case.integer("kib"), world(case, device)
    least = case.integer("rounds")
    survey = Survey(
        arm, size, least, max(MOST_ROUNDS, least), LEAST_S, TIMEOUT_S * ROUNDS_SHARE, case.seed, device
    )
    resolved: dict[str, object] = {
        "world": count,
        "bytes": size,
        "calls": calls(device, size),
        "timed": "the slowest rank of the group; of a message its sender, until 4 bytes came back",
    }
    try:
        every: list[RankTimes] = ranks.run(measure, count, survey, timeout_s=TIMEOUT_S, device=device)
    except ranks.RanksError as error:
        trace = {"traceback": str(error)[-4000:]}
        return Trial((), resolved | trace, str(error).splitlines()[0], cause=Cause.RUN)
    resolved |= {"backend": every[0].backend, "ends": [seen.end for seen in every]}
    on_step(least, least)
    if wrong := next((seen for seen in every if seen.wrong), None):
        return Trial((), resolved | {"wrong_part": wrong.wrong_part}, wrong.wrong, cause=Cause.NUMERICS)
    uneven = [why for members in groups(arm, count) if (why := undivided(arm, size, len(members.ranks)))]
    series = []
    for part, seconds in slowest(every).items():
        turns, n = tuple(range(len(seconds))), len(Members.of(part).ranks)
        both = [bandwidths(arm, size, n, took) for took in seconds]
        series += [
            Series(METRIC, seconds, turns, part),
            Series("algorithm_gb_s", tuple(algorithm for algorithm, _ in both), turns, part),
            Series("bus_gb_s", tuple(bus for _, bus in both), turns, part),
        ]
    return Trial(series, resolved, refusal=uneven[0] if uneven else "")


def slowest(every: Sequence[RankTimes]) -> dict[str, tuple[float, ...]]:
    """Seconds by group and round: an operation is over when its slowest rank is done."""
    parts = dict.fromkeys(part for seen in every for part in seen.seconds)
    return {
        part: tuple(
            max(turn) for turn in zip(*(s.seconds[part] for s in every if part in s.seconds), strict=True)
        )
        for part in parts
    }
