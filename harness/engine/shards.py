"""Shards: the cases of one sweep divided among several processes or machines, each of which knows its share alone.

`shard=0/4` is the first of four. No process distributes cases: every shard makes the same plan, deals all of its cases by
predicted cost in the same way and keeps its own, so shards need no contact, and one that is run again has the same
cases. Their rows lie in `results/<sweep>/<run_id>/shard-0-of-4/`, and merging the shards of several machines is
copying these folders; a case that two of them measured counts once, as the later attempt has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.engine.plan import refusing
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.engine.plan import PlannedCase, SweepPlan


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` shares of a sweep; `index` counts from 0."""

    index: int
    count: int

    @property
    def folder(self) -> str:
        """Where its rows lie within the run."""
        return f"shard-{self.index}-of-{self.count}"

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse(text: str) -> Shard:
    """`i/n` as a shard.

    Raises:
        UsageError: anything else, or an index that is not below the count.

    >>> parse("3/4")
    Shard(index=3, count=4)
    """
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    if found is None:
        raise UsageError(f"shard={text}: expected i/n, the shard and how many there are, such as shard=0/4")
    shard = Shard(int(found[1]), int(found[2]))
    if shard.index >= shard.count:
        last = f"0/{shard.count} to {shard.count - 1}/{shard.count}" if shard.count else "none"
        raise UsageError(f"shard={text}: shards count from 0, those of {shard.count} are {last}")
    return shard


def share(plan: SweepPlan, shard: Shard) -> SweepPlan:
    """What one shard measures of a plan, in the order of the plan."""
    mine = deal([cost for _, cost in costs(plan.cases)], shard.count)
    chosen = [planned for planned, owner in zip(plan.cases, mine, strict=True) if owner == shard.index]
    others = [planned for planned, owner in zip(plan.cases, mine, strict=True) if owner != shard.index]
    return replace(plan, cases=tuple(chosen), elsewhere=tuple(others))


def deal(sizes: Sequence[float], count: int) -> list[int]:
    """The owner of each item: the largest first, each to whoever has least so far (LPT).

    The heaviest share is at most 4/3 - 1/(3 count) of the smallest possible one (Graham, SIAM J. Appl. Math. 17, 1969,
    theorem 2). Equal sizes are dealt in their order and equal loads from the first on, so that all machines agree.

    Args:
        sizes: predicted cost of each item, not negative.
        count: owners, at least 1.

    >>> deal([1.0, 5.0, 3.0, 3.0], 2)
    [0, 0, 1, 1]
    """
    loads = [0.0] * count
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[item] = min(range(count), key=lambda owner: (loads[owner], owner))
        loads[owners[item]] += sizes[item]
    return owners


def costs(cases: Sequence[PlannedCase]) -> list[tuple[PlannedCase, float]]:
    """The predicted cost of each case, in units of an arm of a middling case.

    Suites count their work in units of their own, so it is taken against the mean of the suite. A training run takes as
    long as its work. A timed arm takes about as long as any other, since warm-up and rounds fill a given time, and
    longer where its calls are long: half the cost of a middling one is taken to be that floor.
    """
    mean: dict[str, float] = {}
    for suite in {planned.case.suite for planned in cases}:
        own = [_work(planned) for planned in cases if planned.case.suite == suite]
        mean[suite] = sum(own) / len(own)
    return [(planned, _cost(planned, mean)) for planned in cases]


def _work(planned: PlannedCase) -> float:
    with refusing(planned.case.suite, planned.suite, "work"):
        return planned.suite.work(planned.case)


def _cost(planned: PlannedCase, mean: Mapping[str, float]) -> float:
    usual = mean[planned.case.suite]
    relative = _work(planned) / usual if usual > 0 else 1.0
    each = relative if planned.is_trial else (1 + relative) / 2
    return len(planned.runnable) * each
