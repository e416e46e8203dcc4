"""What differs between two runs: set-up, what ran, times and where they went. A pure function of rows.

Two runs were not measured round by round, so that a drift of the machine between them is not cancelled. Their ratio is
formed from the medians of rounds, with the interval of Welch's t on logarithms; a difference within the noise floor that
either run saw between two copies of its own baseline is none. The baseline itself is the control: where it moved as far
as the rest, the machine did, not the code.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.store import effect, stats
from harness.store.arm import arm_of
from harness.store.compare import SECONDS, TIMES, noise_floors, rows_of
from harness.store.differences import differences
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

CLOCK, CONTROL, KERNEL, HOST, UNKNOWN = "clock", "control", "kernel", "host", ""  # as harness.gate.cause
CAUSES: Mapping[str, str] = {
    CLOCK: "as many cycles as before, at another clock: not the code",
    CONTROL: "the baseline moved as far: the machine, not this arm",
    KERNEL: "time of the kernels on the device",
    HOST: "the kernels take as long as before: time between them, on the CPU",
    UNKNOWN: "",
}
SAME = 1.02  # a difference below this is none, whatever the controls say
POLICY = (
    "policy of diff: a time has changed where the 95 % interval of the ratio excludes 1 and the ratio exceeds "
    f"{SAME - 1:.0%} and the noise floor of each run that has controls; below them it is the same, with too few rounds unclear"
)
_CYCLES = 1.02  # cycles that agree within this are the same
# Of `resolved`: results of the run, not how it was set up
_RESULTS = frozenset(
    {
        "first_loss",
        "first_loss_control",
        "first_grad_norm_ratio",
        "first_grad_cosine_min",
        "sqnr_bound_db",
        "memory",
    }
)


@dataclass(frozen=True, slots=True)
class Timed:
    """One time that both runs have, the second against the first.

    Attributes:
        suite, case_id, axes, arm, regime, metric: which.
        before, after: medians in seconds.
        ratio, low, high: after over before, with its 95 % interval (NaN below three rounds): above 1 is slower.
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
    low: float
    high: float
    verdict: str
    cause: str = UNKNOWN
    rounds: int = 0
    floor: float = math.nan

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from the other times of a run."""
        return self.suite, self.case_id, self.arm, self.regime, self.metric


@dataclass(frozen=True, slots=True)
class Part:
    """Milliseconds of a class of kernels in one profiled step, before and after."""

    case_id: str
    arm: str
    part: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Changes:
    """Everything that differs.

    Attributes:
        environment: field -> (before, after).
        resolved: (suite, arm, field) -> (before, after, in how many cases): what ran.
        only_before, only_after: (suite, case, arm) that one run alone has with a time.
        broken: (suite, case, arm, reason): had a time before and has none now.
        times: of both.
        parts: of profiled steps.
        figures: (suite, case, arm, metric, before, after): what is no time and differs by more than 1 %.
        cpu: either run was measured on a CPU, so that its times decide nothing about a GPU.
    """

    environment: Mapping[str, tuple[Any, Any]]
    resolved: Mapping[tuple[str, str, str], tuple[Any, Any, int]]
    only_before: tuple[tuple[str, str, str], ...]
    only_after: tuple[tuple[str, str, str], ...]
    broken: tuple[tuple[str, str, str, str], ...]
    times: tuple[Timed, ...]
    parts: tuple[Part, ...]
    figures: tuple[tuple[str, str, str, str, float, float], ...]
    cpu: bool = False


def changes(before: pd.DataFrame, after: pd.DataFrame) -> Changes:
    """Compares the rows of two runs, as `harness.store.read` gives them."""
    first, second = _times(before), _times(after)
    floors = [noise_floors(before), noise_floors(after)]
    parts = _parts(before, after)
    failed = {
        (r["suite"], r["case_id"], r["arm"]): f"{r['status']}: {r['reason']}"
        for r in rows_of(after[after["metric"].isin(TIMES) & (after["status"] != "ok")])
    }
    shared = [key for key in first if key in second]
    timed = [
        _timed(first[key], second[key], max(SAME, *(floor.get(key[1], 1.0) for floor in floors)))
        for key in shared
    ]
    missing = [(key[0], key[1], key[2]) for key in first if key not in second]
    return Changes(
        environment=_environment(before, after),
        resolved=_resolved(before, after),
        only_before=tuple(dict.fromkeys(key for key in missing if key not in failed)),
        only_after=tuple(dict.fromkeys((key[0], key[1], key[2]) for key in second if key not in first)),
        broken=tuple((*key, failed[key]) for key in dict.fromkeys(missing) if key in failed),
        times=_with_causes(timed, first, second, parts),
        parts=tuple(parts),
        figures=_figures(before, after),
        cpu=any(
            parse(env).get("device") in (None, "", "cpu")
            for frame in (before, after)
            for env in set(frame["env"])
        ),
    )


def _times(frame: pd.DataFrame) -> dict[tuple[str, ...], dict[str, Any]]:
    own = frame[frame["metric"].isin(TIMES) & (frame["status"] == "ok")]
    return {
        (r["suite"], r["case_id"], r["arm"], r["regime"] or "", r["metric"]): r
        for r in rows_of(own)
        if not arm_of(r).control
    }


def _timed(one: Mapping[str, Any], other: Mapping[str, Any], floor: float) -> Timed:
    sides = [_round_medians(row) for row in (one, other)]
    found = effect.unpaired(sides[0], sides[1], floor)
    return Timed(
        suite=one["suite"],
        case_id=one["case_id"],
        axes=one["axes"],
        arm=one["arm"],
        regime=one["regime"] or "",
        metric=one["metric"],
        before=one["value"] * SECONDS[one["unit"]],
        after=other["value"] * SECONDS[other["unit"]],
        ratio=found.ratio,
        low=found.low if found.has_interval else math.nan,
        high=found.high if found.has_interval else math.nan,
        verdict=found.direction,
        rounds=found.rounds,
        floor=floor,
    )


def _round_medians(row: Mapping[str, Any]) -> list[float]:
    """Median of each round; each sample is a round where the row has none."""
    samples = row["samples"]
    rounds = row["rounds"] if len(row["rounds"]) else range(len(samples))
    return list(stats.round_medians(samples, rounds).values())


def _with_causes(
    timed: Sequence[Timed],
    first: Mapping[tuple[str, ...], Mapping[str, Any]],
    second: Mapping[tuple[str, ...], Mapping[str, Any]],
    parts: Sequence[Part],
) -> tuple[Timed, ...]:
    by_key = {t.key: t for t in timed}
    found = []
    for t in timed:
        cause = UNKNOWN
        if t.verdict in ("slower", "faster"):
            one, other = first[t.key], second[t.key]
            base = by_key.get((t.suite, t.case_id, one["baseline"] or "", t.regime, t.metric))
            cause = _cause(t, base, one, other, parts)
        found.append(replace(t, cause=cause))
    return tuple(found)


def _cause(
    t: Timed, base: Timed | None, one: Mapping[str, Any], other: Mapping[str, Any], parts: Sequence[Part]
) -> str:
    clocks = [[c for c in row["sample_clock_mhz"] if math.isfinite(c)] for row in (one, other)]
    if all(clocks):
        before, after = map(statistics.median, clocks)
        if max(t.ratio * after / before, before / (t.ratio * after)) <= _CYCLES:
            return CLOCK
    if base is not None and base.verdict == t.verdict and (t.low <= base.ratio <= t.high):
        return CONTROL
    own = [p for p in parts if t.metric == "time_ms" and (p.case_id, p.arm) == (t.case_id, t.arm)]
    if own:
        more = sum(p.after - p.before for p in own) * 1e-3
        return (
            KERNEL
            if abs(more) >= abs(t.after - t.before) / 2 and (more > 0) == (t.after > t.before)
            else HOST
        )
    return UNKNOWN


def _parts(before: pd.DataFrame, after: pd.DataFrame) -> list[Part]:
    def times(frame: pd.DataFrame) -> dict[tuple[str, str, str], float]:
        own = frame[(frame["metric"] == "kernel_time_ms") & (frame["status"] == "ok") & (frame["part"] != "")]
        return {(r["case_id"], r["arm"], r["part"]): r["value"] for r in rows_of(own)}

    first, second = times(before), times(after)
    arms = {key[:2] for key in first} & {key[:2] for key in second}
    keys = [key for key in {**first, **second} if key[:2] in arms]
    return [Part(*key, first.get(key, 0.0), second.get(key, 0.0)) for key in keys]


def _environment(before: pd.DataFrame, after: pd.DataFrame) -> dict[str, tuple[Any, Any]]:
    one, other = (_environments(frame) for frame in (before, after))
    return {name: (first, second) for name, (first, second) in differences((one, other)).items()}


def _environments(frame: pd.DataFrame) -> dict[str, Any]:
    """The fields of a run's environment; where it has several, the values of all."""
    found: dict[str, dict[str, Any]] = {}
    for text in frame["env"].dropna().unique():
        for name, value in parse(text).items():
            found.setdefault(name, {})[json.dumps(value, sort_keys=True)] = value
    return {name: next(iter(v.values())) if len(v) == 1 else list(v.values()) for name, v in found.items()}


