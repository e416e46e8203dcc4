"""Tables and sentences about links, for a terminal, a page and JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness.machine.links import SEND
from harness.store.text import bytes_, number, percent, plural, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.judge.fleet.link_group import LinkGroup, Operation
    from harness.judge.fleet.link_outlier import LinkOutlier
    from harness.judge.fleet.links import Links

# A table: its title, the names of its columns and its rows
Table = tuple[str, tuple[str, ...], "Sequence[tuple[str, ...]]"]
NO_GPU = "Measured over gloo between CPUs: this is no evidence about NCCL, NVLink or a GPU's network card."
MATRIX_MOST = 16  # ranks of a matrix that a page has room for


def lines(links: Links) -> Iterator[str]:
    """What is known of each kind of link, and what could not be judged."""
    for group in links.groups:
        yield f"Links {group.link}, {group.transport}, {group.model}: {_judged(group)}"
    if any(group.transport == "gloo" for group in links.groups):
        yield NO_GPU
    for why in (*links.missing, *links.skipped):
        yield f"No time of a link: {why}"
    if links.fewer_rounds:
        yield f"Fewer rounds than asked, the time for an operation was up: {some(links.fewer_rounds)}"


def _judged(group: LinkGroup) -> str:
    size = f"{plural(group.links, 'link')} of {plural(group.ends, 'end')}"
    if not group.judged:
        return f"{size}, none judged: {group.why_not}."
    rest = f"; {group.why_not}" if group.why_not else ""
    return f"{size}, judged {group.judged}{rest}."


def tables(links: Links) -> Iterator[Table]:
    """What is out of line, the operations of all ranks, how far links lie apart, and the matrix of messages."""
    if wrong := (*links.problems, *links.unclear):
        yield "Not as it should be", ("what",), [(why,) for why in wrong]
    if links.outliers:
        yield (
            "Links out of line",
            ("what", "between", "kind", ">size", "why"),
            [
                (o.what, _between(o), o.link, bytes_(o.size) if o.size else "", o.reason)
                for o in links.outliers
            ],
        )
    if spreads := [(group, size) for group in links.groups for size in group.spread]:
        yield (
            "A link's time over that of the middle one of its kind",
            ("kind", "transport", ">size", ">links", ">fastest", ">slowest", ">limit"),
            [
                (
                    g.link,
                    g.transport,
                    bytes_(size),
                    f"{g.links}",
                    percent(s.low),
                    percent(s.high),
                    _limit(s.limit),
                )
                for g, size in spreads
                for s in [g.spread[size]]
            ],
        )
    if whole := [one for one in links.operations if one.whole and one.arm != SEND]:
        yield (
            "All ranks at once; bandwidths as nccl-tests counts them, 1 GB is 1e9 bytes",
            ("operation", ">ranks", ">size", ">seconds", ">algorithm (GB/s)", ">bus (GB/s)"),
            [
                (
                    one.arm,
                    f"{len(one.ends)}",
                    bytes_(one.size),
                    *(number(x) for x in (one.seconds, one.algorithm, one.bus)),
                )
                for one in whole
            ],
        )
    for sent in matrices(links.operations):
        ends, size = sent[0].ends, sent[0].size
        yield (
            f"Messages of {bytes_(size)} from the rank of the line to that of the column (GB/s), run {sent[0].run_id}",
            ("from", *(f">{end.rank}" for end in ends)),
            [(end.name, *cells) for end, cells in zip(ends, cells_of(sent), strict=True)],
        )


def matrices(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """The largest messages of each run whose ranks a matrix has room for."""
    by_run: dict[tuple[str, tuple[Any, ...]], list[Operation]] = {}
    for one in operations:
        if one.arm == SEND and len(one.ends) <= MATRIX_MOST:
            by_run.setdefault((one.run_id, one.ends), []).append(one)
    for sent in by_run.values():
        largest = max(one.size for one in sent)
        yield [one for one in sent if one.size == largest]


def cells_of(sent: Sequence[Operation]) -> list[list[str]]:
    """The bandwidths of a matrix, by sender and receiver; "" where nothing was measured."""
    known = {one.members.ranks: number(one.bus) for one in sent}
    ranks = range(len(sent[0].ends))
    return [[known.get((a, b), "") for b in ranks] for a in ranks]


def _limit(limit: float) -> str:
    return percent(limit) if math.isfinite(limit) else "none"


def _between(outlier: LinkOutlier) -> str:
    return " > ".join(outlier.names)


def verdict(links: Links) -> str:
    """One sentence, positive only where links were judged."""
    every, judged = sum(g.links for g in links.groups), sum(g.judged for g in links.groups)
    if links.outliers:
        named = list(dict.fromkeys(f"{o.what} {_between(o)}" for o in links.outliers))
        return f"links out of line: {some(named)}; judged {judged} of {every}"
    why = list(
        dict.fromkeys([*(f"{g.link}: {g.why_not}" for g in links.groups if g.why_not), *links.unclear])
    )
    gaps = []
    if links.problems:
        gaps.append(some(links.problems, 2))
    if links.missing:
        gaps.append(f"{plural(len(links.missing), 'operation')} without a time, named above")
    if links.fewer_rounds:
        gaps.append(f"fewer rounds than asked of {plural(len(links.fewer_rounds), 'operation')}, named above")
    if not judged:
        first = next((g.why_not for g in links.groups if g.why_not), "")
        because = "; ".join(
            filter(None, [some(links.problems, 1), first or some([*links.missing, *links.skipped], 1)])
        )
        return f"can't tell: no link could be judged ({because})"
    limit = max((s.limit for g in links.groups for s in g.spread.values()), default=math.inf)
    found = (
        f"no link out of line; judged {judged} of {every}, a link is found that takes {_limit(limit)} longer in every round, a "
        "fault that all links of a kind share is not"
    )
    if links.skipped:
        found += f"; not asked of a machine: {plural(len(links.skipped), 'operation')}, named above"
    if gaps or why or not math.isfinite(limit):
        lacking = "; ".join([*gaps, *([f"not judged: {some(why)}"] if why else [])])
        return f"can't tell of all links: {lacking}; of the others {found}"
    return found


def as_dict(links: Links) -> dict[str, Any]:
    """Plain values."""
    return {
        "verdict": verdict(links) if links.asked else None,
        "groups": [_group(group) for group in links.groups],
        "outliers": [asdict(outlier) for outlier in links.outliers],
        "not_measured": [*links.missing, *links.skipped],
        "problems": [*links.problems, *links.unclear],
        "fewer_rounds": list(links.fewer_rounds),
        "operations": [
            {
                "operation": one.arm,
                "ends": [one.ends[rank].as_dict() for rank in one.members.ranks],
                "bytes": one.size,
                "seconds": one.seconds,
                "algorithm_gb_s": one.algorithm,
                "bus_gb_s": one.bus,
                "run_id": one.run_id,
            }
            for one in links.operations
        ],
    }


def _group(group: LinkGroup) -> dict[str, Any]:
    """With null for a limit that there is none of: JSON has no infinity."""
    values = asdict(group)
    for spread in values["spread"].values():
        spread["limit"] = spread["limit"] if math.isfinite(spread["limit"]) else None
    return values
