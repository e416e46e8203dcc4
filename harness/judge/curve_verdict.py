"""Curve verdict: loss curves of anyone's runs, judged. PASS, FAIL or INCONCLUSIVE, with what was read and what could be shown.

Runs that share no seed are compared at their ends by Welch's t: PASS where two one-sided tests at 5 % show the difference
within the margin, FAIL where the 99 % interval lies wholly above it, as in the paired verdict. A candidate shown *better* by
more than the margin is not the same and no fault: INCONCLUSIVE. Runs paired by seed are judged by `verdict.judge_pairs`.
What is no evidence (`REFUSED`) is neither passed nor failed.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import brentq

from harness.judge.verdict.curves import Curve, Run
from harness.judge.verdict.gates import FAIL_CONFIDENCE, STRAY_MARGINS
from harness.judge.verdict.judge import LEAST_FALL, Outcome, judge_pairs
from harness.judge.verdict.result import ALPHA, MARGIN, MIN_SEEDS, percent
from harness.judge.verdict.stored_noise import MOST, POWER, seeds_for, tost_power
from harness.judge.verdict.time_to_loss import crossing
from harness.store import stats, text
from harness.store.curve_files import tidy
from harness.store.errors import UsageError
from harness.store.stats import Welch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd

    from harness.store.stats import Effect, Vector

MIN_VALUES = 3  # of a run: fewer show neither that it learned nor that it is no copy of another
MOST_LONGER = 1.25  # the arms' last steps; beyond it they are other schedules, or other units
MOST_MARGIN = 0.05  # of the loss: a wider one says nothing of training the same
SAME = 3e-6  # of a loss: rounding of one that was written twice
SETTINGS = (
    "batch_size",
    "data",
    "data_sha256",
    "dataset",
    "heldout",
    "tokenizer",
    "tokens_per_step",
)  # columns that both arms must share
SEED = re.compile(r"seed[-_=]?(\d+)")
WHY: Mapping[str, str] = {
    "worse": f"worse by more than the margin, also with {100 * FAIL_CONFIDENCE:.0f} %",
    "better": "better by more than the margin: not the same, and no fault",
    "stray": f"a run is off by more than {STRAY_MARGINS:g} margins",
    "idle": f"the base's loss falls by less than {LEAST_FALL:g} margins: PASS would say little",
}
SIDES = "base", "candidate"
# What is no evidence -> why
REFUSED: Mapping[str, str] = {
    "few_runs": f"fewer than {MIN_SEEDS} runs a side",
    "few_values": f"fewer than {MIN_VALUES} values a run after step 0, or than two windows",
    "repeated": "runs are copies",
    "mixed_steps": "step axes differ",
    "unfinished": "a run ends without a loss",
    "other_loss": "the sides hold other losses",
    "other_settings": "conditions differ",
    "other_start": "losses differ before any step",
    "base_broke": "the base met NaN too",
    "no_share": "the base's loss is not above 0",
}


@dataclass(frozen=True, slots=True, eq=False)
class OneRun:
    """One run as read: its loss by step, seconds where there are any, the last step of any row, and its conditions."""

    name: str
    curve: Curve
    seconds: Vector | None
    last: float
    columns: tuple[str, str]
    settings: Mapping[str, str]
    seed: int | None

    @property
    def is_finite(self) -> bool:
        """Whether no loss is NaN or infinite."""
        return self.curve.first_nonfinite is None

    @property
    def is_cut(self) -> bool:
        """Whether rows follow its last loss by at least the usual distance of two losses."""
        steps = self.curve.steps
        return steps.size > 1 and self.last - steps[-1] >= np.median(np.diff(steps))

    def seconds_at(self, step: float) -> float:
        """NaN without a clock."""
        return math.nan if self.seconds is None else float(np.interp(step, self.curve.steps, self.seconds))

    def end(self, window: int) -> float:
        """Mean of its last losses."""
        return float(self.curve.values[-window:].mean())


@dataclass(slots=True, eq=False)
class CurveVerdict:
    """What the curves show.

    Attributes:
        margin: share of the base's loss.
        sides: the runs of the base and of the candidate.
        outcome: PASS, FAIL or INCONCLUSIVE.
        codes: why: keys of `REFUSED` or `WHY`, "equivalent", "not_shown", "not_finite"; where runs are paired, the gates that
            decided.
        reasons: the same in sentences.
        notes: what decides nothing.
        gap, low, high: candidate over base - 1 at the ends, with its 95 % interval (90 % where paired), as shares; NaN where
            there is none.
        sd: between runs, of both sides together or of `noise`, as a share.
        p: the larger one-sided p of equivalence within the margin.
        shows: the smallest margin that so many runs with this spread show in 80 % of cases, without a gap.
        needed: runs a side that would show the margin in 80 % of cases, without a gap and at half a margin; None: over `MOST`,
            empty where nothing is known of the spread.
        time: seconds of the candidate over those of the base, to `target` or to the end; None without times.
    """

    margin: float
    sides: Sequence[Sequence[OneRun]]
    outcome: Outcome = "INCONCLUSIVE"
    codes: list[str] = field(default_factory=lambda: ["not_shown"])
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gap: float = math.nan
    low: float = math.nan
    high: float = math.nan
    sd: float = math.nan
    p: float = math.nan
    shows: float = math.nan
    needed: tuple[int | None, ...] = ()
    time: Effect | None = None

    @property
    def read(self) -> list[str]:
        """What was read: runs, columns, steps, and the steps that a run lacks."""
        return [line for runs, side in zip(self.sides, SIDES, strict=True) for line in _described(runs, side)]

    @property
    def lines(self) -> list[str]:
        """What was read, the verdict, what to know beside it; a text each."""
        return [*self.read, f"{self.outcome}: {'; '.join(self.reasons)}", *self.notes]

    def _repr_html_(self) -> str:
        return "".join(f"<p>{html.escape(text.printable(line))}</p>" for line in self.lines)


def verdict(
    base: Sequence[pd.DataFrame],
    candidate: Sequence[pd.DataFrame],
    *,
    value: str = "",
    step: str = "",
    paired: str = "no",
    margin: float = MARGIN,
    window: int = 1,
    target: float | None = None,
    noise: Sequence[pd.DataFrame] = (),
    loss: str = "train_loss",
) -> CurveVerdict:
    """Judges a candidate's runs against the base's.

    Args:
        base: frames with a row a step, each of one run, or of several by a column `run`.
        candidate: the same.
        value: the column of the loss; "": the first of `val_loss`, `eval_loss` and their like.
        step: the column of the steps.
        paired: "seed": runs of one seed share weights and batches; the seed is a column, or in the name of the run.
        margin: of equivalence, as a share of the base's loss.
        window: the mean of the last so many values is compared; 1: the last.
        target: a loss; times are then those until it is reached.
        noise: runs that resemble these, for how many are needed where no side has two.
        loss: the column of the training loss, for paired runs.

    Raises:
        UsageError: no frame, a column or seed is missing, a cell is no number, an option that is none.
    """
    if (
        not 0 < margin <= MOST_MARGIN
        or window < 1
        or not math.isfinite(target or 0)
        or paired not in ("no", "seed")
    ):
        raise UsageError(
            f"{margin=} {window=} {target=} {paired=}: expected a share such as 0.0025, a count, a loss, no or seed"
        )
    both = base, candidate
    sides = [_runs(frames, side, value, step) for frames, side in zip(both, SIDES, strict=True)]
    if not all(sides):
        raise UsageError(f"{len(base)} base and {len(candidate)} candidate frames: both sides need some")
    found = CurveVerdict(margin, sides)
    if paired == "seed":
        mine, theirs = (_by_seed(*each, loss, step) for each in zip(sides, both, SIDES, strict=True))
        judged = judge_pairs(theirs, mine, margin=margin)
        found.outcome, found.reasons = judged.outcome, [*judged.reasons] or ["every gate passed"]
        found.codes = [gate.gate for gate in judged.gates if gate.status == judged.outcome]
        found.notes = [*judged.notes, judged.limits]
        if late := judged.gate("L4"):
            found.gap, found.low, found.high = late.effect, late.low, late.high
    else:
        unpaired(found, window, [run.end(window) for run in _runs(noise, "noise", value, step)])
        _times(found, target)
    return conclude(found, window)


def conclude(found: CurveVerdict, window: int) -> CurveVerdict:
    """The verdict once it is known whether the curves are evidence, and what would decide where nothing does."""
    if refused := dict(_refused(found.sides[0], found.sides[1], found.margin, window)):
        found.outcome, found.codes = "INCONCLUSIVE", [*refused]
        found.reasons = [*(f"{REFUSED[code]} ({what})" for code, what in refused.items()), *found.reasons]
    if found.codes in (["not_shown"], ["few_runs"]):
        if found.sd > 0:
            gaps = 0.0, found.margin / 2
            found.needed = tuple(seeds_for(found.sd, found.margin, gap, sides=2) for gap in gaps)
        shown = " / ".join(str(n or f"over {MOST}") for n in found.needed)
        found.notes.append(
            f"runs a side that show it in {100 * POWER:.0f} % of cases, without a gap / at half a margin: "
            f"{shown or 'not known, for want of two runs that show the spread (noise=)'}"
        )
    return found


def unpaired(found: CurveVerdict, window: int, noise: Sequence[float] = ()) -> None:
    """Welch's two one-sided tests on the ends of the runs, and the power of so many runs."""
    margin, sides = found.margin, found.sides
    ends = [np.array([end for run in runs if math.isfinite(end := run.end(window))]) for runs in sides]
    if broken := sum(not run.is_finite for run in sides[1]):
        found.outcome, found.codes = "FAIL", ["not_finite"]
        found.reasons = [f"NaN or infinity in {broken} of {len(sides[1])} candidate runs"]
    if not all(side.size for side in ends) or not (level := float(ends[0].mean())) > 0:
        return
    found.gap = float(ends[1].mean()) / level - 1
    spreads = [side / level for side in ends if side.size > 1] or [np.array(noise) / np.mean(noise or 1)]
    freedom = sum(side.size - 1 for side in spreads)
    found.sd = sd = (
        math.sqrt(sum(side.var() * side.size for side in spreads) / freedom) if freedom > 0 else math.nan
    )
    if sd > 0 and min(side.size for side in ends) > 1:
        welch = Welch.of(*(side / level for side in ends))
        count = int(2 / sum(1 / side.size for side in ends))
        found.low, found.high = welch.interval()
        low, high = welch.interval(FAIL_CONFIDENCE)
        found.p = welch.p_within(margin)
        found.shows = brentq(lambda least: tost_power(sd, least, count, sides=2) - POWER, sd / 100, 1000 * sd)
        if not broken and low > margin:
            found.outcome, found.codes = "FAIL", ["worse"]
        elif not broken and high < -margin:
            found.codes = ["better"]
        elif not broken and found.p < ALPHA:
            fall = np.median([run.curve.values[0] for run in sides[0]]) / level - 1
            stray = np.abs(ends[1] / level - 1).max() > STRAY_MARGINS * margin
            found.codes = ["stray"] * bool(stray) + ["idle"] * bool(not fall > LEAST_FALL * margin)
            if not found.codes:
                found.outcome, found.codes = "PASS", ["equivalent"]
        found.reasons += [WHY[code] for code in found.codes if code in WHY]
        found.reasons.append(
            f"gap {percent(found.gap)} of the base's loss, {welch.difference * level:+.5f} (95 % {percent(found.low)} to "
            f"{percent(found.high)}); one-sided p of a gap within {percent(margin)[1:]}: {found.p:.2g}"
        )
        shown = f"{percent(found.shows)[1:]} in {100 * POWER:.0f} % of cases"
        found.notes.append(f"{count} runs a side with this spread show a margin of {shown}")
    else:
        found.reasons.append(f"gap {percent(found.gap)} of the base's loss")
    last = [max(run.curve.steps[-1] for run in runs) for runs in sides]
    if last[0] != last[1]:
        found.notes.append(f"compared at their ends: steps {last[0]:g} and {last[1]:g}")


