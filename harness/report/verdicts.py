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
from harness.store import stats, text
from harness.store.case import baseline_of
from harness.store.compare import MODES, TIMES
from harness.store.errors import REFUTED, Cause

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from harness.report.records import FirstStep, Worst
    from harness.report.runs import Machine
    from harness.report.table import Row

Verdict = Literal["yes", "partly", "no", "can't tell"]
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
        verdict: one of `Verdict`.
        sentence: the verdict with its figures.
        evidence: what the sentence rests on, a line each.
    """

    about: str
    verdict: Verdict
    sentence: str
    evidence: tuple[str, ...]

    @property
    def question(self) -> str:
        """What a reader asks."""
        return QUESTIONS[self.about]


QUESTIONS = {
    "speed": "Is FP8 faster here?",
    "sound": "Is it numerically sound?",
    "ran": "Did FP8 really run?",
    "same": "Does it train the same?",
}


def answer(about: str, verdict: Verdict, evidence: Iterable[str], *said: str) -> Answer:
    """An answer; its sentence is made of what is said and not empty."""
    sentence = "; ".join(filter(None, said))
    return Answer(about, verdict, f"{sentence[:1].upper()}{sentence[1:]}.", tuple(evidence))


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
    if not machine.is_gpu:
        return answer(
            "speed", "can't tell", (), "CPU timings are no evidence about a GPU: run the same sweep there"
        )
    if not parts:
        ran = fp8_rows(machine)
        said = (
            "FP8 ran, but no arm could be paired with its bf16 baseline"
            if ran
            else "no FP8 arm was timed in these runs"
        )
        return answer("speed", "can't tell", reasons(machine), said)
    evidence = [line for part in parts for line in _spreads(machine, part)]
    if missing := sum(p["verdict"] == "missing" for p in pairs):
        evidence.append(f"{text.plural(missing, 'pair')} could not be computed; see Failed and skipped.")
    suite, mode, _, first = parts[0]
    slow = _slower_under_load(p for p in pairs if p["suite"] == suite)
    judged = Counter(_speed_verdict(own, arm in slow) for arm, _, own in by_arm(first))
    kinds = ", ".join(f"{judged[verdict]} {word}" for verdict, word in KINDS.items() if judged[verdict])
    arms = text.plural(judged.total(), "compiled FP8 arm" if mode == "compile" else "FP8 arm")
    loaded = sum(arm in slow for arm, *_ in by_arm(first))
    return answer(
        "speed",
        _together(list(judged.elements())),
        evidence,
        f"{what_of(suite)}, {arms}: {kinds}",
        f"{loaded} slower under load" if loaded else "",
    )


KINDS: Mapping[Verdict, str] = {
    "yes": "faster",
    "partly": "partly faster",
    "no": "not faster",
    "can't tell": "unclear",
}


class PairsOfMode(NamedTuple):
    """Pairs whose arms were run the same way: the mode of their baselines, with the load in words as `how`."""

    suite: str
    mode: str
    how: str
    pairs: list[Row]


@once
def deciding(machine: Machine) -> PairsOfMode | None:
    """The part that `is_faster` decides on; None where there is no ratio."""
    return next(iter(_by_part(fp8_pairs(machine))), None)


def _by_part(pairs: Iterable[Row]) -> list[PairsOfMode]:
    """The parts that have a ratio, the one that decides the question first."""
    parts = []
    for (suite, mode, regime), own in gathered(
        ((p["suite"], baseline_of(p).mode, p["regime"]), p) for p in pairs
    ).items():
        if any(known(p["speedup"]) for p in own):
            mode = mode if mode in (*MODES, "graph") else ""
            how = [f"{mode} against {mode}"] * bool(mode) + ["sustained load"] * (regime == "sustained")
            part = PairsOfMode(suite, mode, ", ".join(how), own)
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


def _spreads(machine: Machine, part: PairsOfMode) -> Iterable[str]:
    """A line an arm: geometric mean, slowest and fastest pair with their intervals."""
    for arm, mean, own in by_arm(part.pairs):
        ends = [
            f"{text.ratio(p['speedup'])} ({text.interval(p['low'], p['high'])})"
            + f" at {p['where']}" * bool(p["where"])
            for p in extremes(machine, own)
        ]
        name = ", ".join(filter(None, (part.suite, part.how, arm)))
        yield f"{name}: {text.ratio(mean)}; from {' to '.join(ends)}; {tally(p['verdict'] for p in own)}"


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
    evidence = [_worst_of(suite, own) for suite, own in suites.items()]
    evidence += [
        f"{suite}: {', '.join(w.arm for w in own)} agree code for code in {text.plural(sum(w.checked_codes for w in own), 'check')}"
        for suite, own in codes.items()
    ]
    evidence += few(_first_steps_said(passed), 5) if passed else []
    bad = [f"{suite} {arm}: {reason}" for suite, arm, reason in _refuted(machine)]
    bad += [f"{w.suite} {w.arm}: {text.count(w.mismatches)} codes differ" for w in worst if w.mismatches]
    bad += [f"{w.suite} {w.arm}: SQNR of {SQNR[m]} below its bound" for w in fp8 for m in w.failing]
    bad += [f"train {s.arm}: {s.fault}" for s in steps if s.fault]
    judged = [w for w in fp8 if w.suite not in STUDIES]
    exact = sum(w.checked_codes for w in worst if w.suite not in STUDIES)
    studied = " and ".join(
        dict.fromkeys(w.suite for w in worst if w.suite in STUDIES and (w.sqnr or w.checked_codes))
    )
    bare = [r for suite in WHAT for r in unchecked(machine, suite)]
    if bad:
        return answer(
            "sound",
            "no",
            [*few(bad, 6), *evidence],
            f"{text.plural(len(bad), 'result')} outside of what the format allows",
        )
    if not judged and not exact and not steps:
        how = "python -m harness sweep=linear checks each layer's output and gradients against a high-precision reference."
        said = (
            f"only {studied}, which break recipes on purpose"
            if studied
            else "no SQNR, no codes and no first training step in these runs"
        )
        return answer("sound", "can't tell", [*evidence, how, *reasons(machine)], said)
    warnings = {warning for step in passed for warning in step.warnings}
    arms = len({w.arm for w in judged})
    return answer(
        "sound",
        "partly" if studied or bare else "yes",
        evidence,
        f"{text.plural(arms, 'arm')} passed every check, worst {text.number(_least(judged).worst[1])} dB"
        if judged
        else "",
        f"casts agree code for code in {text.plural(exact, 'check')}" if exact and not judged else "",
        f"first training steps of {text.plural(len({s.arm for s in steps}), 'arm')} agree"
        if steps and not judged
        else "",
        f"{text.plural(len(warnings), 'warning')} of fp8core.verify" if warnings else "",
        f"{studied} not judged" if studied else "",
        f"{len(bare)} unchecked" if bare else "",
    )


def _worst_of(suite: str, own: Sequence[Worst]) -> str:
    low = _least(own)
    metric, value = low.worst
    bound = f", bound {text.number(low.bounds[metric], 4)} dB" if metric in low.bounds else ""
    arms = ", ".join(dict.fromkeys(w.arm for w in own))
    return (
        f"{suite}: worst SQNR {text.number(value)} dB, of {low.arm}, {SQNR[metric]}{bound}; "
        f"{text.plural(sum(w.cases for w in own), 'check')} of {arms}"
    )


def _least(worst: Sequence[Worst]) -> Worst:
    return min(worst, key=lambda w: w.worst[1])


def _first_steps_said(steps: Sequence[FirstStep]) -> list[str]:
    """The worst gaps, how the precision was proved, and every warning once."""
    warned: dict[str, dict[str, None]] = {}
    for step in steps:
        for warning in step.warnings:
            warned.setdefault(warning, {})[step.arm] = None
    far = max(steps, key=lambda s: s.loss_gap)
    said = f"train: largest gap of a first loss {text.number(far.loss_gap, 2)} nats, of {far.arm}"
    if ratios := [s for s in steps if known(s.norm_ratio)]:
        worst = max(ratios, key=lambda s: abs(math.log(s.norm_ratio)) if s.norm_ratio > 0 else math.inf)
        said += f"; norm of the first gradients at worst {text.number(worst.norm_ratio, 4)} of the control's, of {worst.arm}"
    proved = ", ".join(dict.fromkeys(s.arm for s in steps if s.proof))
    return [
        said,
        *([f"train: fp8core.verify proves {proved}, each layer by its output"] if proved else []),
        *(f"warning: {warning} ({', '.join(arms)})" for warning, arms in warned.items()),
    ]


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
    evidence = [*_counts_said(tally, arms), *_what_ran(machine), *reasons(machine)]
    total = sum(tally.values(), Counter[str]())
    uncounted = sum(tally[suite]["unproven"] for suite in WHAT if suite in tally)
    if short or disproved:
        lines = [*few(short + disproved, 6), *evidence]
        why = f"{text.plural(len(disproved), 'training run')} did not run in FP8 as asked"
        if short:
            why = f"{text.plural(len(short), 'measured arm')} ran fewer FP8 GEMMs than the recipe has"
        return answer("ran", "no", lines, why)
    if unproven:
        why = f"{text.plural(len(unproven), 'measured arm')} could not be proved to run in FP8"
        return answer("ran", "can't tell", [*few(unproven, 6), *evidence], why)
    if not total["arms"] and not total["direct"]:
        why = "FP8 arms ran, but nothing counted their GEMMs" if total["unproven"] else "no FP8 GEMM ran"
        return answer("ran", "can't tell", evidence, why)
    return answer(
        "ran",
        "partly" if uncounted else "yes",
        evidence,
        f"{total['counted']} of {total['expected']} expected FP8 GEMMs seen" if total["arms"] else "",
        f"{text.plural(total['direct'], 'arm')} on float8 operands" if total["direct"] else "",
        f"{uncounted} without a count" if uncounted else "",
    )


def _counts_said(tally: Mapping[str, Counter[str]], arms: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for suite, count in tally.items():
        if count["arms"]:
            yield f"{suite}: {count['counted']} of {count['expected']} FP8 GEMMs seen in {text.plural(count['arms'], 'measured arm')}"
        if count["direct"]:
            yield f"{suite}: {text.plural(count['direct'], 'measured arm')} on float8 operands"
        if count["unproven"]:
            yield f"{suite}: {text.plural(count['unproven'], 'measured arm')} without a count"
    for suite, own in arms.items():
        yield f"{suite}, arms that ran in FP8: {', '.join(dict.fromkeys(own))}"


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


def _what_ran(machine: Machine) -> Iterator[str]:
    """Backends and kernels that the FP8 arms report; of the kernels those whose name says FP8, if any does."""
    resolved = [resolved_of(r) for r in fp8_rows(machine)]
    kernels = list(dict.fromkeys(str(k) for r in resolved for k in r.get("kernels") or ()))
    named = [k for k in kernels if re.search("e4m3|e5m2|fp8|f8", k, re.IGNORECASE)]
    if backends := dict.fromkeys(str(r["backend"]) for r in resolved if r.get("backend")):
        yield f"backend: {', '.join(backends)}"
    if kernels:
        yield f"{'FP8 kernels' if named else 'kernels'}: {', '.join(few([k[:72] for k in named or kernels], 3))}"
