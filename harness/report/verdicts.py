"""Verdicts: the three questions of someone who trains, each answered yes, partly, no or can't tell."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from harness.judge import gathered
from harness.judge.diagnosis import few
from harness.report.records import SQNR, first_steps, fp8_rows, gemms, numerics_by_arm, unchecked
from harness.report.runs import computed_in, once
from harness.report.table import known, resolved_of
from harness.report.words import paragraphs
from harness.store import stats, text
from harness.store.case import baseline_of
from harness.store.compare import MODES, TIMES
from harness.store.errors import REFUTED, Cause

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from harness.report.records import FirstStep, Worst
    from harness.report.runs import Machine
    from harness.report.table import Row

Verdict = Literal["yes", "partly", "no", "can't tell"]
MOST_BRIEF = 90  # two lines of a third of the page
WHAT = {  # suites that answer for speed: what they time, in two words, and what that includes
    "train": ("training steps", "forward, backward, update"),
    "linear": ("whole layers", "forward and backward, casts included"),
    "gemm": ("single GEMMs", "operands already cast"),
}
VERDICTS = ("faster", "same", "slower", "unclear", "missing")
# Suites whose cases break casts and recipes on purpose: they can show that something is wrong, not that training is sound.
STUDIES = ("outliers", "codes")


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its verdict in one sentence, and what the verdict rests on.

    Attributes:
        about: what is asked: "speed", "sound", "ran" or "same".
        question: what a reader asks.
        verdict: one of `Verdict`.
        sentence: the verdict with its figures.
        brief: the sentence in at most `MOST_BRIEF` characters, for the first screen.
        evidence: what the sentence rests on, a line each.
    """

    about: str
    question: str
    verdict: Verdict
    sentence: str
    brief: str
    evidence: tuple[str, ...]


def answer(about: str, verdict: Verdict, evidence: Iterable[str], **facts: Any) -> Answer:
    """An answer in the words of the block `answer_ABOUT`: the question, the sentence and, where it is long, its brief."""
    question, *said = paragraphs(f"answer_{about}", verdict=verdict, **facts)
    return Answer(about, question, verdict, said[0], text.short(said[-1], MOST_BRIEF), tuple(evidence))


def answers(machine: Machine) -> tuple[Answer, ...]:
    """The headline of one machine; whether it trains the same where something was trained."""
    found = (is_faster(machine), is_sound(machine), did_fp8_run(machine))
    if not machine.trainings:
        return found
    from harness.report.training import trains_the_same

    return (*found, trains_the_same(machine))


def reasons(machine: Machine, most: int = 4) -> list[str]:
    """Arms that did not run, by reason, the most frequent first."""
    bad = [r for r in machine.pick(metric=TIMES) if r["status"] != "ok"]
    counts = Counter((r["status"], r["suite"], r["reason"]) for r in bad)
    lines = [f"{s}, {suite}, {text.plural(n, 'arm')}: {why}" for (s, suite, why), n in counts.most_common()]
    return [*few(lines, most)]


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
    return WHAT[suite][0] if suite in WHAT else f"suite {suite}"


def rank(suite: str) -> tuple[int, str]:
    """Place of a suite among those that answer for speed, whole steps first."""
    return [*WHAT, suite].index(suite), suite


