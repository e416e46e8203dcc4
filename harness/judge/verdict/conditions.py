"""Conditions: what else differs between the sides than what is compared, and what else their files hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from harness.judge.verdict.course import difference
from harness.judge.verdict.evidence import CLUSTERS, SIDES, CodedFinding
from harness.store.text import printable, some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from harness.judge.verdict.evidence import Evidence, LossRun

_WORD = r"(^|[_/ .-])({})($|[_/ .-])"
NO_LOSS = re.compile(
    _WORD.format(
        "lr|learning_rate|acc|accuracy|tokens?_per_s(ec(ond)?)?|tok/sec|tps|throughput|mfu|tflops|grad_norm|time|seconds|reward|score|bleu|f1|ppl|(?<!log_)(?<!log )perplexity|loss_scale|loss_scaling"
    ),
    re.IGNORECASE,
)
FORMAT = re.compile(
    _WORD.format(r"precision|dtype|recipe|(mx|nv)?fp[48]\w*|quant(ization|_2d)?|bf16|amax(_\w+)?"),
    re.IGNORECASE,
)
LOW = re.compile(
    r"fp8|fp4|e4m3|e5m2|e2m1|mx|hybrid|true|tensorwise|rowwise|blockwise|current|delayed", re.IGNORECASE
)
HIGH = re.compile(r"bf16|bfloat16|fp16|fp32|float32|false|none|^$", re.IGNORECASE)
MEASURED = re.compile(
    _WORD.format(
        r"time(stamp)?|runtime|elapsed|clock|date|seconds?|ms|(tokens?|samples|steps)_per_s(ec(ond)?)?|tok/sec|tps|throughput|tflops|mfu|"
        r"total_flos|memory(_gi?b|_mi?b|_bytes)?$|(peak|max)_mem(ory)?"
    ),
    re.IGNORECASE,
)  # of a run, not set for it
RUN = re.compile(
    r"((run|display|host|job|experiment)_?)?(name|id)|run|host(name)?|pid|path|(log_?)?file|uuid|(random_)?seed|line|status",
    re.IGNORECASE,
)  # of one run, by the whole name
COUNTERS = re.compile(_WORD.format(r"skipped|nans?|infs?|overflows?"), re.IGNORECASE)
NORM, NORM_APART = re.compile(r"grad_?norm|norm$", re.IGNORECASE), np.log(1.05)
LOSS = re.compile(r"loss", re.IGNORECASE)
# Findings of another loss of the same files that withhold PASS of this one
BAD = frozenset({
    "course", "swing", "trend", "ends_high", "better", "broke", "not_finite", "not_positive", "hole", "missing", "off_grid",
    "repeats", "stopped_early", "unfinished",
})  # fmt: skip
MOST_SEED = 100  # seeds above are drawn, not counted


def findings(of: Evidence) -> Iterator[CodedFinding]:
    """What each rule finds."""
    for rule in (names, settings, treatments, schedules, seeds, norms, counters):
        yield from rule(of)


def names(of: Evidence) -> Iterator[CodedFinding]:
    """One loss, by one axis, and a loss at all."""
    for i, code in enumerate(("other_loss", "other_axis")):
        if len(columns := sorted({run.columns[i] for run in of.runs})) > 1:
            yield CodedFinding(code, f"columns {some([*map(printable, columns)], 4, ', ')}")
    if no := [name for run in of.runs[:1] if NO_LOSS.search(name := run.columns[0])]:
        yield CodedFinding("no_loss", f"{printable(no[0])} is no loss by its name")


def is_loss(name: str) -> bool:
    """Whether a column is a loss by its name."""
    return bool(LOSS.search(name)) and not NO_LOSS.search(name)


def is_treatment(of: Evidence, name: str) -> bool:
    """Whether a setting says what is compared: one that was named, else by its name."""
    return name in of.treatment if of.treatment else bool(FORMAT.search(name))


def _setting_names(of: Evidence) -> list[str]:
    # what has one value a side is a setting, unless it says where runs ran
    one_each = max(len(set(side)) for side in of.clusters) <= 1 and of.cluster_column not in CLUSTERS
    every = {name for run in of.runs for name in run.settings} - {*of.waived}
    return sorted(every if one_each else every - {of.cluster_column})


def _values(side: Sequence[LossRun], name: str) -> list[str]:
    return [run.settings.get(name, "changes" if name in run.series else "") for run in side]


def settings(of: Evidence) -> Iterator[CodedFinding]:
    """Every setting that is not of a single run is equal."""
    unlike = []
    for name in _setting_names(of):
        if (
            is_treatment(of, name)
            or any(known.search(name) for known in (MEASURED, COUNTERS))
            or RUN.fullmatch(name)
        ):
            continue
        base, candidate = (_values(side, name) for side in of.sides)
        if all(len(set(side)) == len(side) > 1 for side in (base, candidate)) and not _apart(base, candidate):
            continue  # of each run its own, as an identifier is
        if set(base) != set(candidate):
            shown = (
                some([value or "none" for value in sorted(set(side))], 2, "|") for side in (base, candidate)
            )
            unlike.append(f"{printable(name)} ({' against '.join(shown)})")
    if unlike:
        yield CodedFinding("differs", f"not judged, waive by differs=[...]: {some(unlike, 6, ', ')}")


def _apart(base: Sequence[str], candidate: Sequence[str]) -> bool:
    """Whether values are numbers whose ranges do not meet, as those of another learning rate."""
    sides = [pd.to_numeric(pd.Series(side), errors="coerce") for side in (base, candidate)]
    return bool(sides[0].max() < sides[1].min() or sides[1].max() < sides[0].min())


def compared(of: Evidence) -> str:
    """The treatment on both sides, in words; "" where no column tells it."""
    names = [name for name in _setting_names(of) if is_treatment(of, name)]
    pairs = [(name, *(_values(side, name)[0] or "none" for side in of.sides)) for name in names]
    return some(
        [f"{printable(name)} {base} against {mine}" for name, base, mine in pairs if base != mine], 6, ", "
    )


def _lower(kinds: Mapping[str, tuple[str, str]], side: int) -> list[str]:
    """The columns by which a side is the lower precision."""
    return [
        name
        for name, both in kinds.items()
        if LOW.search(both[side]) and HIGH.search(both[1 - side]) and not LOW.search(both[1 - side])
    ]


def treatments(of: Evidence) -> Iterator[CodedFinding]:
    """What is compared is one thing a side, another on the other side, and the lower precision is the candidate's."""
    columns = {
        name: [_values(side, name) for side in of.sides]
        for name in _setting_names(of)
        if is_treatment(of, name)
    }
    if absent := [name for name in of.treatment if name not in columns]:
        yield CodedFinding(
            "no_treatment", f"treatment={some(absent, 4, ',')}: no run has it as a constant column"
        )
    if mixed := [name for name, sides in columns.items() if max(len(set(side)) for side in sides) > 1]:
        yield CodedFinding("mixed_treatment", f"{some([*map(printable, mixed)])} changes within a side")
    elif columns:
        kinds = {name: (sides[0][0], sides[1][0]) for name, sides in columns.items()}
        if all(base == candidate for base, candidate in kinds.values()):
            yield CodedFinding(
                "same_treatment",
                f"{some([f'{printable(k)}={a}' for k, (a, _) in kinds.items()])} on both sides: nothing is compared",
            )
        elif (swapped := _lower(kinds, 0)) and not _lower(kinds, 1):
            yield CodedFinding(
                "swapped", f"the base is the lower precision by {some([*map(printable, swapped)])}"
            )


