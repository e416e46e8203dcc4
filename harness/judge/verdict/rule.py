"""Verdict: does a candidate train as its base does? PASS, FAIL or INCONCLUSIVE, with what was read and what would decide.

PASS: the interval of the gap at the end lies inside the margin, and no rule withholds it: of the course (`course`), of what
the curves are (`integrity`) or of what else differs (`conditions`). FAIL: the 99 % interval lies above the margin, or
candidate runs alone end in NaN. A candidate better by more than the margin is not the same, and no fault: INCONCLUSIVE.
Which thresholds, and how often they are wrong: docs/evidence.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from harness.judge.verdict import conditions, integrity
from harness.judge.verdict.course import FEW, Course, ends
from harness.judge.verdict.evidence import CLUSTERS, SIDES, Evidence, evidence_of, runs_of
from harness.judge.verdict.power import ALPHA, MOST, POWER, runs_needed, tost_power
from harness.judge.verdict.result import MARGIN, percent
from harness.judge.verdict.sooner import Sooner, sooner
from harness.store import text
from harness.store.errors import UsageError
from harness.store.printer import as_html, picked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pandas as pd

    from harness.judge.verdict.evidence import CodedFinding, LossRun
    from harness.store.printer import Table, Tone
    from harness.store.stats import Effect

LossOutcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]
_TONES: Mapping[LossOutcome, Tone] = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": ""}
MOST_MARGIN = 0.01  # a wider one says nothing of training the same
LEAST_FALLS = 20.0  # margins that the base's loss falls by; the margin is narrower where it falls by less
PASS_CONFIDENCE = 1 - 2 * ALPHA  # of the interval inside the margin
FAIL_CONFIDENCE = 0.99
WAIVABLE = (
    "stopped_early",
    "seeds_chosen",
    "grad_norm",
    "skipped",
    "still",
)  # findings that a user may know better
MOST_WINDOW = 0.2  # share of the steps: a wider one would hide the end
INSIDE = 0.5  # share of the spread that noise inside runs makes up, beyond which a wider window is cheaper than runs


@dataclass(slots=True, eq=False)
class CurveVerdict:
    """What the curves show.

    Attributes:
        evidence: what was judged.
        margin: share of the base's loss: what was asked, or a twentieth of what the base learned.
        outcome: PASS, FAIL or INCONCLUSIVE.
        findings: what speaks against a word.
        codes: of the findings; else "equivalent", "worse", "better" or "not_shown".
        reasons: the same in sentences.
        notes: what decides nothing.
        step: the last step that every run reached, at which ends are compared; NaN where nothing was compared.
        window: how many last values of a run count.
        gap, low, high: candidate over base - 1 there, with its 95 % interval, as shares; NaN where the comparison was refused.
        sd: of one run about its side, or of a pair about the others, or of `noise`; a share.
        p: the larger one-sided p of equivalence within the margin.
        shows: the smallest margin that so many runs with this spread show in 80 % of cases, without a gap.
        needed: runs a side that would show the margin in 80 % of cases, without a gap and at half a margin; None: over `MOST`,
            empty where nothing is known of the spread.
        sooner: steps and seconds to one loss, and seconds to the end.
        course: the figures along the way; None where nothing was compared.
    """

    evidence: Evidence
    margin: float
    outcome: LossOutcome = "INCONCLUSIVE"
    findings: list[CodedFinding] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    step: float = math.nan
    window: int = 1
    gap: float = math.nan
    low: float = math.nan
    high: float = math.nan
    sd: float = math.nan
    p: float = math.nan
    shows: float = math.nan
    needed: tuple[int | None, ...] = ()
    sooner: Sooner | None = None
    course: Course | None = None

    @property
    def sides(self) -> tuple[Sequence[LossRun], Sequence[LossRun]]:
        """The runs of the base and of the candidate."""
        return self.evidence.sides

    @property
    def time(self) -> Effect | None:
        """Seconds of the candidate over those of the base, to the target or to the end; None without times."""
        return self.sooner.seconds if self.sooner else None

    @property
    def read(self) -> list[str]:
        """What was read: runs, columns, steps, and the steps that a run lacks."""
        lines = [
            line for runs, side in zip(self.sides, SIDES, strict=True) for line in _described(runs, side)
        ]
        return [*lines, *self.evidence.notes]

    @property
    def tone(self) -> Tone:
        """Good for PASS, bad for FAIL."""
        return _TONES[self.outcome]

    def lines(self) -> list[str]:
        """The verdict with the number of its notes, its other reasons, what decides nothing, what was read."""
        first, *more = self.reasons or [""]
        beside = [text.plural(len(self.notes), "note")] if self.notes else []
        return ["; ".join([f"{self.outcome}: {first}", *beside]), *more, *self.notes, *self.read]

    def tables(self) -> list[Table]:
        """No table: the page draws the runs."""
        return []

    def data(self) -> dict[str, Any]:
        """Plain values; gaps and margins as shares of the base's loss."""
        names = "outcome codes reasons notes read margin step window gap low high sd p shows needed"
        return picked(self, names)

    def _repr_html_(self) -> str:
        return str(as_html(self))


