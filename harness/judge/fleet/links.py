"""Links of a fleet: which of them are out of line, by the rule of times of cards, kind by kind.

**What is compared.** Messages between two ranks (arm `send` of the suite `links`), with those of links of the same kind
(`harness.machine.links.kind`), transport, GPU, software and code, of all runs. A link is both directions; the slower counts.

**Rule.** At each size a link's score is log(median of its rounds / median of the links), and how far it may lie from the middle
says `harness.judge.fleet.limit`. A link is out of line only if each of its rounds is, so that what slows a machine for a
moment condemns no link; one that is slow at times alone passes. A bad network card slows all links of its host, and where there are few hosts that is half of them
or more. So the ends are judged first: an end's score is that of its fastest link, and an end out of line takes its links with
it; the others are judged among themselves. Fewer than `ENOUGH` links of a kind tell nothing, nor do links that differ so much
that one at half the speed of the middle would pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge.fleet.cards import alike
from harness.judge.fleet.limit import limits
from harness.machine.links import METRIC, SEND, SUITE, End, Members, kind
from harness.store.compare import rows_of
from harness.store.json_columns import parse
from harness.store.text import bytes_

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

ENOUGH = 3  # links, and ends, below which the odd one can't be told from the others
TOLERANCE = 0.25  # by which healthy links may differ; docs/fleet-links.md says what was seen
FIGURES = (METRIC, "algorithm_gb_s", "bus_gb_s")
BLIND = math.log(2)  # a limit beyond which nothing is judged
SLOW, FAST, SLOW_END = "slow link", "fast link", "slow end"

Place = tuple[str, ...]  # of an end: `End.place`
Pair = tuple[Place, Place]  # of a link, the smaller first


@dataclass(frozen=True, slots=True)
class Score:
    """Logarithms of the seconds of a link: of the median round, the fastest and the slowest."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of some ranks of a run: the medians of its rounds.

    Attributes:
        arm: which.
        members: who.
        ends: of all ranks of the run, by rank.
        size: bytes.
        seconds, algorithm, bus: median time, and the bandwidths in GB/s.
        rounds: fastest and slowest time.
        run_id: where it was measured.
        like: what operations must share to be compared.
    """

    arm: str
    members: Members
    ends: tuple[End, ...]
    size: int
    seconds: float
    rounds: tuple[float, float]
    algorithm: float
    bus: float
    run_id: str
    like: tuple[str, ...]

    @property
    def score(self) -> Score:
        """What it is judged by."""
        low, high = self.rounds
        return Score(math.log(self.seconds), math.log(low), math.log(high))

    @property
    def whole(self) -> bool:
        """All ranks took part."""
        return len(self.members.ranks) == len(self.ends)

    @property
    def both(self) -> tuple[End, End]:
        """The first two that took part: of a message, its sender and its receiver."""
        one, other = self.members.ranks[:2]
        return self.ends[one], self.ends[other]


@dataclass(frozen=True, slots=True)
class LinkOutlier:
    """A link, or all links of an end, that is out of line at one size."""

    what: str  # SLOW, FAST or SLOW_END
    names: tuple[str, ...]  # sender and receiver of the slower direction, or the end
    link: str  # kind
    size: int
    off: float  # seconds over the middle, minus 1
    reason: str


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds over those of the middle link, minus 1: of the fastest and the slowest link, and the limit of the rule."""

    low: float
    high: float
    limit: float


@dataclass(frozen=True)
class LinkGroup:
    """Links of a kind that may be compared.

    Attributes:
        link: their kind.
        transport: "gloo" or "nccl".
        model: of the GPU, or of the CPU.
        links, ends: how many.
        judged: links that were.
        why_not: why others were not; "" where all were.
        spread: by bytes of the message, where links were judged.
    """

    link: str
    transport: str
    model: str
    links: int
    ends: int
    judged: int
    why_not: str
    outliers: tuple[LinkOutlier, ...] = ()
    spread: Mapping[int, Spread] = field(default_factory=dict)