def schedules(of: Evidence) -> Iterator[CodedFinding]:
    """A column that is one course in all runs of a side, as a learning rate is, is that course on the other side too."""
    unlike = []
    for name in sorted(set.intersection(*(set(run.series) for run in of.runs)) - set(of.waived)):
        if MEASURED.search(name) or RUN.fullmatch(name) or LOSS.search(name):
            continue
        sides = [[run.series[name].loc[: of.end] for run in side] for side in of.sides]
        if all(_same(own[0], other) for own in sides for other in own[1:]) and not _same(
            sides[0][0], sides[1][0]
        ):
            unlike.append(printable(name))
    if unlike:
        yield CodedFinding("differs", f"not judged, waive by differs=[...]: {some(unlike)} along the way")


def _same(one: pd.Series[float], other: pd.Series[float]) -> bool:
    at = one.index.intersection(other.index)
    return bool(np.allclose(one.loc[at], other.loc[at], rtol=1e-6, equal_nan=True))


def seeds(of: Evidence) -> Iterator[CodedFinding]:
    """Seeds are counted from one on, without gaps, and each once."""
    for name, side in zip(SIDES, of.sides, strict=True):
        own = sorted(run.seed for run in side if run.seed is not None)
        if len(own) < len(side) or not own:
            continue
        if len(set(own)) < len(own):
            yield CodedFinding("seeds_repeat", f"{name}: {own}")
        elif own[-1] < MOST_SEED and own[-1] - own[0] + 1 != len(own):
            yield CodedFinding(
                "seeds_chosen", f"{name}: {', '.join(map(str, own))}: some are missing", is_soft=True
            )