def _refused(
    base: Sequence[OneRun], candidate: Sequence[OneRun], margin: float, window: int
) -> Iterator[tuple[str, str]]:
    """Why the curves are no evidence: a code and what was found."""
    both = [*base, *candidate]
    whole = [[run for run in runs if run.is_finite] for runs in (base, candidate)]
    if min(len(base), len(candidate)) < MIN_SEEDS:
        yield "few_runs", f"{len(base)} and {len(candidate)}"
    if broken := len(base) - len(whole[0]):
        yield "base_broke", f"{broken} of {len(base)} runs"
    if whole[0] and not (level := np.mean([run.end(window) for run in whole[0]])) > 0:
        yield "no_share", f"mean {level:g}"
    if short := [run.name for run in both if (run.curve.steps > 0).sum() < max(MIN_VALUES, 2 * window)]:
        yield "few_values", text.some(short)
    if copies := [
        f"{a.name} and {b.name}" for a, b in itertools.combinations(both, 2) if _is_copy(a.curve, b.curve)
    ]:
        yield "repeated", text.some(copies)
    last = [sorted({float(run.curve.steps[-1]) for run in runs}) for runs in whole]
    every = sorted(itertools.chain(*last))
    axes = {run.columns[1] for run in both}
    if max(map(len, (*last, axes))) > 1 or (every and every[-1] > MOST_LONGER * every[0]):
        yield (
            "mixed_steps",
            f"last {text.some(sorted(axes), 4, ', ')} {text.some([f'{at:g}' for at in every])}",
        )
    if cut := [run.name for runs in whole for run in runs if run.is_cut]:
        yield "unfinished", text.some(cut)
    if len(names := {run.columns[0] for run in both}) > 1:
        yield "other_loss", text.some(sorted(names))
    if len(settings := {f"{run.settings}" for run in both}) > 1:
        yield "other_settings", text.some(sorted(settings))
    first = [[run.curve.values[0] for run in runs if run.curve.steps[0] <= 0] for runs in whole]
    if all(first):
        (low, high), (least, most) = ((min(side), max(side)) for side in first)
        if max(least - high, low - most) > margin * abs(low):
            yield "other_start", f"{low:.4f} to {high:.4f} and {least:.4f} to {most:.4f} at step 0"


