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
from typing import TYPE_CHECKING

from harness.gate.decide import Verdict
from harness.gate.matching import LOSS
from harness.gate.policy import Rule
from harness.gate.unit import Finding, Key, State, Unit
from harness.judge import verdict
from harness.judge.verdict.rows import SUITE, Setup, setups
from harness.store.text import case_label

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd

    from harness.gate.policy import Policy, RuleName
    from harness.judge.verdict import ArmVerdict

SAID = 300  # characters of a gate's sentence that a table holds
RANK = ("FAIL", "INCONCLUSIVE", "PASS")
Arm = tuple[str, str]  # axes of a set-up, name of the arm


def outcomes(before: pd.DataFrame, after: pd.DataFrame, policy: Policy) -> list[Finding]:
    """Findings about every arm that was trained on either side; none where none was, or the policy ignores it."""
    mine, theirs = (frame[frame["suite"] == SUITE] for frame in (before, after))
    if mine.empty and theirs.empty:
        return []
    old, new = (_by_arm(verdict.judge(frame)) for frame in (mine, theirs))
    found = list(_lost(setups(mine), setups(theirs)))
    found += [_said(verdicts, old[arm]) for arm, verdicts in list(new.items())]
    return [f for f in found if policy.rule_for(f.unit.fields).rule != "ignore"]


def _by_arm(verdicts: Sequence[ArmVerdict]) -> defaultdict[Arm, list[ArmVerdict]]:
    """By set-up and arm; several runs of one set-up are several verdicts."""
    table: defaultdict[Arm, list[ArmVerdict]] = defaultdict(list)
    for said in verdicts:
        table[_arm(said.axes, said.arm)].append(said)
    return table


def _said(verdicts: Sequence[ArmVerdict], before: Sequence[ArmVerdict]) -> Finding:
    """The worst of an arm's verdicts as one finding."""
    worst = min(verdicts, key=lambda v: RANK.index(v.verdict.outcome))
    was = min((v.verdict.outcome for v in before), key=RANK.index, default="not trained")
    outcome, ought = worst.verdict.outcome, ""
    words = {
        "FAIL": Verdict.REGRESSED,
        "INCONCLUSIVE": Verdict.INCONCLUSIVE,
        "PASS": Verdict.IMPROVED if was == "FAIL" else Verdict.OK,
    }
    if worst.expected == "FAIL":
        words = {"FAIL": Verdict.OK}
        ought = "as it has to" if outcome == "FAIL" else "it has to FAIL, so this set-up cannot tell"
    parts = [f"{outcome} against {worst.against}", ought, "" if was == outcome else f"baseline: {was}"]
    if outcome != "PASS":
        parts += [text[:SAID] for text in (*worst.verdict.reasons, *worst.verdict.notes)[:1]]
    word = words.get(outcome, Verdict.INCONCLUSIVE)
    return Finding(_unit(worst.axes, worst.arm, "numerics"), word, "; ".join(filter(None, parts)))


def _lost(before: Sequence[Setup], after: Sequence[Setup]) -> Iterator[Finding]:
    """Runs that are the baseline's alone, a finding an arm."""
    there: defaultdict[Arm, set[int]] = defaultdict(set)
    failed: defaultdict[Arm, dict[int, str]] = defaultdict(dict)
    for setup in after:
        for arm, runs in setup.arms.items():
            there[_arm(setup.axes, arm)] |= set(runs)
        for arm, reasons in setup.failed.items():
            failed[_arm(setup.axes, arm)] |= reasons
    for setup in before:
        for arm, runs in setup.arms.items():
            key = _arm(setup.axes, arm)
            if gone := sorted(set(runs) - there[key]):
                why = next((failed[key][s] for s in gone if s in failed[key]), "not in the candidate")
                unit = _unit(setup.axes, arm, "exact")
                unit.set_aside(State.LOST, f"{len(gone)} of {len(runs)} runs: {why[:SAID]}")
                yield Finding(unit, Verdict.REGRESSED, f"{unit.why}: what cannot be compared is no pass")


def _unit(axes: Mapping[str, object], arm: str, rule: RuleName) -> Unit:
    return Unit(Key(SUITE, "", arm, LOSS, "", ""), case_label(dict(axes)), "", "lower", Rule(rule))


def _arm(axes: Mapping[str, object], arm: str) -> Arm:
    return json.dumps(axes, sort_keys=True), arm