def tally(verdicts: Iterable[str]) -> str:
    """How many of each verdict: "3 faster, 1 same"."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])


def by_arm(pairs: Iterable[Row]) -> list[tuple[str, float, list[Row]]]:
    """Each arm of one part with its geometric mean and pairs, the fastest first; arms without a ratio are left out."""
    arms = gathered((p["arm"], p) for p in pairs)
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
    pairs = fp8_pairs(machine)
    parts = _by_part(pairs) if machine.is_gpu else []
    if not parts:
        told = "Run the same sweep on the GPU in question; the report then answers here."
        ran = bool(fp8_rows(machine))
        evidence = reasons(machine) if machine.is_gpu else [told]
        return answer("speed", "can't tell", evidence, machine=machine, ran=ran, arms=[])
    evidence = [line for part in parts for line in _spreads(machine, part)]
    missing = sum(p["verdict"] == "missing" for p in pairs)
    if missing:
        evidence.append(f"{text.plural(missing, 'pair')} could not be computed; see Failed and skipped.")
    suite, mode, how, first = parts[0]
    arms, slow = by_arm(first), _slower_under_load(p for p in pairs if p["suite"] == suite)
    slower = [arm for arm, *_ in arms if arm in slow]
    judged = [_speed_verdict(own, arm in slower) for arm, _, own in arms]
    told_arms = []
    for arm, mean, own in arms:
        formed = [p for p in own if known(p["speedup"])]
        interval = text.interval(formed[0]["low"], formed[0]["high"]) if len(formed) == 1 else ""
        told_arms.append((arm, mean, interval, tally(p["verdict"] for p in own)))
    return answer(
        "speed",
        _together(judged),
        evidence,
        machine=machine,
        arms=told_arms,
        what=what_of(suite),
        includes=WHAT[suite][1] if suite in WHAT else "",
        how=how,
        compiled=mode == "compile",
        over=counted([p for p in arms[0][2] if known(p["speedup"])]),
        slower=slower,
        judged=judged,
        most=MOST_BRIEF,
    )


class Part(NamedTuple):
    """Pairs whose arms were run the same way: the mode of their baselines, with the load in words as `how`."""

    suite: str
    mode: str
    how: str
    pairs: list[Row]


@once
def deciding(machine: Machine) -> Part | None:
    """The part that `is_faster` decides on; None where there is no ratio."""
    return next(iter(_by_part(fp8_pairs(machine))), None)


def _by_part(pairs: Iterable[Row]) -> list[Part]:
    """The parts that have a ratio, the one that decides the question first."""
    parts = []
    for (suite, mode, regime), own in gathered(
        ((p["suite"], baseline_of(p).mode, p["regime"]), p) for p in pairs
    ).items():
        if any(known(p["speedup"]) for p in own):
            mode = mode if mode in (*MODES, "graph") else ""
            how = [f"{mode} against {mode}"] * bool(mode) + ["sustained load"] * (regime == "sustained")
            part = Part(suite, mode, ", ".join(how), own)
            parts.append(((rank(suite)[0], regime == "sustained", mode != "compile", suite, part.how), part))
    return [part for _, part in sorted(parts, key=lambda each: each[0])]


def _speed_verdict(pairs: Sequence[Mapping[str, Any]], lost_under_load: bool) -> Verdict:
    """Verdict on one arm; a gain that is lost under sustained load holds in part."""
    count = Counter(p["verdict"] for p in pairs)
    decided = count["faster"] + count["slower"] + count["same"]
    if not decided or count["unclear"] > decided:
        return "can't tell"
    if not count["faster"]:
        return "no"
    whole = 2 * count["faster"] >= decided and not (count["slower"] or count["missing"] or lost_under_load)
    return "yes" if whole else "partly"


def _together(verdicts: Collection[Verdict]) -> Verdict:
    """The answer over arms: yes where it is yes for each of them, partly where it is for some."""
    if len(set(verdicts)) == 1 and "partly" not in verdicts:
        return next(iter(verdicts))
    return "partly" if {"yes", "partly"} & set(verdicts) else "can't tell"


def _slower_under_load(pairs: Iterable[Row]) -> set[str]:
    """Arms that are slower than bf16 under sustained load in a case in which they are not slower alone."""
    seen = gathered((p["regime"] == "sustained", p) for p in pairs)
    loaded = {(p["arm"], p["case_id"]) for p in seen[True] if p["verdict"] == "slower"}
    alone = {(p["arm"], p["case_id"]) for p in seen[False] if p["verdict"] in ("faster", "same", "unclear")}
    return {arm for arm, _ in alone & loaded}


def counted(pairs: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """What a range or a mean over pairs is over: models where each case has another one, else cases."""
    cases = {p["case_id"] for p in pairs}
    models = {text.axes_of(p["axes"]).get("model") for p in pairs} - {None}
    only_models = all(p["suite"] == "train" for p in pairs) and len(models) == len(cases)
    return (len(models), "model") if only_models else (len(cases), "case")


def extremes(machine: Machine, pairs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The slowest and the fastest pair, each with its case in words as `where`, "" where there is a single case."""
    formed = sorted((p for p in pairs if known(p["speedup"])), key=lambda p: p["speedup"])
    several = len({p["case_id"] for p in formed}) > 1
    return [{**p, "where": machine.label(p) if several else ""} for p in (*formed[:1], *formed[-1:])]


