"""Links made up for tests: rows of the suite `links` as it writes them, with times from a seeded generator. Nothing was measured."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from report_fixtures import H200, write_run

from harness.machine.links import METRIC, SEND, End, Members, bandwidths, groups
from harness.store.case import Case
from harness.store.cause import Cause
from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

KIB = (64, 1024)
GB_S = 25.0  # of a healthy link
ROUNDS = 9


def case(kib: int) -> Case:
    return Case.of("links", {"ranks": "all", "kib": kib, "rounds": ROUNDS})


def hosts(count: int, per_host: int = 1) -> list[End]:
    """Ends on so many hosts, a GPU each, with NVLink to those of its host."""
    found = []
    for rank in range(count * per_host):
        host = rank // per_host
        linked = tuple(f"gpu{host}{i}" for i in range(per_host) if i != rank % per_host)
        device, gpu = f"cuda:{rank % per_host}", f"gpu{host}{rank % per_host}"
        found.append(
            End(rank, host, f"host{host}", f"net{host}", device, gpu, linked, machine=f"machine{host}")
        )
    return found


def without(ends: list[End], *pairs: tuple[int, int]) -> list[End]:
    """The same, where these pairs lack NVLink."""
    lost = {frozenset((ends[a].gpu, ends[b].gpu)) for a, b in pairs}
    return [replace(e, nvlinked=tuple(g for g in e.nvlinked or () if {e.gpu, g} not in lost)) for e in ends]


def wrong_bytes(ends: list[End]) -> Measurement:
    """A message of rank 1 to rank 2 that arrived otherwise than it was sent."""
    which = case(64)
    resolved = {"ends": [end.as_dict() for end in ends], "bytes": 65536, "wrong_part": "1>2"}
    return Measurement(
        "links", which.case_id, "send", which.axes_json, "link_s", "failed", reason="5 elements arrived wrong",
        cause=Cause.NUMERICS, resolved=resolved,
    )  # fmt: skip


def operation(arm: str, kib: int, members: Members, ends: Sequence[End], seconds: Sequence[float],
              backend: str = "nccl") -> list[Measurement]:  # fmt: skip
    """The three rows of one operation."""
    which, size, turns = case(kib), 1024 * kib, tuple(range(len(seconds)))
    both = [bandwidths(arm, size, len(members.ranks), one) for one in seconds]
    resolved = {"bytes": size, "backend": backend, "calls": 1, "ends": [end.as_dict() for end in ends]}
    figures = {METRIC: seconds, "algorithm_gb_s": [a for a, _ in both], "bus_gb_s": [b for _, b in both]}
    return [
        Measurement("links", which.case_id, arm, which.axes_json, metric, "ok", part=str(members),
                    samples=tuple(values), rounds=turns, resolved=resolved)
        for metric, values in figures.items()
    ]  # fmt: skip


def sent(ends: Sequence[End], times: Callable[[int, int, int], float] = lambda a, b, turn: 1.0, spread: float = 0.01,
         kibs: Sequence[int] = KIB, seed: int = 0, backend: str = "nccl") -> list[list[Measurement]]:  # fmt: skip
    """Messages between all ends: healthy times, which differ by `spread`, times what `times(from, to, round)` says."""
    draw = random.Random(seed)
    rows = []
    for kib in kibs:
        for members in groups(SEND, len(ends)):
            own = kib * 1024 / (GB_S * 1e9) * math.exp(draw.gauss(0, spread))
            seconds = [
                own * times(*members.ranks, turn) * math.exp(draw.gauss(0, 0.002)) for turn in range(ROUNDS)
            ]
            rows.append(operation(SEND, kib, members, ends, seconds, backend))
    return rows


def write(
    folder: Path,
    rows: Sequence[Sequence[Measurement]],
    run_id: str = "links-1",
    env: Mapping[str, object] = H200,
    state: str = "finished",
) -> Path:
    """A run of them."""
    write_run(folder / run_id, [[row for some in rows for row in some]], run_id=run_id, sweep="fleet", state=state,
              env={"host_hash": "0123456789ab", "gpu_uuid_hash": "aa" * 6, **env})  # fmt: skip
    return folder / run_id