def _is_copy(one: Curve, other: Curve) -> bool:
    """Whether two runs have the same losses, but for rounding, at all steps after the start that both have."""
    if one.steps.size == other.steps.size:
        mine = theirs = np.flatnonzero(one.steps > 0)
    else:
        shared, mine, theirs = np.intersect1d(one.steps, other.steps, assume_unique=True, return_indices=True)
        mine, theirs = mine[shared > 0], theirs[shared > 0]
    with np.errstate(divide="ignore", invalid="ignore"):  # a loss of 0, NaN or infinity
        apart = np.abs(one.values[mine] / other.values[theirs] - 1)
    return mine.size >= MIN_VALUES and bool((apart < SAME).all())


def _times(found: CurveVerdict, target: float | None) -> None:
    """Seconds to the target or the end, where every run has them."""
    what, sides = "the end" if target is None else f"a loss of {target:g}", []
    for runs in found.sides:
        steps = [run.curve.steps[-1] if target is None else crossing(run.curve, target) for run in runs]
        seconds = [run.seconds_at(step) for run, step in zip(runs, steps, strict=True)]
        if lost := sum(not 0 < each < math.inf for each in seconds):
            found.notes.append(f"time to {what}: {lost} of {len(runs)} runs have none")
            return
        sides.append(seconds)
    found.time = stats.unpaired(sides[0], sides[1])
    found.notes.append(f"time to {what}: {np.mean(sides[0]):.2f} and {np.mean(sides[1]):.2f} s, {found.time}")


