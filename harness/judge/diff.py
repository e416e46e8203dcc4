"""What changed between two runs: set-up, what ran, times and where they went (`python -m harness diff RUN RUN`).

Two runs were not measured round by round, so that a drift of the machine between them is not cancelled. Their ratio is
formed from the medians of rounds, with the interval of Welch's t on logarithms; a difference within the noise floor that
either run saw between two copies of its own baseline is none. The baseline itself is the control: where it moved as far
as the rest, the machine did, not the code.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.store import stats
from harness.store.case import arm_of
from harness.store.compare import APART, SECONDS, TIMES, apart, judged, noise_floors
from harness.store.differences import differences
from harness.store.outside import parse
from harness.store.printer import Table, Tone, picked, table
from harness.store.rows import rows_of
from harness.store.text import axes_of, case_label, constant_axes, number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.store.stats import Effect

    Key = tuple[str, str, str, str, str]  # suite, case, arm, regime, metric

CPU_CAUTION = (
    "measured on a CPU: its times decide nothing about a GPU, and another day's load moves them; set-up, losses and other "
    "figures compare"
)
CLOCK, CONTROL, KERNEL, HOST, UNKNOWN = "clock", "control", "kernel", "host", ""  # as harness.gate.judge
CAUSES: Mapping[str, str] = {
    CLOCK: "as many cycles as before, at another clock: not the code",
    CONTROL: "the baseline moved as far: the machine, not this arm",
    KERNEL: "time of the kernels on the device",
    HOST: "the kernels take as long as before: time between them, on the CPU",
    UNKNOWN: "",
    **dict.fromkeys(APART, "such a time decides nothing"),
}
SAME = 1.02  # a difference below this is none, whatever the controls say
POLICY = (
    "policy of diff: a time has changed where the 95 % interval of the ratio excludes 1 and the ratio exceeds "
    f"{SAME - 1:.0%} and the noise floor of each run that has controls; else it is the same or unclear as two arms of a report are"
)
_CYCLES = 1.02  # cycles that agree within this are the same
# Of `resolved`: results of the run, not how it was set up
_RESULTS = {
    "first_loss",
    "first_loss_control",
    "first_grad_norm_ratio",
    "first_grad_cosine_min",
    "sqnr_bound_db",
    "memory",
}
_MOST = 20
_MOVED = ("slower", "faster")


@dataclass(frozen=True, slots=True)
class Timed:
    """One time that both runs have, the second against the first.

    Attributes:
        suite, case_id, axes, arm, regime, metric: which.
        before, after: medians in seconds.
        ratio, low, high: after over before, with its 95 % interval (None below three rounds): above 1 is slower.
        verdict: slower, faster, same or unclear.
        cause: a key of `CAUSES`.
        rounds: of the run that has fewer.
        floor: a ratio within which the two are the same: the noise floor of either run, at least `SAME`.
    """

    suite: str
    case_id: str
    axes: str
    arm: str
    regime: str
    metric: str
    before: float
    after: float
    ratio: float
    low: float | None
    high: float | None
    verdict: str
    cause: str
    rounds: int
    floor: float


@dataclass(frozen=True, slots=True)
class Resolved:
    """A field of what ran that differs, and in how many cases."""

    suite: str
    arm: str
    field: str
    before: Any
    after: Any
    cases: int


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Milliseconds of a class of kernels in one profiled step, before and after."""

    case_id: str
    arm: str
    part: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class RunChanges:
    """Everything that differs.

    Attributes:
        environment: field -> (before, after).
        resolved: what ran.
        only_before, only_after: (suite, case, arm) that one run alone has with a time.
        broken: (suite, case, arm, reason): had a time before and has none now.
        times: of both.
        parts: of profiled steps.
        figures: (suite, case, arm, metric, before, after): what is no time and differs by more than 1 %.
        cpu: either run was measured on a CPU, so that its times decide nothing about a GPU.
        names: of both runs.
    """

    environment: Mapping[str, tuple[Any, ...]]
    resolved: tuple[Resolved, ...]
    only_before: tuple[tuple[str, ...], ...]
    only_after: tuple[tuple[str, ...], ...]
    broken: tuple[tuple[str, ...], ...]
    times: tuple[Timed, ...]
    parts: tuple[KernelTime, ...]
    figures: tuple[tuple[str, str, str, str, float, float], ...]
    cpu: bool = False
    names: Sequence[str] = ("first", "second")

    @property
    def tone(self) -> Tone:
        """None: a change is neither good nor bad."""
        return ""

    def lines(self) -> list[str]:
        """What times did, what has none any more, and why what moved did."""
        counts = Counter(t.verdict for t in self.times)
        summary = [f"{counts[v]} {v}" for v in (*_MOVED, "same", "unclear") if counts[v]] or [
            "no time in common"
        ]
        summary += [f"{len(self.broken)} without a time now"] * bool(self.broken)
        lines = [f"{' -> '.join(self.names)}: {', '.join(summary)}"]
        if {"gpu", "device"} & self.environment.keys():
            lines.append("another device: times differ for that reason; compare speedups within each run")
        lines += [CPU_CAUTION] * self.cpu
        causes = dict.fromkeys(t.cause for t in self.times if t.cause)
        lines += [f"{cause}: {CAUSES[cause]}" for cause in causes]
        return [*lines, POLICY] if self.times else lines

    def tables(self) -> list[Table]:
        """What changed first, then times by how far they moved, then where the time went."""
        ran = [
            (f"{r.suite}/{r.arm}", r.field, _value(r.before), _value(r.after), str(r.cases))
            for r in self.resolved
        ]
        one_sided = [
            *(("/".join(key), "", "only in the first run") for key in self.only_before),
            *(("/".join(key), "", "only in the second run") for key in self.only_after),
            *(
                (f"{suite}/{case}/{arm}", "had a time and has none", reason)
                for suite, case, arm, reason in self.broken
            ),
        ]
        moved = sorted(
            (t for t in self.times if t.verdict in _MOVED), key=lambda t: abs(math.log(t.ratio)), reverse=True
        )
        constant = constant_axes(t.axes for t in self.times)
        times = [
            (
                case_label(axes_of(t.axes), constant),
                t.arm if t.metric == "time_ms" else f"{t.arm} {t.metric}",
                *(number(1e3 * t.before, 4), number(1e3 * t.after, 4)),
                *(f"{t.ratio:.3f} ({t.low:.2f}-{t.high:.2f})", t.verdict, t.cause),
            )
            for t in moved
        ]
        parts = [
            (p.case_id, p.arm, p.part, number(p.before), number(p.after), f"{p.after - p.before:+.3g}")
            for p in sorted(self.parts, key=lambda p: -abs(p.after - p.before))
            if p.before != p.after
        ]
        figures = [
            (f"{suite}/{case}", arm, metric, number(before, 4), number(after, 4))
            for suite, case, arm, metric, before, after in sorted(
                self.figures, key=lambda f: -abs(f[5] - f[4]) / max(abs(f[4]), abs(f[5]))
            )
        ]
        set_up = [(name, *map(_value, both)) for name, both in self.environment.items()]
        return [
            _first("set-up", "field before after", set_up),
            _first("what ran", "arm field before after cases", ran),
            _first("times of one run alone", "arm what why", one_sided),
            _first("times, by how far they moved (ms)", "case arm >before >after >ratio verdict why", times),
            _first(
                "where a profiled step's time went (ms)", "case arm kernels >before >after >change", parts
            ),
            _first("other figures that differ by more than 1 %", "case arm metric >before >after", figures),
        ]

    def data(self) -> dict[str, Any]:
        """Plain values; times in seconds, parts of a step in milliseconds."""
        timed = "suite case_id axes arm regime metric before after ratio low high verdict cause rounds floor"
        return picked(self, "environment only_before only_after broken figures cpu") | {
            "resolved": [picked(r, "suite arm field before after cases") for r in self.resolved],
            "times": [picked(t, timed) for t in self.times],
            "parts": [picked(p, "case_id arm part before after") for p in self.parts],
            "caution": CPU_CAUTION if self.cpu else "",
            "policy": POLICY,
        }