def _spreads(machine: Machine, part: Part) -> Iterable[str]:
    """A line an arm: geometric mean, slowest and fastest pair with their intervals."""
    for arm, mean, own in by_arm(part.pairs):
        ends = [
            f"{text.ratio(p['speedup'])} ({text.interval(p['low'], p['high'])})"
            + f" at {p['where']}" * bool(p["where"])
            for p in extremes(machine, own)
        ]
        name = ", ".join(filter(None, (part.suite, part.how, arm)))
        yield f"{name}: {text.ratio(mean)}; from {' to '.join(ends)}"


# Soundness


def is_sound(machine: Machine) -> Answer:
    """Every FP8 result passed the check that precedes its timing, or the ones that did not are named.

    Of a training step that check is its first loss and gradients against the control's, and the proof of its layers.
    """
    worst = [w for w in numerics_by_arm(machine) if w.judged]
    fp8 = [w for w in worst if w.fp8 and w.sqnr]
    steps = first_steps(machine)
    passed = [s for s in steps if not s.fault]
    suites = gathered((w.suite, w) for w in fp8)
    codes = gathered((w.suite, w) for w in worst if w.checked_codes and not w.mismatches)
    evidence = paragraphs("evidence_sound", suites=suites, codes=codes, results=SQNR, least=_least)
    evidence += few(_first_steps_said(passed), 5) if passed else []
    bad = [f"{suite} {arm}: {reason}" for suite, arm, reason in _refuted(machine)]
    bad += [f"{w.suite} {w.arm}: {text.count(w.mismatches)} codes differ" for w in worst if w.mismatches]
    bad += [f"{w.suite} {w.arm}: SQNR of {SQNR[m]} below its bound" for w in fp8 for m in w.failing]
    bad += [f"train {s.arm}: {s.fault}" for s in steps if s.fault]
    judged = [w for w in fp8 if w.suite not in STUDIES]
    exact = sum(w.checked_codes for w in worst if w.suite not in STUDIES)
    studied = list(
        dict.fromkeys(w.suite for w in worst if w.suite in STUDIES and (w.sqnr or w.checked_codes))
    )
    bare = [r for suite in WHAT for r in unchecked(machine, suite)]
    verdict: Verdict = "partly" if studied or bare else "yes"
    if bad:
        verdict, evidence = "no", [*few(bad, 6), *evidence]
    elif not judged and not exact and not steps:
        verdict, evidence = "can't tell", [*evidence, *paragraphs("how_to_check"), *reasons(machine)]
    return answer(
        "sound",
        verdict,
        evidence,
        bad=len(bad),
        studied=" and ".join(studied),
        bare=len(bare),
        suites=machine.suites,
        judged=_named(w.arm for w in judged),
        arms=len({w.arm for w in judged}),
        low=_least(judged) if judged else None,
        exact=exact,
        stepped=_named(s.arm for s in steps),
        steps=len({s.arm for s in steps}),
        gap=max((s.loss_gap for s in steps), default=0.0),
    )


def _least(worst: Sequence[Worst]) -> Worst:
    return min(worst, key=lambda w: w.worst[1])


def _named(arms: Iterable[str], most: int = 6) -> str:
    """Arms by name; how many where they are too many for a sentence and the evidence below has the names."""
    distinct = list(dict.fromkeys(arms))
    return ", ".join(distinct) if len(distinct) <= most else f"{len(distinct)} arms, named below,"


def _first_steps_said(steps: Sequence[FirstStep]) -> list[str]:
    """The worst gaps, how the precision was proved, and every warning once."""
    warned: dict[str, dict[str, None]] = {}
    for step in steps:
        for warning in step.warnings:
            warned.setdefault(warning, {})[step.arm] = None
    ratios = [s for s in steps if known(s.norm_ratio)]
    return paragraphs(
        "evidence_first_steps",
        far=max(steps, key=lambda s: s.loss_gap),
        worst=max(
            ratios,
            key=lambda s: abs(math.log(s.norm_ratio)) if s.norm_ratio > 0 else math.inf,
            default=None,
        ),
        proved=list(dict.fromkeys(s.arm for s in steps if s.proof)),
        warned=warned,
    )


