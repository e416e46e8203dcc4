"""Verdicts: the questions of someone who trains, each answered yes, partly, no or can't tell, in one sentence.

What an answer rests on stands in the tables of the page; the sentence counts it, and names the arms of a "no".
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from harness.judge.verdict.rows import is_candidate, unshown
from harness.judge.verdict.rows import trains_the_same as answer_over
from harness.report.records import (
    first_steps,
    fp8_rows,
    gemms,
    gemms_of,
    key_of,
    numerics_by_arm,
    unchecked,
    without_bound,
)
from harness.report.runs import computed_in, once
from harness.report.table import known
from harness.store import stats, text
from harness.store.case import NEGATIVE, Arm, arm_of, baseline_of, parse
from harness.store.compare import TIMES
from harness.store.errors import REFUTED, Cause
from harness.store.rows import grouped

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from harness.report.records import Worst
    from harness.report.runs import Machine
    from harness.report.table import Row

AnswerWord = Literal["yes", "partly", "no", "can't tell"]
# Suites that answer for speed: what they time, in two words
WHAT = {"train": "training steps", "linear": "whole layers", "gemm": "single GEMMs"}
VERDICTS = ("faster", "same", "slower", "unclear", "missing")


MOST_NAMED = 3  # arms in a sentence


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its verdict and that in one clause, with its figures.

    `about` is what is asked: "speed", "sound", "ran" or "same". Without evidence the runs did not measure it at all.
    """

    about: str
    verdict: AnswerWord
    clause: str
    has_evidence: bool = True

    @property
    def sentence(self) -> str:
        """The clause by itself."""
        return f"{capital(self.clause)}."


def capital(words: str) -> str:
    """Words as the beginning of a sentence."""
    return f"{words[:1].upper()}{words[1:]}"


def answer(about: str, verdict: AnswerWord, *parts: str, has_evidence: bool = True) -> Answer:
    """An answer whose clause is made of the parts that are not empty."""
    return Answer(about, verdict, "; ".join(filter(None, parts)), has_evidence)


def answers(machine: Machine) -> tuple[Answer, ...]:
    """Whether FP8 is faster, sound and really ran; whether it trains the same where something was trained."""
    found = (is_faster(machine), is_sound(machine), did_fp8_run(machine))
    return (*found, trains_the_same(machine)) if machine.trainings else found


def counted_by_name(named: Sequence[str], one: str, what: str) -> str:
    """How many are something, and of which suites and arms: "2 results are wrong: linear rowwise_eager"."""
    return f"{text.plural(len(named), one)} {what}: {text.some([*dict.fromkeys(named)], MOST_NAMED, ', ')}"


# Speed


@once
def fp8_pairs(machine: Machine) -> list[Row]:
    """Paired ratios of arms that ran FP8 against baselines that did not; those that are missing included.

    A GPU's against a control in float32, which nobody would train there, say nothing of a gain over bf16.
    """
    pairs = [p for p in machine.pairs if not machine.is_gpu or computed_in(p["axes"]) == "bf16"]
    arms = {(p["suite"], p["arm"]) for p in pairs if p["fp8"]}
    return [p for p in pairs if p["fp8"] or (p["verdict"] == "missing" and (p["suite"], p["arm"]) in arms)]


def what_of(suite: str) -> str:
    """What a suite times, in two words."""
    return WHAT.get(suite, f"suite {suite}")


def rank(suite: str) -> tuple[int, str]:
    """Place of a suite among those that answer for speed, whole steps first."""
    return [*WHAT, suite].index(suite), suite