def changes(
    before: pd.DataFrame, after: pd.DataFrame, names: Sequence[str] = ("first", "second")
) -> RunChanges:
    """Compares the rows of two runs, as `harness.store.read` gives them."""
    frames = before, after
    first, second = map(_times, frames)
    shared = [key for key in first if key in second]
    floors = [noise_floors(frame) for frame in frames]
    effects = {}
    for each in shared:
        floor = max(SAME, *(of_run.get(each[1], 1.0) for of_run in floors))
        effects[each] = stats.unpaired(_round_medians(first[each]), _round_medians(second[each]), floor)
    failed = {
        (r["suite"], r["case_id"], r["arm"]): f"{r['status']}: {r['reason']}"
        for r in rows_of(after[after["metric"].isin(TIMES) & (after["status"] != "ok")])
    }
    lost, new = (
        dict.fromkeys(key[:3] for key in one if key not in other)
        for one, other in ((first, second), (second, first))
    )
    parts = _parts(frames)
    return RunChanges(
        environment=differences([_environment(frame) for frame in frames]),
        resolved=_resolved([(key, first[key], second[key]) for key in shared]),
        only_before=tuple(key for key in lost if key not in failed),
        only_after=tuple(new),
        broken=tuple((*key, failed[key]) for key in lost if key in failed),
        times=tuple(_timed(key, first[key], second[key], effects, parts) for key in shared),
        parts=parts,
        figures=_figures(frames),
        cpu=any(
            parse(env).get("device") in (None, "", "cpu") for frame in frames for env in set(frame["env"])
        ),
        names=names,
    )


def _times(frame: pd.DataFrame) -> dict[Key, dict[str, Any]]:
    own = frame[frame["metric"].isin(TIMES) & (frame["status"] == "ok")]
    return {
        (r["suite"], r["case_id"], r["arm"], r["regime"] or "", r["metric"]): r
        for r in rows_of(own)
        if not arm_of(r).control and stats.all_are_times([r["samples"]])[0]
    }


