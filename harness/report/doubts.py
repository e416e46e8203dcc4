"""Doubts: why an arm's figure must not be read as a gain, and which arms have no figure at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.report.headline import recipe
from harness.report.numerics import fp8_newest, numerics_by_arm
from harness.report.runs import once
from harness.report.soundness import STUDIES
from harness.report.table import resolved_of
from harness.report.training import is_candidate
from harness.report.training_proof import first_steps
from harness.report.verdicts import fp8_pairs
from harness.store import text
from harness.store.arm import Arm, arm_of, parse
from harness.store.cause import REFUTED
from harness.store.compare import TIMES, rows_of
from harness.store.json_columns import parse as parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.report.headline import Standing
    from harness.report.runs import Machine

NO_LOSS = "no loss judged"


@dataclass(frozen=True, slots=True)
class Unjudged:
    """An FP8 arm without a single ratio."""

    arm: str
    fields: Arm
    word: str  # failed, skipped or missing
    reason: str


@dataclass(frozen=True, slots=True)
class Checks:
    """What stands against the results, the GEMMs and the loss of an arm, each in a few words; "" what was judged and passed."""

    results: str  # of its recipe
    gemms: str  # of the arm itself, in its suite
    loss: str  # of its recipe


def doubts(machine: Machine, standing: Standing) -> list[str]:
    """What stands against the figure of an arm: each in a few words; none where all of it was judged and passed.

    A loss that was not judged counts only where another recipe's was.
    """
    found = []
    unclear = sum(p["verdict"] == "unclear" for p in standing.pairs)
    if unclear:
        found.append(f"can't tell in {_of(unclear, len(standing.pairs))}")
    every = fp8_pairs(machine)
    own = every[(every["suite"] == standing.suite) & (every["arm"] == standing.arm)]
    missing = int(((own["verdict"] == "missing") & (own["regime"] != "sustained")).sum())
    if missing:
        found.append(f"{text.plural(missing, 'case')} without a time")
    not_slower = {p["case_id"] for p in standing.pairs if p["verdict"] != "slower"}
    loaded = [p for p in rows_of(own[own["regime"] == "sustained"]) if p["case_id"] in not_slower]
    slower = sum(p["verdict"] == "slower" for p in loaded)
    if slower:
        found.append(f"slower under load in {_of(slower, len(loaded))}")
    sides = _sides(machine, standing)
    beside = sum(any(t.get("contended") for t in pair) for pair in sides)
    if beside:
        found.append(f"beside another process in {_of(beside, len(sides))}")
    alone = sum(any(hit := _throttled(pair)) and not all(hit) for pair in sides)
    if alone:
        found.append(f"one side throttled in {_of(alone, len(sides))}")
    seen = checks(machine, standing)
    found += [words for words in (seen.results, seen.gemms) if words]
    if seen.loss and (seen.loss != NO_LOSS or any(is_candidate(v.fields) for v in machine.verdicts)):
        found.append(seen.loss)
    return found


def throttled(machine: Machine, standing: Standing) -> str:
    """In how many cases both sides were throttled, in words; "" for none.

    That is no doubt: products limited by power are throttled on both sides of every round (see `harness.gate.conditions`).
    """
    sides = _sides(machine, standing)
    both = sum(all(_throttled(pair)) for pair in sides)
    return f"both sides throttled in {_of(both, len(sides))}" if both else ""


def checks(machine: Machine, standing: Standing) -> Checks:
    """What was found of an arm: of its recipe where it has one, since that is what is computed, else of the arm."""
    return Checks(_results(machine, standing), _gemms(machine, standing), _loss(machine, standing))


def unjudged(machine: Machine, suite: str) -> list[Unjudged]:
    """FP8 arms of a suite that were asked for and have no ratio in any case, with the first reason of each."""
    ratios = machine.ratios
    own = ratios[(ratios["suite"] == suite) & (ratios["regime"] != "sustained")]
    known = set(own["arm"][own["speedup"].notna()])
    found: dict[str, Unjudged] = {}
    for row in rows_of(own):
        arm = arm_of(row)
        if (
            row["arm"] not in known
            and row["arm"] not in found
            and is_candidate(arm)
            and (arm.has_fp8 or arm.peer)
        ):
            word = row["status"] if row["status"] in ("failed", "skipped") else "missing"
            found[row["arm"]] = Unjudged(row["arm"], arm, word, row["why_not"] or row["reason"])
    return list(found.values())


def _results(machine: Machine, standing: Standing) -> str:
    """Studies break recipes on purpose: they can refute, and prove nothing."""
    checked = [w for w in numerics_by_arm(machine) if w.fp8 and w.judged and _same(standing, w.fields)]
    if any(w.below(m) for w in checked for m in w.sqnr):
        return "SQNR below its bound"
    if any(w.mismatches for w in checked):
        return "codes differ"
    frame = machine.frame
    refuted = frame[(frame["status"] == "failed") & frame["cause"].isin(REFUTED)]
    if any(_same(standing, arm_of(row)) for row in rows_of(refuted)):
        return "a check failed"
    steps = [s for s in first_steps(machine) if _same(standing, parse(s.arm))]
    if any(s.fault for s in steps):
        return "first step not sound"
    passed = any(w.suite not in STUDIES and (w.sqnr or w.checked_codes) for w in checked)
    return "" if passed or steps else "results not checked"


def _gemms(machine: Machine, standing: Standing) -> str:
    """Case by case: what one case ran too often makes up for no other."""
    own = [r for r in fp8_newest(machine) if (r["suite"], r["arm"]) == (standing.suite, standing.arm)]
    every = [resolved_of(r) for r in own]
    counted = [
        (a["fp8_gemms"], a.get("fp8_gemms_expected", a["fp8_gemms"])) for a in every if "fp8_gemms" in a
    ]
    short = [(seen, due) for seen, due in counted if seen < due or not seen]
    if short:
        seen, due = (sum(numbers) for numbers in zip(*short, strict=True))
        return f"only {seen} of {due} GEMMs in FP8 in {_of(len(short), len(own))}"
    uncounted = sum("fp8_gemms" not in a and "float8" not in str(a.get("a_dtype")) for a in every)
    if uncounted == len(every):
        return "FP8 not proved"
    return f"FP8 not proved in {_of(uncounted, len(own))}" if uncounted else ""


def _loss(machine: Machine, standing: Standing) -> str:
    computed = recipe(standing.fields)
    outcomes = Counter(v.verdict.outcome for v in machine.verdicts if v.fields == computed)
    if outcomes["FAIL"]:
        return "loss: FAIL"
    if not outcomes:
        return NO_LOSS
    return "" if outcomes.keys() == {"PASS"} else "loss: can't tell"


def _same(standing: Standing, arm: Arm) -> bool:
    """Whether a figure of an arm speaks for another one: arms without a recipe have nothing in common."""
    computed = recipe(standing.fields)
    return arm == standing.fields if computed == Arm() else recipe(arm) == computed


@once
def _timings(machine: Machine) -> dict[tuple[str, str, str, str, str], Mapping[str, Any]]:
    """How each time was taken, by (run, case, arm, regime, metric)."""
    names = ("run_id", "case_id", "arm", "regime", "metric")
    own = [r for r in machine.rows if r["metric"] in TIMES and r["status"] == "ok"]
    return {tuple(r[n] for n in names): parse_json(r["timing"]) for r in own}


def _sides(machine: Machine, standing: Standing) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """How the arm and its baseline were timed, a pair a case."""
    timings = _timings(machine)
    found = []
    for p in standing.pairs:
        arm, base = (
            timings.get((p["run_id"], p["case_id"], n, p["regime"], p["metric"]), {})
            for n in (p["arm"], p["baseline"])
        )
        found.append((arm, base))
    return found


def _throttled(sides: Sequence[Mapping[str, Any]]) -> list[bool]:
    return [bool(timing.get("throttled")) for timing in sides]


def _of(part: int, whole: int) -> str:
    return text.plural(whole, "case") if part == whole else f"{part} of {text.plural(whole, 'case')}"