def _resolved(before: pd.DataFrame, after: pd.DataFrame) -> dict[tuple[str, str, str], tuple[Any, Any, int]]:
    first, second = _times(before), _times(after)
    found: dict[tuple[str, str, str], tuple[Any, Any, int]] = {}
    for key in first:
        if key not in second:
            continue
        one, other = (parse(rows[key]["resolved"]) for rows in (first, second))
        for name in sorted({**one, **other}.keys() - _RESULTS):
            if one.get(name) != other.get(name):
                place = (key[0], key[2], name)
                known = found.get(place)
                found[place] = (
                    (one.get(name), other.get(name), 1) if known is None else (*known[:2], known[2] + 1)
                )
    return found


def _figures(
    before: pd.DataFrame, after: pd.DataFrame
) -> tuple[tuple[str, str, str, str, float, float], ...]:
    def values(frame: pd.DataFrame) -> dict[tuple[str, str, str, str], float]:
        own = frame[~frame["metric"].isin(TIMES) & (frame["status"] == "ok") & (frame["part"] == "")]
        own = own[own["better"] != "none"]
        return {(r["suite"], r["case_id"], r["arm"], r["metric"]): r["value"] for r in rows_of(own)}

    first, second = values(before), values(after)
    return tuple(
        (*key, first[key], second[key])
        for key in first
        if key in second and abs(first[key] - second[key]) > 0.01 * max(abs(first[key]), abs(second[key]))
    )