def _round_medians(row: Mapping[str, Any]) -> list[float]:
    """Median of each round; each sample is a round where the row has none."""
    samples = row["samples"]
    rounds = row["rounds"] if len(row["rounds"]) else range(len(samples))
    return list(stats.round_medians(samples, rounds).values())


def _timed(
    key: Key,
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    effects: Mapping[Key, Effect],
    parts: Sequence[KernelTime],
) -> Timed:
    suite, case, arm, regime, metric = key
    found = effects[key]
    low, high = (found.low, found.high) if found.has_interval else (None, None)
    before, after = (row["value"] * SECONDS[row["unit"]] for row in (one, other))
    (verdict, _), cause = judged(found), apart(dict(one), dict(other))
    if cause:
        verdict = "unclear"
    elif verdict in _MOVED:
        clocks = [[c for c in row["sample_clock_mhz"] if math.isfinite(c)] for row in (one, other)]
        cycles = (
            found.ratio * statistics.median(clocks[1]) / statistics.median(clocks[0])
            if all(clocks)
            else math.inf
        )
        base = effects.get((suite, case, one["baseline"] or "", regime, metric))
        own = [p.after - p.before for p in parts if metric == "time_ms" and (p.case_id, p.arm) == (case, arm)]
        if max(cycles, 1 / cycles) <= _CYCLES:
            cause = CLOCK
        elif base and base.direction == found.direction and found.low <= base.ratio <= found.high:
            cause = CONTROL
        elif own:
            more, slower = sum(own) * 1e-3, after - before
            cause = KERNEL if abs(more) >= abs(slower) / 2 and (more > 0) == (slower > 0) else HOST
    return Timed(
        *(suite, case, one["axes"], arm, regime, metric, before, after),
        *(found.ratio, low, high, verdict, cause, found.rounds, found.floor),
    )


def _values(
    frames: Sequence[pd.DataFrame], names: list[str], chosen: Callable[[pd.DataFrame], pd.Series[bool]]
) -> pd.DataFrame:
    """Columns `before` and `after`: the values of the rows that are chosen, by some of their columns; NaN where a run has none."""
    own = [
        frame[chosen(frame) & (frame["status"] == "ok")]
        .drop_duplicates(names, keep="last")
        .set_index(names)["value"]
        for frame in frames
    ]
    return pd.concat(own, axis=1, keys=["before", "after"]).reset_index()


def _parts(frames: Sequence[pd.DataFrame]) -> tuple[KernelTime, ...]:
    """The arms that were profiled in both runs."""
    found = _values(
        frames,
        ["case_id", "arm", "part"],
        lambda frame: (frame["metric"] == "kernel_time_ms") & (frame["part"] != ""),
    )
    if found.empty:  # pandas does not group what has no row
        return ()
    counts = found.groupby(["case_id", "arm"])[["before", "after"]].transform("count")
    both = found[(counts > 0).all(axis=1)].fillna(0.0)
    return tuple(KernelTime(*part) for part in both.itertuples(index=False))


def _environment(frame: pd.DataFrame) -> dict[str, Any]:
    """The fields of a run's environment; where it has several, the values of all."""
    found: dict[str, dict[str, Any]] = {}
    for text in frame["env"].dropna().unique():
        for name, value in parse(text).items():
            found.setdefault(name, {})[json.dumps(value, sort_keys=True)] = value
    return {name: next(iter(v.values())) if len(v) == 1 else list(v.values()) for name, v in found.items()}


def _resolved(shared: Sequence[tuple[Key, Mapping[str, Any], Mapping[str, Any]]]) -> tuple[Resolved, ...]:
    found: dict[tuple[str, str, str], Resolved] = {}
    for (suite, _, arm, *_), *rows in shared:
        one, other = (parse(row["resolved"]) for row in rows)
        for name in sorted({**one, **other}.keys() - _RESULTS):
            before, after = one.get(name), other.get(name)
            if before != after:
                known = found.get((suite, arm, name)) or Resolved(suite, arm, name, before, after, 0)
                found[suite, arm, name] = replace(known, cases=known.cases + 1)
    return tuple(found.values())


def _figures(frames: Sequence[pd.DataFrame]) -> tuple[tuple[str, str, str, str, float, float], ...]:
    found = _values(
        frames,
        ["suite", "case_id", "arm", "metric"],
        lambda frame: ~frame["metric"].isin(TIMES) & (frame["part"] == "") & (frame["better"] != "none"),
    )
    sizes = found[["before", "after"]].abs().max(axis=1, skipna=False)
    far = (found["before"] - found["after"]).abs() > 0.01 * sizes
    return tuple(found[far].itertuples(index=False, name=None))


def _first(caption: str, columns: str, rows: Sequence[Sequence[str]]) -> Table:
    more = f", the first {_MOST} of {len(rows)}" if len(rows) > _MOST else ""
    return table(caption + more, columns.split(), rows[:_MOST])


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
