"""Loss: what the verdict on training (`harness.judge.verdict`) says of the candidate's stored runs, as findings of the gate.

The verdict holds each arm against the control of its own set-up, so no machine, clock or commit enters it, and the
baseline only tells what was there before:

| the candidate's arm | finding |
|---|---|
| FAIL | REGRESSED, exit 4, also where the baseline failed: an arm that never trained does not pass |
| INCONCLUSIVE | INCONCLUSIVE |
| PASS | OK; IMPROVED where the baseline's FAILed |
| runs that the baseline has are absent, or crashed | REGRESSED, exit 1 |

The negative control is broken on purpose. It has to FAIL; where it does not, this set-up could not have seen a fault in
any arm, and that is INCONCLUSIVE.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.gate.decide import Verdict
from harness.gate.judged_metric import LOSS, Unit
from harness.gate.policy import Rule
from harness.judge import verdict
from harness.judge.verdict.rows import SUITE, Setup, setups
from harness.store.text import case_label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from harness.gate.policy import Policy
    from harness.judge.verdict import ArmVerdict

SAID = 300  # characters of a gate's sentence that a table holds


@dataclass(frozen=True, slots=True)
class Outcome:
    """One arm of one set-up; `verdict` is the gate's word for it."""

    unit: Unit
    verdict: Verdict
    reason: str


def outcomes(before: pd.DataFrame, after: pd.DataFrame, policy: Policy) -> list[Outcome]:
    """Verdict on every arm that was trained on either side; empty where none was, or the policy ignores it."""
    mine, theirs = (frame[frame["suite"] == SUITE] for frame in (before, after))
    if mine.empty and theirs.empty:
        return []
    old, new = _by_arm(verdict.judge(mine)), _by_arm(verdict.judge(theirs))
    found = _lost(setups(mine), setups(theirs))
    found += [_said(verdicts, old.get(key, [])) for key, verdicts in new.items()]
    return [o for o in found if policy.rule_for(o.unit.fields).rule != "ignore"]


def _by_arm(verdicts: Sequence[ArmVerdict]) -> dict[tuple[str, str], list[ArmVerdict]]:
    """By set-up and arm; several runs of one set-up are several verdicts."""
    table: dict[tuple[str, str], list[ArmVerdict]] = defaultdict(list)
    for said in verdicts:
        table[_key(said.axes), said.arm].append(said)
    return table


def _said(verdicts: Sequence[ArmVerdict], before: Sequence[ArmVerdict]) -> Outcome:
    """The worst of an arm's verdicts as one outcome."""
    rank = ("FAIL", "INCONCLUSIVE", "PASS")
    worst = min(verdicts, key=lambda v: rank.index(v.verdict.outcome))
    was = min((v.verdict.outcome for v in before), key=rank.index, default="not trained")
    outcome = worst.verdict.outcome
    if worst.expected == "FAIL":
        word = Verdict.OK if outcome == "FAIL" else Verdict.INCONCLUSIVE
        ought = "as it has to" if outcome == "FAIL" else "it has to FAIL, so this set-up cannot tell"
    else:
        word = {"FAIL": Verdict.REGRESSED, "INCONCLUSIVE": Verdict.INCONCLUSIVE}.get(outcome, Verdict.OK)
        if outcome == "PASS" and was == "FAIL":
            word = Verdict.IMPROVED
        ought = ""
    parts = [f"{outcome} against {worst.against}", ought, "" if was == outcome else f"baseline: {was}"]
    why = (*worst.verdict.reasons, *worst.verdict.notes)[:1] if outcome != "PASS" else ()
    reason = "; ".join(filter(None, [*parts, *(text[:SAID] for text in why)]))
    return Outcome(_unit(worst.axes, worst.arm, Rule("numerics")), word, reason)


def _lost(before: Sequence[Setup], after: Sequence[Setup]) -> list[Outcome]:
    """Runs that are the baseline's alone, an outcome an arm."""
    there: dict[tuple[str, str], set[int]] = defaultdict(set)
    failed: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for setup in after:
        for arm, runs in setup.arms.items():
            there[_key(setup.axes), arm] |= set(runs)
        for arm, reasons in setup.failed.items():
            failed[_key(setup.axes), arm] |= reasons
    out = []
    for setup in before:
        for arm, runs in setup.arms.items():
            key = (_key(setup.axes), arm)
            if gone := sorted(set(runs) - there[key]):
                why = next((failed[key][s] for s in gone if s in failed[key]), "not in the candidate")
                unit = _unit(setup.axes, arm, Rule("exact"))
                unit.trouble = f"{len(gone)} of {len(runs)} runs: {why[:SAID]}"
                reason = f"{unit.trouble}: what cannot be compared is no pass"
                out.append(Outcome(unit, Verdict.REGRESSED, reason))
    return out


def _unit(axes: Mapping[str, object], arm: str, rule: Rule) -> Unit:
    label = case_label(dict(axes))
    return Unit(SUITE, "", label, arm, LOSS, "", "", unit="", better="lower", rule=rule)


def _key(axes: Mapping[str, object]) -> str:
    return json.dumps(axes, sort_keys=True)