def verdict(
    base: Sequence[pd.DataFrame],
    candidate: Sequence[pd.DataFrame],
    *,
    value: str = "",
    step: str = "",
    paired: str = "no",
    margin: float = MARGIN,
    window: int = 0,
    target: float | None = None,
    noise: Sequence[pd.DataFrame] = (),
    cluster: str = "",
    between: float = 0.0,
    treatment: Sequence[str] = (),
    differs: Sequence[str] = (),
) -> CurveVerdict:
    """Judges a candidate's runs against the base's.

    Args:
        base: frames with a row a step, each of one run, or of several by a column `run`.
        candidate: the same.
        value: the column of the loss; "": the first of `val_loss`, `eval_loss` and their like.
        step: the column of the steps.
        paired: "seed": runs of one seed share weights and batches; the seed is a column, or in the name of the run.
        margin: of equivalence, as a share of the base's loss.
        window: so many last values of a run count, the median or a trimmed mean, a fifth at most; 0: chosen from the data.
        target: the loss at which runs stop; times are then those until it is reached.
        noise: runs that resemble these, for how many are needed where no side has two.
        cluster: the column of what runs share beside a side: a machine, a submission; "": `machine`, `host` and their like.
        between: sd between such clusters as a share of the loss, where each side has one.
        treatment: columns that name what is compared; (): those whose names speak of a format.
        differs: columns that are known to differ, and codes of `WAIVABLE`, that withhold nothing.

    Raises:
        UsageError: no frame, a column or seed is missing, a cell is no number, an option that is none.
    """
    if any(isinstance(names, str) for names in (treatment, differs)) or not isinstance(window, int):
        raise UsageError(f"{treatment=} {differs=} {window=}: expected lists of names, and a count")
    wrong = (
        not 0 < margin <= MOST_MARGIN or window < 0 or not math.isfinite(target or 0) or not 0 <= between < 1
    )
    if wrong or paired not in ("no", "seed"):
        raise UsageError(
            f"{margin=} {window=} {target=} {between=} {paired=}: expected a share up to {MOST_MARGIN} such as {MARGIN}, a count, "
            "a loss, a share, no or seed"
        )
    asked: dict[str, Any] = {
        "margin": margin,
        "window": window,
        "target": target,
        "cluster": cluster,
        "between": between,
        "treatment": treatment,
        "waived": differs,
        "excused": [code for code in differs if code in WAIVABLE],
    }
    of = evidence_of((base, candidate), value, step, paired=paired == "seed", **asked)
    widest = math.ceil(MOST_WINDOW * of.whole[0].size) + 1
    noisy = list(runs_of(noise, "noise", value, step, []))
    return judge(replace(of, noise=noisy, window=min(window, widest)))


def judge(of: Evidence) -> CurveVerdict:
    """The verdict on evidence."""
    beside = conditions.other_losses(of, lambda evidence: ((v := _judged(evidence)).outcome, v.codes))
    found = _judged(of, beside)
    found.sooner = sooner(of, found.window) if math.isfinite(found.step) else None
    if found.sooner:
        found.notes += found.sooner.lines
    return found