def _runs(frames: Sequence[pd.DataFrame], side: str, value: str, step: str) -> list[OneRun]:
    found = []
    for i, frame in enumerate(frames):
        table = tidy(frame, f"{side}[{i}]", value, step)
        about, table.attrs = table.attrs, {}  # pandas copies them with every selection
        if (count := table["run"].nunique()) > MOST:
            raise UsageError(
                f"{about['source']}: {count:,} runs; expected at most {MOST}: is `run` a column of runs?"
            )
        steps, values = table["step"].to_numpy(float), table["value"].to_numpy(float)
        clock = table["time_s"].to_numpy(float) if "time_s" in table else None
        for name, at in table.groupby("run", sort=False).indices.items():
            is_alone = len(frames) == 1 or name == about["source"]
            first = table.iloc[at[0]]
            seed = SEED.search(f"seed{first['seed']}" if "seed" in table else str(name))
            found.append(
                OneRun(
                    str(name) if is_alone else f"{about['source']}:{name}",
                    Curve(steps[at], values[at]),
                    None if clock is None else clock[at],
                    about["last"][name],
                    (about["value"], about["step"]),
                    {key: text.short(str(first[key]), 40) for key in SETTINGS if key in table},
                    int(seed[1]) if seed else None,
                )
            )
    return found


def _by_seed(
    runs: Sequence[OneRun], frames: Sequence[pd.DataFrame], side: str, loss: str, step: str
) -> dict[int, Run]:
    """Runs as the paired verdict takes them: the training loss and the gradient norms too, where the frames have them."""
    beside = {
        column: {run.name: run.curve for run in _runs(frames, side, column, step)}
        for column in (loss, "grad_norm")
        if all(column in frame for frame in frames)
    }
    made: dict[int, Run] = {}
    for run in runs:
        if run.seed is None or run.seed in made:
            wrong = "two runs have this seed" if run.seed in made else "no seed"
            raise UsageError(
                f"paired=seed, {text.printable(run.name)}: {wrong}; expected a column seed, or seedN in the name, of its own"
            )
        is_training = run.columns[0] == "loss" or "train" in run.columns[0]
        made[run.seed] = Run(
            beside.get(loss, {}).get(run.name, run.curve),
            None if is_training else run.curve,
            beside.get("grad_norm", {}).get(run.name),
            settings={**run.settings, "loss": run.columns[0]},
        )
    return made


def _described(runs: Sequence[OneRun], side: str) -> Iterator[str]:
    """What was read of one side, and the gaps in it."""
    sizes, steps = [run.curve.steps.size for run in runs], np.concatenate([run.curve.steps for run in runs])
    value, step = runs[0].columns
    clock = "" if any(run.seconds is None for run in runs) else ", with times"
    yield (
        f"{side}: {text.plural(len(runs), 'run')}, {value} by {step}, {' to '.join(map(str, sorted({min(sizes), max(sizes)})))} values a run, steps "
        f"{steps.min():g} to {steps.max():g}{clock}"
    )
    every = np.unique(steps).size
    if gaps := [
        f"{run.name} lacks {every - run.curve.steps.size} of {every} steps"
        for run in runs
        if run.curve.steps.size < every
    ]:
        yield f"{side}, gaps: {text.some(gaps)}"
