"""Links of one kind: an operation, what is judged of them, and why the others are not (rule: `harness.judge.fleet.links`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.fleet.link_outlier import LinkOutlier
from harness.judge.fleet.link_rule import ENOUGH, Found, Pair, Place, Score, direction_limit, out_of_line
from harness.machine.links import HOSTS, NETWORKS, PCIE, UNKNOWN, End, Members
from harness.store.text import bytes_, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NCCL = "nccl"
_DIRECTIONS = "their two directions are compared"
_NO_DIRECTIONS = "their two directions are not compared: over gloo those of one link may differ by chance"
BLIND = math.log(2)  # a limit beyond which nothing is judged
TWO_GROUPS = 0.25  # share of slow links from which they are another sort of link rather than faulty ones
SLOW, SLOW_END, SLOW_DIRECTION = "slow link", "slow end", "slow direction"


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


def judged_group(
    like: tuple[str, ...],
    sent: Sequence[Operation],
    by_size: Mapping[int, Mapping[Pair, Operation]],
    tolerance: float,
    of: int,
) -> LinkGroup:
    """What is found among links that may be compared.

    Args:
        like: what they share.
        sent: all messages.
        by_size: of each link that of the slower direction.
        tolerance: deviation that is no fault.
        of: scores that links and ends of all kinds are judged by.
    """
    every = {pair for links in by_size.values() for pair in links}
    ends = {place for pair in every for place in pair}
    outliers: list[LinkOutlier] = []
    judged: set[Pair] = set()
    spread: dict[int, Spread] = {}
    notes: dict[str, None] = {}
    for size, links in sorted(by_size.items()):
        if why := _too_few(like[0], links):
            notes[f"{why}; {_DIRECTIONS if like[1] == NCCL else _NO_DIRECTIONS}"] = None
            if like[1] == NCCL:
                outliers += _directions([one for one in sent if one.size == size], tolerance, of)
            continue
        found = out_of_line({pair: one.score for pair, one in links.items()}, tolerance, of)
        if found.rest and not found.limit <= max(BLIND, 2 * math.log1p(tolerance)):
            notes[_blind(size, found.limit)] = None
            continue
        middle = float(np.median([one.seconds for one in links.values()]))
        for place, (score, limit) in found.ends.items():
            outliers.append(_slow_end(place, links, score, limit, middle))
        judged |= {pair for pair in links if found.ends.keys() & set(pair)}
        if _another_sort(like[0], found, links):
            notes[_two_groups(size, len(found.links), len(links), "slower")] = None
            continue
        for pair, (score, limit) in found.links.items():
            outliers.append(_odd_link(links[pair], score, limit, len(found.rest), middle))
        judged |= set(found.links)
        if found.fast:
            notes[_two_groups(size, len(found.fast), len(links), "faster")] = None
            continue
        judged |= links.keys() & found.rest
        off = [one.seconds / middle - 1 for one in links.values()]
        spread[size] = Spread(min(off), max(off), math.expm1(found.limit))
        if left := links.keys() - judged:
            notes[
                f"cannot tell: without the links of what is slow {plural(len(left), 'link')} of this kind"
            ] = None
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


def _too_few(link: str, links: Mapping[Pair, Operation]) -> str:
    """Why the odd one of them can't be told; "" where it can. GPUs of a host share its way to other hosts."""
    way_out = "measure more ends at once, or give fleet the runs of other machines with such links"
    if len(links) < ENOUGH:
        count = "one link" if len(links) == 1 else f"{len(links)} links"
        return f"cannot tell: {count} of this kind, and the odd one takes {ENOUGH}; {way_out}"
    between = {_hosts(one, link) for one in links.values()}
    if link in (HOSTS, NETWORKS) and len(between) < ENOUGH:
        count = plural(len(between), "pair")
        return (
            f"cannot tell: {len(links)} links between {count} of hosts, whose network cards they share, and the odd one "
            f"takes {ENOUGH} pairs; {way_out}"
        )
    return ""


def _hosts(one: Operation, link: str) -> frozenset[tuple[str, ...]]:
    """Those that a way joins: all networks of a host go to others by the same cards, before and after it starts anew."""
    return frozenset(
        (end.host, end.network) if link == NETWORKS else (end.machine or end.host,) for end in one.both
    )


def _another_sort(link: str, found: Found, links: Mapping[Pair, Operation]) -> bool:
    """Whether the slow links may be healthy and of another sort: other PCIe paths, or GPUs on other rails of the network."""
    if len(found.links) < max(ENOUGH, TWO_GROUPS * len(links)):
        return False
    if (
        link == HOSTS
    ):  # not where all links between the same hosts are slow: then it is their way to each other
        slow = {_hosts(links[pair], link) for pair in found.links}
        return any(pair not in found.links and _hosts(one, link) in slow for pair, one in links.items())
    return link in (PCIE, UNKNOWN)


def _two_groups(size: int, count: int, of: int, how: str) -> str:
    return (
        f"cannot tell at {bytes_(size)}: {count} of {of} links are {how} than the rest, and nothing says whether they are of "
        "another sort or the slower ones are faulty; compare with another machine of this build"
    )


def _directions(sent: Sequence[Operation], tolerance: float, of: int) -> list[LinkOutlier]:
    """Links whose one direction takes longer than the other in every round, which takes no third link to tell."""
    known = {tuple(end.place for end in one.both): one for one in sent}
    found = []
    for (a, b), one in known.items():
        other = known.get((b, a))
        limit = direction_limit(len(sent) // 2, tolerance, of)
        if other is not None and one.score.low - other.score.high > limit:
            why = (
                f"takes {one.seconds / other.seconds:.2f} times as long as the other direction (limit {math.exp(limit):.2f}): "
                f"{one.bus:.3g} GB/s, the other {other.bus:.3g}"
            )
            names = tuple(end.name for end in one.both)
            off = one.seconds / other.seconds - 1
            found.append(LinkOutlier(SLOW_DIRECTION, names, one.like[0], one.size, off, why))
    return found


def _blind(size: int, limit: float) -> str:
    return (
        f"cannot tell at {bytes_(size)}: these links differ so much that one which takes {math.expm1(limit):.0%} longer than "
        "the middle would pass; measure again on idle machines, or with more axes.rounds"
    )


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
    return LinkOutlier(SLOW, names, one.like[0], one.size, math.expm1(score), why)