def _refuted(machine: Machine) -> list[tuple[str, str, str]]:
    found: dict[tuple[str, str, str], tuple[str, str, str]] = {}
    for r in machine.pick(status="failed", cause=REFUTED):
        said = f"{machine.label(r)}: {r['reason'].removeprefix('numerics: ')}"
        found.setdefault((r["suite"], r["arm"], r["case_id"]), (r["suite"], r["arm"], said))
    return list(found.values())


# Proof


def did_fp8_run(machine: Machine) -> Answer:
    """The GEMMs that a profiler saw in FP8 against those that the recipe should run in FP8.

    An arm without a count is taken as FP8 only where its own operands were float8 and went to the GEMM directly.
    """
    tally: dict[str, Counter[str]] = {}
    arms = defaultdict[str, list[str]](list)  # suite -> arms that were counted or ran on float8 operands
    short = [_said(r, r["reason"]) for r in machine.pick(cause=Cause.NOT_FP8, metric=TIMES)]
    for row in fp8_rows(machine):
        count, ran = tally.setdefault(row["suite"], Counter()), gemms(row)
        if ran.seen is not None or ran.direct:
            arms[row["suite"]].append(row["arm"])
        if ran.seen is None:
            count["direct" if ran.direct else "unproven"] += 1
            continue
        count.update(arms=1, counted=ran.seen, expected=ran.due)
        if ran.short:
            short.append(_said(row, f"{ran.seen} of {ran.due} GEMMs in FP8"))
    tally["divergence"], disproved, unproven = _trained_in_fp8(machine)
    unproven += [_said(r, r["reason"]) for r in machine.pick(cause=Cause.UNPROVEN, metric=TIMES)]
    evidence = [*paragraphs("evidence_ran", tally=tally, arms=arms, **_what_ran(machine)), *reasons(machine)]
    total = sum(tally.values(), Counter[str]())
    uncounted = sum(tally[suite]["unproven"] for suite in WHAT if suite in tally)
    verdict: Verdict = "partly" if uncounted else "yes"
    if short or disproved:
        verdict, evidence = "no", [*few(short + disproved, 6), *evidence]
    elif unproven:
        verdict, evidence = "can't tell", [*few(unproven, 6), *evidence]
    elif not total["arms"] and not total["direct"]:
        verdict = "can't tell"
    facts = {"short": len(short), "disproved": len(disproved), "unproven": len(unproven)}
    return answer("ran", verdict, evidence, total=total, uncounted=uncounted, **facts)


def _said(row: Mapping[str, Any], why: str) -> str:
    return f"{row['suite']} {row['arm']}, case {row['case_id']}: {why}"


def _trained_in_fp8(machine: Machine) -> tuple[Counter[str], list[str], list[str]]:
    """What `fp8core.verify` counted in the training runs of FP8 arms, what it disproved, and what it could not prove.

    Returns:
        Totals of `arms`, FP8 GEMMs `counted` and `expected`, and the arms left `unproven`; emulated arms are in none.
        A line for each run whose FP8 layers do not run as asked, and for each that was not proved to.
    """
    count: Counter[str] = Counter()
    disproved: list[str] = []
    unproven: list[str] = []
    for setup in machine.trainings:
        for arm, about in setup.resolved.items():
            runs = setup.arms.get(arm)
            if not runs or not about.get("fp8_layers") or about.get("emulated"):
                continue
            for seed, run in runs.items():
                if run.doubted:
                    told = disproved if run.disproved else unproven
                    told.append(f"divergence {arm}, seed {seed}: {run.proof}")
            seen = about.get("fp8_gemms")
            if seen is None:
                count["unproven"] += 1
            else:
                count.update(arms=1, counted=seen, expected=about.get("fp8_gemms_expected", seen))
    return count, disproved, unproven


def _what_ran(machine: Machine) -> Row:
    """Backends and kernels that the FP8 arms report; of the kernels those whose name says FP8, if any does."""
    resolved = [resolved_of(r) for r in fp8_rows(machine)]
    kernels = list(dict.fromkeys(str(k) for r in resolved for k in r.get("kernels") or ()))
    named = [k for k in kernels if re.search("e4m3|e5m2|fp8|f8", k, re.IGNORECASE)]
    return {
        "backends": list(dict.fromkeys(str(r["backend"]) for r in resolved if r.get("backend"))),
        "kind": "FP8 kernels" if named else "kernels",
        "kernels": few([k[:72] for k in named or kernels], 3),
    }
