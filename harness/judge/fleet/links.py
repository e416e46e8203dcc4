"""Links of a fleet: which of them are out of line, by the rule of times of cards, kind by kind.

**What is compared.** Messages between two ranks (arm `send` of the suite `links`), with those of links of the same kind
(`harness.machine.links.kind`), transport, GPU, software and code, of all runs. A link is both directions; the slower counts.

**Rule.** At each size a link's score is log(median of its rounds / median of the links), and how far it may lie from the middle
says `harness.judge.fleet.limit`. A link is out of line only if each of its rounds is, so that what slows a machine for a
moment condemns no link; one that is slow at times alone passes. A bad network card slows all links of its host, and where there are few hosts that is half of them
or more. So the ends are judged first: an end's score is that of its fastest link, and an end out of line takes its links with
it; the others are judged among themselves. Fewer than three links of a kind tell nothing, nor, between hosts, fewer pairs of
hosts; nor do links that differ so much that one at half the speed of the middle would pass, or that fall in two groups. What all
links of a kind share is not seen. Lost NVLink (`harness.judge.fleet.nvlinks`) and bytes that arrived wrong need no time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

from harness.judge.fleet import nvlinks
from harness.judge.fleet.cards import alike
from harness.judge.fleet.link_group import LinkGroup, Operation, judged_group
from harness.judge.fleet.link_outlier import LinkOutlier
from harness.judge.fleet.link_rule import TOLERANCE, Pair
from harness.machine.link_rows import LinkRow, ends_of, link_row, size_of
from harness.machine.links import METRIC, SEND, SUITE, End, Members, kind
from harness.store import run_state
from harness.store.cause import REFUTED, Cause
from harness.store.compare import rows_of
from harness.store.json_columns import parse
from harness.store.text import bytes_, plural, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd

FIGURES = (METRIC, "algorithm_gb_s", "bus_gb_s")
CORRUPT = "corrupt"


@dataclass(frozen=True)
class Links:
    """What is known of the links in some rows.

    Attributes:
        groups: by kind.
        operations: all that were timed, the newest of each.
        missing: what failed or was cut short, with its reason.
        skipped: what was not asked of a machine, with its reason: one rank has no link.
        problems: rows that could not be read, and pairs without a row.
        unclear: why nobody can tell whether NVLink was lost, or how links are of which no message was timed.
        fewer_rounds: operations whose time was up before all rounds that were asked for.
        apart: outliers that no time shows: NVLink that is lost, bytes that arrived wrong.
        asked_of: runs and the arms that they have rows of.
    """

    groups: tuple[LinkGroup, ...] = ()
    operations: tuple[Operation, ...] = ()
    missing: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()
    fewer_rounds: tuple[str, ...] = ()
    apart: tuple[LinkOutlier, ...] = ()
    asked_of: tuple[tuple[str, str], ...] = ()

    @property
    def outliers(self) -> tuple[LinkOutlier, ...]:
        """All of them."""
        return (*self.apart, *(outlier for group in self.groups for outlier in group.outliers))

    @property
    def asked(self) -> bool:
        """Rows of links were there."""
        return bool(self.operations or self.missing or self.skipped or self.problems or self.apart)

    @property
    def failed(self) -> bool:
        """Something that was asked for has no result."""
        return bool(self.missing or self.problems)


def judge(
    frame: pd.DataFrame, states: Mapping[str, str], tolerance: float = TOLERANCE, unread: Sequence[str] = ()
) -> Links:
    """What is found among the links of all runs.

    Args:
        frame: rows of the store with all attempts.
        states: of the runs (`harness.store.run_state`): one that has not ended lacks what nothing in its rows names.
        tolerance: deviation that is no fault, 0.25 for 25 %.
        unread: files that could not be read, and why.
    """
    known = operations(frame)
    by_like: dict[tuple[str, ...], list[Operation]] = {}
    for one in known.operations:
        if one.arm == SEND:
            by_like.setdefault(one.like, []).append(one)
    tables = {like: _slower(own) for like, own in by_like.items()}
    # Ends and links of every kind and size: what one of them is rarely, one of many often is
    of = 2 * max(1, sum(len(sizes) for sizes in tables.values()))
    groups = [judged_group(like, by_like[like], tables[like], tolerance, of) for like in sorted(by_like)]
    lost, unclear = nvlinks.lost([(one.like[2], one.ends) for one in known.operations])
    return replace(
        known,
        groups=tuple(groups),
        problems=(*_unended(frame, states, unread), *known.problems),
        unclear=(*unclear, *_without_messages(known)),
        apart=(*known.apart, *lost),
    )


def _unended(frame: pd.DataFrame, states: Mapping[str, str], unread: Sequence[str]) -> Iterator[str]:
    """What may be missing though no row says so."""
    runs = dict.fromkeys(map(str, frame.loc[frame["suite"] == SUITE, "run_id"]))
    if runs and unread:
        yield f"{plural(len(unread), 'file')} could not be read: {some(unread, 1)}"
    for run in runs:
        state = states.get(run, run_state.UNKNOWN)
        if state == run_state.UNKNOWN:
            yield f"nothing says that run {run} has ended; give fleet its folder, with _run.json"
        elif state != "finished":
            yield f"run {run} is {state}: what it has not measured has no row; end it with resume={run}"


def _without_messages(known: Links) -> Iterator[str]:
    """Runs of which no link is judged: nobody asked for messages."""
    asked = {run for run, arm in known.asked_of if arm == SEND}
    for run in dict.fromkeys(run for run, _ in known.asked_of):
        if run not in asked:
            yield f"run {run} has no message (arm {SEND}), by which links are judged"


def operations(frame: pd.DataFrame) -> Links:
    """All operations, the newest of those that were measured several times; and what has no time, or arrived wrong."""
    own = frame[(frame["suite"] == SUITE) & (frame["metric"].isin(FIGURES))]
    records = list(rows_of(own.sort_values("attempt", kind="stable")))
    envs = {text: parse(text) for text in own["env"].unique()}
    newest = {_tried(r, envs): r["attempt"] for r in records}
    missing: dict[str, None] = {}
    skipped: dict[str, None] = {}
    problems: Counter[str] = Counter()
    apart: dict[LinkOutlier, None] = {}
    timed: dict[tuple[Any, ...], dict[str, LinkRow]] = {}
    asked_of = dict.fromkeys((str(row["run_id"]), str(row["arm"])) for row in records)
    for row in records:
        if row["status"] == "failed" and row["cause"] in REFUTED:
            apart[_corrupt(row)] = None  # once wrong, always: no later attempt takes it back
            continue
        if row["attempt"] != newest[_tried(row, envs)]:
            continue
        if row["status"] != "ok":
            unasked = row["status"] == "skipped" and row["cause"] == Cause.UNSUPPORTED
            (skipped if unasked else missing)[f"{row['arm']}: {row['reason']}"] = None
            continue
        try:
            read = link_row(row)
        except ValueError as error:
            problems[f"run {row['run_id']}, {row['arm']}: {error}"] += 1
            continue
        key = (read.arm, _like(read, envs[row["env"]]), read.size, read.places, row["run_id"], row["attempt"])
        timed.setdefault(key, {})[row["metric"]] = read
    found: dict[tuple[Any, ...], Operation] = {}
    sent: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
    rounds: dict[str, None] = {}
    for (arm, like, size, places, run, attempt), figures in timed.items():
        first = next(iter(figures.values()))
        pairs = (
            sent.setdefault((run, attempt, size, first.backend, first.ends), set()) if arm == SEND else set()
        )
        if len(figures) < len(FIGURES):
            continue
        pairs.add(first.members.ranks)
        found.pop((arm, like, size, places), None)  # the newest last
        found[arm, like, size, places] = _operation(figures, run, like)
        if len(first.samples) < first.rounds:
            rounds[f"run {run}, {arm} of {bytes_(size)}: {len(first.samples)} of {first.rounds}"] = None
    for (run, _, size, _, ends), there in sent.items():
        if absent := [pair for pair in permutations(range(len(ends)), 2) if pair not in there]:
            named = some([f"{a} > {b}" for a, b in absent])
            problems[f"run {run}, {bytes_(size)}: no message of ranks {named}; measure again"] += 1
    return Links(
        operations=tuple(found.values()),
        missing=tuple(missing),
        skipped=tuple(skipped),
        problems=tuple(f"{why} ({count} rows)" if count > 1 else why for why, count in problems.items()),
        fewer_rounds=tuple(rounds),
        apart=tuple(apart),
        asked_of=tuple(asked_of),
    )


def _like(read: LinkRow, env: Mapping[str, Any]) -> tuple[str, ...]:
    """What operations must share to be compared."""
    models = sorted({end.model for end in read.ends} - {""})
    return (_kind(read.members, read.ends), read.backend, *alike(env), read.calls, *models)


def _operation(figures: Mapping[str, LinkRow], run: str, like: tuple[str, ...]) -> Operation:
    time, algorithm, bus = (figures[name] for name in FIGURES)
    span = min(time.samples), max(time.samples)
    return Operation(
        time.arm, time.members, time.ends, time.size, time.value, span, algorithm.value, bus.value, run, like
    )


def _corrupt(row: Mapping[str, Any]) -> LinkOutlier:
    """What arrived wrong, by the ends that took part where the row says which."""
    resolved = parse(row["resolved"])
    names: tuple[str, ...] = (f"run {row['run_id']}",)
    link, size = "", 0
    try:
        ends, members = ends_of(resolved), Members.of(str(resolved["wrong_part"]))
        names = tuple(ends[rank].name for rank in members.ranks)
        link, size = _kind(members, ends), size_of(resolved)
    except (ValueError, KeyError, IndexError):
        pass  # rows of before that was kept: the reason says it in words
    return LinkOutlier(CORRUPT, names, link, size, 0.0, str(row["reason"]))


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