def tally(verdicts: Iterable[str]) -> str:
    """How many of each verdict: "3 faster, 1 same"."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])


def by_arm(pairs: Iterable[Row]) -> list[tuple[str, float, list[Row]]]:
    """Each arm of one part with its geometric mean and pairs, the fastest first; arms without a ratio are left out."""
    arms = grouped((p["arm"], p) for p in pairs)
    found = [(arm, geometric_mean(own), own) for arm, own in arms.items()]
    return sorted((each for each in found if known(each[1])), key=lambda each: -each[1])


def geometric_mean(pairs: Iterable[Row]) -> float:
    """Geometric mean of the speedups that could be formed; NaN without one."""
    formed = [p["speedup"] for p in pairs if known(p["speedup"])]
    return stats.geometric_mean(formed).value if formed else math.nan


def is_faster(machine: Machine) -> Answer:
    """Whole layers decide where they were measured, compiled ones first, since that is how models are trained.

    Each arm is judged by itself, against the baseline of its own mode: a pool of a fast arm and a slow one is neither.
    """
    if not machine.is_gpu:
        return answer(
            "speed", "can't tell", "CPU timings are no evidence about a GPU: run the same sweep there"
        )
    part = deciding(machine)
    if part is None:
        ran = "FP8 ran, but no arm could be paired with its bf16 baseline" if fp8_rows(machine) else ""
        missing = "no FP8 arm was timed in these runs"
        return answer("speed", "can't tell", ran or missing, has_evidence=bool(ran))
    slow = _slower_under_load(p for p in fp8_pairs(machine) if p["suite"] == part.suite)
    each = {arm: _speed_verdict(own, arm in slow) for arm, _, own in by_arm(part.pairs)}
    judged = Counter(each.values())
    kinds = ", ".join(f"{judged[verdict]} {word}" for verdict, word in KINDS.items() if judged[verdict])
    arms = text.plural(len(each), "compiled FP8 arm" if part.mode == "compile" else "FP8 arm")
    loaded = len(slow & each.keys())
    return answer(
        "speed",
        _together(list(each.values())),
        f"{what_of(part.suite)}, {arms}: {kinds}",
        f"{loaded} slower under load" if loaded else "",
    )


KINDS: Mapping[AnswerWord, str] = {
    "yes": "faster",
    "partly": "partly faster",
    "no": "not faster",
    "can't tell": "unclear",
}


class PairsOfMode(NamedTuple):
    """Pairs whose arms were run the same way: the mode of their baselines."""

    suite: str
    mode: str
    pairs: list[Row]


@once
def deciding(machine: Machine) -> PairsOfMode | None:
    """The part that `is_faster` decides on: whole steps before layers, alone before under load; None without a ratio."""
    parts = grouped(((p["suite"], baseline_of(p).mode, p["regime"]), p) for p in fp8_pairs(machine))
    ranked = sorted(
        (rank(suite)[0], regime == "sustained", mode != "compile", suite, mode, regime)
        for (suite, mode, regime), own in parts.items()
        if any(known(p["speedup"]) for p in own)
    )
    if not ranked:
        return None
    *_, suite, mode, regime = ranked[0]
    return PairsOfMode(suite, mode, parts[suite, mode, regime])


def _speed_verdict(pairs: Sequence[Mapping[str, Any]], lost_under_load: bool) -> AnswerWord:
    """Verdict on one arm; a gain that is lost under sustained load holds in part."""
    count = Counter(p["verdict"] for p in pairs)
    decided = count["faster"] + count["slower"] + count["same"]
    if not decided or count["unclear"] > decided:
        return "can't tell"
    if not count["faster"]:
        return "no"
    whole = 2 * count["faster"] >= decided and not (count["slower"] or count["missing"] or lost_under_load)
    return "yes" if whole else "partly"


def _together(verdicts: Collection[AnswerWord]) -> AnswerWord:
    """The answer over arms: yes where it is yes for each of them, partly where it is for some."""
    if len(set(verdicts)) == 1 and "partly" not in verdicts:
        return next(iter(verdicts))
    return "partly" if {"yes", "partly"} & set(verdicts) else "can't tell"


def _slower_under_load(pairs: Iterable[Row]) -> set[str]:
    """Arms that are slower than bf16 under sustained load in a case in which they are not slower alone."""
    seen = grouped((p["regime"] == "sustained", p) for p in pairs)
    loaded = {(p["arm"], p["case_id"]) for p in seen[True] if p["verdict"] == "slower"}
    alone = {(p["arm"], p["case_id"]) for p in seen[False] if p["verdict"] in ("faster", "same", "unclear")}
    return {arm for arm, _ in alone & loaded}


def counted(pairs: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """What a range or a mean over pairs is over: models where each case has another one, else cases."""
    cases = {p["case_id"] for p in pairs}
    models = {text.axes_of(p["axes"]).get("model") for p in pairs} - {None}
    only_models = all(p["suite"] == "train" for p in pairs) and len(models) == len(cases)
    return (len(models), "model") if only_models else (len(cases), "case")


# Soundness


class WrongResult(NamedTuple):
    """A result that is wrong, and how."""

    suite: str
    arm: Arm
    what: str


@once
def faults(machine: Machine) -> list[WrongResult]:
    """Every FP8 result that did not pass its check; a study, which breaks recipes on purpose, can refute as well."""
    worst = [w for w in numerics_by_arm(machine) if w.judged]
    refuted = {(r["suite"], r["arm"], r["case_id"]): r for r in machine.pick(status="failed", cause=REFUTED)}
    return [
        *(WrongResult(w.suite, w.fields, "SQNR below its bound") for w in worst if w.fp8 for _ in w.failing),
        *(WrongResult(w.suite, w.fields, "codes differ") for w in worst if w.mismatches),
        *(WrongResult(r["suite"], arm_of(r), "a check failed") for r in refuted.values()),
        *(
            WrongResult("train", parse(s.arm), "first step not sound")
            for s in first_steps(machine)
            if s.fault
        ),
    ]


def is_sound(machine: Machine) -> Answer:
    """Every FP8 result passed the check that precedes its timing, or the arms of those that did not are named.

    Of a training step that check is its first loss and gradients against the control's, and the proof of its layers.
    """
    if bad := faults(machine):
        return answer(
            "sound",
            "no",
            counted_by_name(
                [f"{f.suite} {f.arm}" for f in bad], "result", "outside of what the format allows"
            ),
        )
    worst, steps = [w for w in numerics_by_arm(machine) if w.judged], first_steps(machine)
    fp8 = [w for w in worst if w.fp8 and w.sqnr]
    every = [w for w in fp8 if w.proves]
    judged = [w for w in every if not w.unjudged]
    exact = sum(w.checked_codes for w in worst if w.proves)
    broken = dict.fromkeys(w.suite for w in worst if not w.proves and (w.sqnr or w.checked_codes))
    studied = " and ".join(broken)
    if not judged and not exact and not steps:
        nothing = (
            "no SQNR has a bound in these runs"
            if every
            else "no SQNR, no codes and no first training step in these runs"
        )
        reason = f"only {studied}, which break recipes on purpose" if studied else nothing
        way = "python -m harness sweep=linear checks each layer"
        return answer("sound", "can't tell", reason, way, has_evidence=bool(studied or every))
    unseen = {key_of(row) for suite in WHAT for row in unchecked(machine, suite)} - without_bound(machine)
    bare = len(unseen) + sum(w.unjudged for w in every)
    if judged:
        reason = f"{text.plural(len({w.arm for w in judged}), 'arm')} passed every check, worst {text.number(least(judged).worst[1])} dB"
    elif steps:
        reason = f"first training steps of {text.plural(len({s.arm for s in steps}), 'arm')} agree"
    else:
        reason = f"casts agree code for code in {text.plural(exact, 'check')}"
    warnings = {warning for step in steps for warning in step.warnings}
    return answer(
        "sound",
        "partly" if studied or bare else "yes",
        reason,
        f"{text.plural(len(warnings), 'warning')} of fp8core.verify" if warnings else "",
        f"{studied} not judged" if studied else "",
        f"{bare} unchecked" if bare else "",
    )


def least(worst: Sequence[Worst]) -> Worst:
    """The one with the smallest SQNR."""
    return min(worst, key=lambda w: w.worst[1])


# Proof


def did_fp8_run(machine: Machine) -> Answer:
    """The GEMMs that a profiler saw in FP8 against those that the recipe should run in FP8.

    An arm without a count is taken as FP8 only where its own operands were float8 and went to the GEMM directly. Of training
    runs counts what `fp8core.verify` saw; emulated arms are in none.
    """
    ran = [(row, gemms(row)) for row in fp8_rows(machine)]
    without, unproven = (
        [f"{row['suite']} {row['arm']}" for row in machine.pick(cause=cause, metric=TIMES)]
        for cause in (Cause.NOT_FP8, Cause.UNPROVEN)
    )
    short = [*without, *(f"{row['suite']} {row['arm']}" for row, each in ran if each.short)]
    disproved: list[str] = []
    every = [each for _, each in ran]
    for setup in machine.trainings:
        for arm, about in setup.resolved.items():
            if (runs := setup.arms.get(arm)) and about.get("fp8_layers") and not about.get("emulated"):
                every.append(gemms_of(about))
                for run in (run for run in runs.values() if run.doubted):
                    (disproved if run.disproved else unproven).append(f"divergence {arm}")
    found: list[tuple[AnswerWord, list[str], str, str]] = [
        ("no", short, "measured arm", "ran fewer FP8 GEMMs than the recipe has"),
        ("no", disproved, "training run", "did not run in FP8 as asked"),
        ("can't tell", unproven, "measured arm", "could not be proved to run in FP8"),
    ]
    for verdict, named, one, what in found:
        if named:
            return answer("ran", verdict, counted_by_name(named, one, what))
    counts = [each for each in every if each.seen is not None]
    direct = sum(each.on_operands for each in every)
    if not counts and not direct:
        why = "FP8 arms ran, but nothing counted their GEMMs" if every else "no FP8 GEMM ran"
        return answer("ran", "can't tell", why, has_evidence=bool(every))
    uncounted = sum(row["suite"] in WHAT and each.seen is None and not each.direct for row, each in ran)
    seen, due = sum(each.seen or 0 for each in counts), sum(each.due for each in counts)
    return answer(
        "ran",
        "partly" if uncounted else "yes",
        f"{seen} of {due} expected FP8 GEMMs seen" if counts else "",
        f"{text.plural(direct, 'arm')} on float8 operands" if direct else "",
        f"{uncounted} without a count" if uncounted else "",
    )


# Loss


def trains_the_same(machine: Machine) -> Answer:
    """Whether FP8 reaches the control's loss, by the verdicts on arms that are no controls themselves."""
    found, every = answer_over(machine.verdicts), [v for v in machine.verdicts if is_candidate(v.fields)]
    count = Counter(v.verdict.outcome for v in every)
    if not count:
        return answer("same", found, "no FP8 arm was trained in these runs", has_evidence=False)
    outcomes = ", ".join(f"{count[o]} {o}" for o in ("PASS", "FAIL", "INCONCLUSIVE") if count[o])
    # A PASS says little where nobody has seen a fault fail: leaving the control out must not give a better answer.
    unseen = unshown(machine.verdicts) if found in ("yes", "partly") or set(count) == {"PASS"} else ""
    lacking = f", no {NEGATIVE} {unseen}" if unseen else ""
    arms = len({v.arm for v in every})  # of several set-ups, or in several runs, an arm has several verdicts
    several = f"{text.plural(count.total(), 'verdict')} on " * (arms != count.total())
    return answer("same", found, f"{several}{text.plural(arms, 'FP8 arm')}: {outcomes}{lacking}")