@dataclass(frozen=True)
class Links:
    """What is known of the links in some rows.

    Attributes:
        groups: by kind.
        operations: all that were timed, the newest of each.
        missing: why others have no time.
    """

    groups: tuple[LinkGroup, ...] = ()
    operations: tuple[Operation, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def outliers(self) -> tuple[LinkOutlier, ...]:
        """Those of all groups."""
        return tuple(outlier for group in self.groups for outlier in group.outliers)

    @property
    def asked(self) -> bool:
        """Rows of links were there."""
        return bool(self.operations or self.missing)


def judge(frame: pd.DataFrame, tolerance: float = TOLERANCE) -> Links:
    """What is found among the links of all runs.

    Args:
        frame: rows of the store with all attempts.
        tolerance: deviation that is no fault, 0.25 for 25 %.
    """
    found, missing = operations(frame)
    by_like: dict[tuple[str, ...], list[Operation]] = {}
    for one in found:
        if one.arm == SEND:
            by_like.setdefault(one.like, []).append(one)
    tables = {like: _slower(own) for like, own in by_like.items()}
    # Ends and links of every kind and size: what one of them is rarely, one of many often is
    of = 2 * max(1, sum(len(sizes) for sizes in tables.values()))
    groups = [_group(like, tables[like], tolerance, of) for like in sorted(by_like)]
    return Links(tuple(groups), tuple(found), missing)


def operations(frame: pd.DataFrame) -> tuple[list[Operation], tuple[str, ...]]:
    """All operations, the newest of those that were measured several times; and why others have no time."""
    own = frame[(frame["suite"] == SUITE) & (frame["metric"].isin(FIGURES))]
    records = list(rows_of(own.sort_values("attempt", kind="stable")))
    envs = {text: parse(text) for text in own["env"].unique()}
    newest = {_tried(r, envs): r["attempt"] for r in records}
    found: dict[tuple[Any, ...], Operation] = {}
    missing: dict[str, None] = {}
    figures: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in records:
        if row["attempt"] != newest[_tried(row, envs)]:
            continue
        if row["status"] != "ok":
            missing[f"{row['arm']}: {row['reason']}"] = None
            continue
        resolved = parse(row["resolved"])
        ends = tuple(End.of(end) for end in resolved["ends"])
        members = Members.of(row["part"])
        like = (_kind(members, ends), resolved["backend"], *alike(envs[row["env"]]), str(resolved["calls"]))
        size, places = int(resolved["bytes"]), tuple(ends[rank].place for rank in members.ranks)
        key = (row["arm"], like, size, places)
        values = figures.setdefault((*key, row["run_id"], row["attempt"]), {})
        values[row["metric"]] = row
        if len(values) == 3:
            seconds, algorithm, bus = (float(values[name]["value"]) for name in FIGURES)
            rounds = min(values[METRIC]["samples"]), max(values[METRIC]["samples"])
            found[key] = Operation(
                row["arm"], members, ends, size, seconds, rounds, algorithm, bus, row["run_id"], like
            )
    return list(found.values()), tuple(missing)


def _tried(row: Mapping[str, Any], envs: Mapping[str, Mapping[str, Any]]) -> tuple[Any, ...]:
    """What a later attempt of the same run replaces; two machines may have been given one run id."""
    return row["run_id"], envs[row["env"]].get("host_hash"), row["case_id"], row["arm"]


def _kind(members: Members, ends: Sequence[End]) -> str:
    """The kind of link between all of them, the widest where there are several."""
    kinds = {kind(ends[a], ends[b]) for i, a in enumerate(members.ranks) for b in members.ranks[i + 1 :]}
    return kinds.pop() if len(kinds) == 1 else "several kinds"


def _slower(of: Sequence[Operation]) -> dict[int, dict[Pair, Operation]]:
    """By size, of each link the message of the slower direction."""
    found: dict[int, dict[Pair, Operation]] = {}
    for one in of:
        first, second = sorted(end.place for end in one.both)
        links = found.setdefault(one.size, {})
        known = links.get((first, second))
        if known is None or one.seconds > known.seconds:
            links[first, second] = one
    return found


def _group(
    like: tuple[str, ...], by_size: Mapping[int, Mapping[Pair, Operation]], tolerance: float, of: int
) -> LinkGroup:
    every = {pair for links in by_size.values() for pair in links}
    ends = {place for pair in every for place in pair}
    outliers: list[LinkOutlier] = []
    judged: set[Pair] = set()
    spread: dict[int, Spread] = {}
    notes: dict[str, None] = {}
    for size, links in sorted(by_size.items()):
        if len(links) < ENOUGH:
            notes[_too_few(len(links))] = None
            continue
        scores = {pair: one.score for pair, one in links.items()}
        found = out_of_line(scores, tolerance, of)
        if found.limit > max(BLIND, 2 * math.log1p(tolerance)) and found.rest:
            notes[_blind(size, found.limit)] = None
            continue
        middle = float(np.median([one.seconds for one in links.values()]))
        for place, (score, limit) in found.ends.items():
            outliers.append(_slow_end(place, links, score, limit, middle))
        for pair, (score, limit) in found.links.items():
            outliers.append(_odd_link(links[pair], score, limit, len(found.rest), middle))
        judged |= {pair for pair in links if pair in found.rest or found.ends.keys() & set(pair)}
        off = [one.seconds / middle - 1 for one in links.values()]
        spread[size] = Spread(min(off), max(off), math.expm1(found.limit))
        if len(judged & links.keys()) < len(links):
            notes[f"without the links of what is slow, {_too_few(len(links.keys() - judged))}"] = None
    return LinkGroup(
        like[0],
        like[1],
        like[2],
        len(every),
        len(ends),
        len(judged),
        "; ".join(notes),
        tuple(outliers),
        spread,
    )


def _too_few(count: int) -> str:
    links = "one link" if count == 1 else f"{count} links"
    return (
        f"cannot tell: {links} of this kind, and the odd one takes {ENOUGH}; measure more ends at once, or give fleet the "
        "runs of other machines with such links"
    )


def _blind(size: int, limit: float) -> str:
    return (
        f"cannot tell at {bytes_(size)}: these links differ so much that one which takes {math.expm1(limit):.0%} longer than "
        "the middle would pass; measure again on idle machines, or with more axes.rounds"
    )


@dataclass(frozen=True, slots=True)
class Found:
    """What the rule finds among links of a kind, at one size.

    Attributes:
        ends: out of line -> how far their fastest links are from the middle, and the limit.
        links: likewise, of those that are not of such ends.
        rest: the links that were judged apart from those of such ends.
        limit: of a link; infinite where `rest` is empty.
    """

    ends: Mapping[Place, tuple[float, float]]
    links: Mapping[Pair, tuple[float, float]]
    rest: frozenset[Pair]
    limit: float


def out_of_line(scores: Mapping[Pair, Score], tolerance: float, of: int) -> Found:
    """The rule, on links' scores.

    Args:
        scores: of each link, at least `ENOUGH` of them.
        tolerance: deviation that is no fault.
        of: scores that links and ends are judged by.
    """
    fastest: dict[Place, list[Score]] = {}
    for pair, score in scores.items():
        for place in pair:
            fastest.setdefault(place, []).append(score)
    # One link alone says nothing of which of its ends is slow
    ends = {place: min(own, key=lambda one: one.middle) for place, own in fastest.items() if len(own) > 1}
    far_ends, _ = _far(ends, tolerance, of)
    bad = {place: far for place, far in far_ends.items() if far[0] > 0}
    rest = {pair: score for pair, score in scores.items() if not bad.keys() & set(pair)}
    far, limit = _far(rest, tolerance, of)
    return Found(bad, far, frozenset(rest if len(rest) >= ENOUGH else ()), limit)


def _far(
    scores: Mapping[Any, Score], tolerance: float, of: int
) -> tuple[dict[Any, tuple[float, float]], float]:
    if len(scores) < ENOUGH:
        return {}, math.inf
    (middle,), (limit,) = limits(np.array([[one.middle for one in scores.values()]]), tolerance, of)
    far = {
        name: (float(one.middle - middle), float(limit))
        for name, one in scores.items()
        if one.low - middle > limit or middle - one.high > limit
    }
    return far, float(limit)


def _slow_end(
    place: Place, links: Mapping[Pair, Operation], score: float, limit: float, middle: float
) -> LinkOutlier:
    own = [one for pair, one in links.items() if place in pair]
    end = next(end for one in own for end in one.both if end.place == place)
    best = min(own, key=lambda one: one.seconds)
    why = (
        f"the fastest of its {len(own)} links takes {math.exp(score):.2f} times as long as other ends' "
        f"(limit {math.exp(limit):.2f}): {best.bus:.3g} GB/s, the middle link {best.size / middle / 1e9:.3g}"
    )
    return LinkOutlier(SLOW_END, (end.name,), best.like[0], best.size, math.expm1(score), why)


def _odd_link(one: Operation, score: float, limit: float, count: int, middle: float) -> LinkOutlier:
    why = (
        f"takes {math.exp(score):.2f} times as long as the middle of {count} links (limit {math.exp(limit):.2f}): "
        f"{one.bus:.3g} GB/s, the middle link {one.size / middle / 1e9:.3g}"
    )
    names = tuple(end.name for end in one.both)
    return LinkOutlier(SLOW if score > 0 else FAST, names, one.like[0], one.size, math.expm1(score), why)