def _judged(of: Evidence, beside: Iterable[CodedFinding] = ()) -> CurveVerdict:
    """The verdict but for times; `beside`: what other columns show."""
    asked = of.margin
    has_course = integrity.enough(of)
    if has_course and (fall := integrity.fall_of(of)) > 0:
        of = replace(of, margin=min(asked, fall / LEAST_FALLS))
    found = CurveVerdict(of, of.margin, findings=[*integrity.findings(of), *conditions.findings(of)])
    if has_course:
        _compare(found)
        if of.margin < asked:
            found.notes.append(
                f"the base's loss falls by {100 * fall:.3g} %, so a gap counts above {_percent(of.margin)}, a {LEAST_FALLS:.0f}th of that"
            )
    found.findings = [each for each in (*found.findings, *beside) if each.code not in of.excused]
    _decide(found)
    return found


def _compare(found: CurveVerdict) -> None:
    """The gap at the end and the alarms of the course."""
    of = found.evidence
    steps, losses = of.whole
    n = len(of.base)
    found.course = course = Course(
        losses[:n], losses[n:], of.margin, of.paired, of.window, of.between, of.clusters
    )
    end = course.end
    found.findings += course.findings()
    found.step, found.window, found.gap = float(steps[-1]), end.window, end.gap
    found.low, found.high = end.interval(0.95)
    found.p = end.p_within(of.margin)
    count = 2 / (1 / n + 1 / len(of.candidate))
    found.sd = end.error * math.sqrt(count / (1 if of.paired else 2))
    low, high = end.interval(FAIL_CONFIDENCE)
    least, most = end.interval(PASS_CONFIDENCE)
    if low > of.margin:
        found.codes = ["worse"]
        if course.steps < FEW and not of.paired:
            found.notes.append(
                f"under {FEW} values nobody can tell a gap from noise that all runs of a side share, as one data order gives"
            )
    elif high < -of.margin:
        found.codes = ["better"]
    elif -of.margin < least and most < of.margin:
        found.codes = ["equivalent"]
    else:
        found.codes = ["not_shown"]
    if end.inside > INSIDE and not of.window:
        found.notes.append(
            f"noise inside runs is {100 * min(end.inside, 1):.0f} % of their spread: a wider window (window={2 * end.window}) is cheaper than runs"
        )


def _decide(found: CurveVerdict) -> None:
    """The word, from the end's code and the findings."""
    of = found.evidence
    end = found.codes
    hard = [each for each in found.findings if not each.is_soft]
    against = list(dict.fromkeys(each.code for each in found.findings))
    broke = "not_finite" in against and not hard
    found.codes = [*(code for code in end if code != "equivalent" or not against), *against] or ["not_shown"]
    if hard:
        found.codes = against
        found.step = found.gap = found.low = found.high = found.p = (
            math.nan
        )  # of a comparison that was refused
    elif broke or end == ["worse"]:
        found.outcome = "FAIL"
    elif end == ["equivalent"] and not against:
        found.outcome = "PASS"
    found.reasons = list(_reasons(found))
    from_noise = bool(of.noise) and not found.sd > 0
    if from_noise:
        figures = np.array([float(ends(run.values, found.window)) for run in of.noise])
        found.sd = float(figures.std(ddof=1) / figures.mean()) if figures.size > 1 else math.nan
    if from_noise or not hard:
        found.notes += _what_decides(found)


_END = {
    "worse": f"worse by more than the margin, also with {100 * FAIL_CONFIDENCE:.0f} %",
    "better": "better by more than the margin: not the same, and no fault",
    "equivalent": "",
    "not_shown": "not shown",
}


