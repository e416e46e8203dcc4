"""Soundness: whether the FP8 results of a machine passed their checks, by arm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.report.answer import Answer, reasons, shortened
from harness.report.numerics import SQNR, Worst, numerics_by_arm
from harness.report.training_proof import evidence_of, first_steps, named, summary_of
from harness.store import text
from harness.store.cause import REFUTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.runs import Machine

# Suites whose cases break casts and recipes on purpose: they can show that something is wrong, not that training is sound.
STUDIES = ("outliers", "codes")
LOOKED_FOR = "Looked for SQNR of products and casts, their codes, and the checks of a first training step"
CHECKS = "python -m harness sweep=linear checks each layer's output and gradients against a high-precision reference."


def is_sound(machine: Machine) -> Answer:
    """Every FP8 result passed the check that precedes its timing, or the ones that did not are named.

    Of a training step that check is its first loss and gradients against the control's, and the proof of its layers.
    """
    question = "Is it numerically sound?"
    worst = [w for w in numerics_by_arm(machine) if w.judged]
    fp8 = [w for w in worst if w.fp8 and w.sqnr]
    evidence = [
        _worst_of(suite, [w for w in fp8 if w.suite == suite])
        for suite in dict.fromkeys(w.suite for w in fp8)
    ]
    evidence += _codes_of([w for w in worst if w.checked_codes])
    bad = [f"{suite} {arm}: {reason}" for suite, arm, reason in _numerics_failures(machine)]
    bad += [f"{w.suite} {w.arm}: {text.count(w.mismatches)} codes differ" for w in worst if w.mismatches]
    bad += [
        f"{w.suite} {w.arm}: SQNR of {SQNR[m]} below its bound" for w in fp8 for m in w.sqnr if w.below(m)
    ]
    trained = first_steps(machine)
    bad += [f"train {s.arm}: {s.fault}" for s in trained if s.fault]
    sound = [s for s in trained if not s.fault]
    evidence += shortened(evidence_of(sound), 5) if sound else []
    if bad:
        sentence = f"{text.plural(len(bad), 'result')} outside of what the format allows."
        return Answer(question, "no", sentence, (*shortened(bad, 6), *evidence))
    studied = list(
        dict.fromkeys(w.suite for w in worst if w.suite in STUDIES and (w.sqnr or w.checked_codes))
    )
    judged = [w for w in fp8 if w.suite not in STUDIES]
    exact = sum(w.checked_codes for w in worst if w.suite not in STUDIES)
    if not judged and not exact and not trained:
        why = f"Only {' and '.join(studied)}, which break recipes on purpose." if studied else ""
        return Answer(
            question,
            "can't tell",
            _unchecked(machine, studied),
            (*evidence, CHECKS, *reasons(machine)),
            why or "No SQNR, no codes and no first training step in these runs.",
        )
    sentences, briefs = [], []
    if judged:
        low = min(judged, key=lambda w: w.worst[1])
        sentences.append(
            f"Every result of {named(w.arm for w in judged)} passed its check; the worst SQNR is "
            f"{text.number(low.worst[1])} dB, of {low.arm} in suite {low.suite}."
        )
        arms = text.plural(len({w.arm for w in judged}), "arm")
        briefs.append(f"{arms} passed every check, worst {text.number(low.worst[1])} dB")
    if exact:
        sentences.append(f"Casts agree with the reference code for code in {text.plural(exact, 'check')}.")
        if not judged:
            briefs.append(f"casts agree code for code in {text.plural(exact, 'check')}")
    if trained:
        sentences.append(summary_of(trained))
        if not judged:
            briefs.append(
                f"first training steps of {text.plural(len({s.arm for s in trained}), 'arm')} agree"
            )
    if studied:
        sentences.append(
            f"{' and '.join(studied)}: not judged here, since their cases break recipes on purpose."
        )
        briefs.append(f"{' and '.join(studied)} not judged")
    brief = f"{'; '.join(briefs)}."
    return Answer(
        question,
        "partly" if studied else "yes",
        " ".join(sentences),
        tuple(evidence),
        brief[0].upper() + brief[1:],
    )


def _worst_of(suite: str, worst: Sequence[Worst]) -> str:
    low = min(worst, key=lambda w: w.worst[1])
    metric, value = low.worst
    bound = f", bound {text.number(low.bounds[metric], 4)} dB" if metric in low.bounds else ""
    checks = text.plural(sum(w.cases for w in worst), "check")
    arms = ", ".join(dict.fromkeys(w.arm for w in worst))
    return f"{suite}: worst SQNR {text.number(value)} dB, of {low.arm}, {SQNR[metric]}{bound}; {checks} of {arms}"


def _codes_of(worst: Sequence[Worst]) -> list[str]:
    """A line a suite that compared codes with the reference's."""
    lines = []
    for suite in dict.fromkeys(w.suite for w in worst):
        own = [w for w in worst if w.suite == suite and not w.mismatches]
        checks = text.plural(sum(w.checked_codes for w in own), "check")
        if own:
            lines.append(f"{suite}: {', '.join(w.arm for w in own)} agree code for code in {checks}")
    return lines


def _unchecked(machine: Machine, studied: Sequence[str]) -> str:
    """Why nothing can be said of soundness: what was looked for, and what these runs hold."""
    if studied:
        return (
            f"Only {' and '.join(studied)} had results: their cases break casts and recipes on purpose, and show nothing of "
            "a training step."
        )
    return f"{LOOKED_FOR}: these runs hold only {', '.join(machine.suites)}, and none of them."


def _numerics_failures(machine: Machine) -> list[tuple[str, str, str]]:
    frame = machine.frame
    bad = frame[(frame["status"] == "failed") & frame["cause"].isin(REFUTED)]
    first = bad.drop_duplicates(["suite", "arm", "case_id"])
    constant = {suite: machine.constant_axes(suite) for suite in first["suite"]}
    return [
        (s, a, f"{text.case_label(text.axes_of(x), constant[s])}: {r.removeprefix('numerics: ')}")
        for s, a, x, r in zip(first["suite"], first["arm"], first["axes"], first["reason"], strict=True)
    ]