def norms(of: Evidence) -> Iterator[CodedFinding]:
    """Gradient norms, median over the steps of a run, lie within 5 % beyond their noise."""
    for name in _shared(of, NORM):
        lost = [sum(not np.isfinite(run.series[name]).all() for run in side) for side in of.sides]
        if lost[1] > lost[0]:
            yield CodedFinding(
                "grad_norm", f"{printable(name)} is not finite in {lost[1]} candidate runs", is_soft=True
            )
            continue
        logs = [
            np.log([max(float(run.series[name].loc[: of.end].median()), 1e-300) for run in side])
            for side in of.sides
        ]
        if min(map(len, logs)) < 2:
            return
        found = difference(logs[0], logs[1], of.paired)
        low, high = found.interval(0.99)
        if min(abs(low), abs(high)) > NORM_APART and low * high > 0:
            yield CodedFinding(
                "grad_norm",
                f"{printable(name)} is {np.exp(found.difference):.2f} times the base's",
                is_soft=True,
            )


def counters(of: Evidence) -> Iterator[CodedFinding]:
    """Steps that were skipped or met NaN: no more in the candidate's runs than in any of the base's."""
    for name in _shared(of, COUNTERS, settings=True):
        counts = [[_count(run, name) for run in side] for side in of.sides]
        if max(counts[1]) > max(counts[0]):
            yield CodedFinding(
                "skipped",
                f"{printable(name)}: {max(counts[1]):g} in a candidate run, at most {max(counts[0]):g} in a base run",
                is_soft=True,
            )


def _count(run: LossRun, name: str) -> float:
    if name in run.series:
        return float(run.series[name].sum())
    try:
        return float(run.settings.get(name, 0))
    except ValueError:
        return 0.0


def _shared(of: Evidence, pattern: re.Pattern[str], settings: bool = False) -> list[str]:
    """Columns of every run whose name matches."""
    own = [set(run.series) | (set(run.settings) if settings else set()) for run in of.runs]
    return sorted(name for name in set.intersection(*own) - set(of.waived) if pattern.search(name))


def other_losses(of: Evidence, judge: Callable[[Evidence], tuple[str, list[str]]]) -> Iterator[CodedFinding]:
    """The other losses of the same files, each judged by the same rule.

    Args:
        of: the evidence.
        judge: gives (outcome, codes) of evidence.
    """
    own: list[set[str]] = [
        {str(name) for name in {*run.series, *run.settings} if is_loss(name) or COUNTERS.search(name)}
        for run in of.runs
    ]
    every, shared = own[0].union(*own), own[0].intersection(*own)
    if lacking := sorted(every - shared - {*of.waived}):
        yield CodedFinding(
            "other_loss_column", f"{some([*map(printable, lacking)])}: not in every run", is_soft=True
        )
    for name in filter(is_loss, _shared(of, LOSS)):
        beside = of.with_values(name)
        if beside is not None:
            outcome, codes = judge(beside)
            if outcome == "FAIL" or BAD & set(codes):
                yield CodedFinding(
                    "other_loss_column", f"{printable(name)}: {outcome}, {some(codes, 4, ', ')}", is_soft=True
                )