def _reasons(found: CurveVerdict) -> Iterator[str]:
    of, margin = found.evidence, _percent(found.margin)
    if found.outcome == "PASS":
        what = conditions.compared(of)
        what = f"; compared: {what}" if what else ""
        known = {name for run in of.runs for name in (*run.settings, *run.series)} | {*of.excused}
        names = [text.printable(name) for name in of.waived if name in known]
        waived = f"; known to differ: {text.some(names, 12, ', ')}" if names else ""
        yield f"the same loss within {margin}{_scope(of, found.step)}{what}{waived}"
    yield from (_END[code] for code in found.codes if _END.get(code))
    refused = any(not each.is_soft for each in found.findings)  # then no gap is printed, nor that of a piece
    yield from (
        f"{each.code}: {each.text}"
        if each.text and not (refused and each.is_soft and each.code not in ("not_finite", "broke"))
        else each.code
        for each in found.findings
    )
    if math.isfinite(found.gap):
        window = f", by the last {found.window} values of a run" if found.window > 1 else ""
        scope = f" at step {found.step:g}" if found.outcome == "PASS" else _scope(of, found.step)
        yield (
            f"gap {percent(found.gap)} of the base's loss{scope}{window} (95 % {percent(found.low)} to {percent(found.high)}; "
            f"one-sided p against a gap of {margin} or more: {found.p:.2g})"
        )


def _scope(of: Evidence, step: float) -> str:
    """What a PASS holds for."""
    base, candidate = ({*side} for side in of.clusters)
    if not base:
        return f" up to step {step:g}; where runs ran is not known"
    if len(base) == len(candidate) == 1:
        machines = of.cluster_column in CLUSTERS
        if base == candidate:
            return f" up to step {step:g} on {'this one machine' if machines else 'one ' + of.cluster_column}"
        what = "these two machines" if machines else f"one {of.cluster_column} a side"
        known = (
            f"sd between them {_percent(of.between)}, as asked"
            if of.between
            else "their own difference is not known"
        )
        return f" up to step {step:g} on {what}: {known}"
    return f" up to step {step:g} over {len(base)} and {len(candidate)} of {of.cluster_column}"


def _what_decides(found: CurveVerdict) -> Iterator[str]:
    """Power of so many runs, and the runs that would decide."""
    of = found.evidence
    counts, sides = [len(side) for side in of.sides], 1 if of.paired else 2
    if found.sd > 0 and min(counts) > 1:
        from scipy.optimize import brentq

        count = int(2 / sum(1 / n for n in counts))
        sd = found.sd
        found.shows = brentq(
            lambda least: tost_power(sd, least, count, sides=sides) - POWER, sd / 100, 1000 * sd
        )
        yield f"{count} runs a side with this spread show a margin of {_percent(found.shows)} in {100 * POWER:.0f} % of cases"
    if found.outcome == "INCONCLUSIVE" and set(found.codes) <= {"not_shown", "few_runs"}:
        if found.sd > 0:
            found.needed = runs_needed(found.sd, found.margin, sides)
        shown = " / ".join(str(n or f"over {MOST}") for n in found.needed)
        clusters = [len(set(side)) for side in of.clusters]
        more = "more of " + of.cluster_column if max(clusters) > 1 and clusters != counts else "runs a side"
        yield (
            f"{more} that show it in {100 * POWER:.0f} % of cases, without a gap / at half a margin: "
            f"{shown or 'not known, for want of two runs that show the spread (noise=)'}"
        )


def _percent(share: float) -> str:
    """Without a sign."""
    return f"{100 * share:.3g} %"


def _described(runs: Sequence[LossRun], side: str) -> Iterator[str]:
    """What was read of one side, and the gaps in it."""
    sizes, steps = [run.steps.size for run in runs], np.concatenate([run.steps for run in runs])
    value, step = runs[0].columns
    clock = "" if any(run.seconds is None for run in runs) else ", with times"
    beside = sorted({name for run in runs for name in run.series} - {value, step})
    also = f"; beside it {text.some(beside, 6, ', ')}" if beside else ""
    yield (
        f"{side}: {text.plural(len(runs), 'run')}, {value} by {step}, {' to '.join(map(str, sorted({min(sizes), max(sizes)})))} values a run, steps "
        f"{steps.min():g} to {steps.max():g}{clock}{also}"
    )
    every = np.unique(steps)
    lacks = [(run, int((every <= run.steps[-1]).sum()) - run.steps.size) for run in runs]
    if gaps := [f"{run.name} lacks {count} of {every.size} steps" for run, count in lacks if count]:
        yield f"{side}, gaps: {text.some(gaps)}"
