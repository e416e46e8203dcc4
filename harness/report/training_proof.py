"""First steps: what training runs and timed steps proved of an FP8 arm before its time or its loss counted."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.report.table import known, resolved_of
from harness.store import text
from harness.store.arm import controls
from harness.store.compare import rows_of
from harness.store.proof import ProofOutcome, proof_outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from harness.report.runs import Machine

SUITE = "train"


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of one FP8 arm, from the control's weights and on its batch.

    Attributes:
        arm: which.
        loss_gap: |loss - the control's| in nats; NaN where the rows don't say.
        norm_ratio: norm of the gradients over the control's; NaN likewise.
        proof: the line of fp8core.verify; "" of a peer's layers, whose FP8 GEMMs are counted.
        outcome: what it found.
        warnings: what fp8core.verify warned of.
    """

    arm: str
    loss_gap: float
    norm_ratio: float
    proof: str
    outcome: ProofOutcome
    warnings: tuple[str, ...]

    @property
    def fault(self) -> str:
        """Why this is no sound step; "" if it is. The suite's own bounds make failed rows, which never come here."""
        if math.isnan(self.loss_gap):
            return "its first loss, or the control's, is no number"
        return "" if self.outcome in (ProofOutcome.NONE, ProofOutcome.PROVED) else self.proof


def first_steps(machine: Machine) -> list[FirstStep]:
    """One for each (run, case, FP8 arm) whose check passed."""
    frame = machine.frame
    rows = frame[(frame["suite"] == SUITE) & (frame["status"] == "ok") & ~controls(frame)]
    found: dict[tuple[str, str, str], FirstStep] = {}
    for row in rows_of(rows):
        resolved = resolved_of(row)
        if "first_loss" not in resolved or not resolved.get("fp8_layers"):
            continue
        mine, control = resolved["first_loss"], resolved.get("first_loss_control")
        ratio = resolved.get("first_grad_norm_ratio")
        found[row["run_id"], row["case_id"], row["arm"]] = FirstStep(
            row["arm"],
            abs(mine - control) if known(mine) and known(control) else math.nan,
            float(ratio) if known(ratio) else math.nan,
            str(resolved.get("verify", "")),
            proof_outcome(resolved),
            tuple(map(str, resolved.get("verify_warnings") or ())),
        )
    return list(found.values())


def runs_in_fp8(machine: Machine) -> tuple[Counter[str], list[str], list[str]]:
    """What `fp8core.verify` counted in the training runs of FP8 arms, what it disproved, and what it could not prove.

    Returns:
        Totals of `arms`, FP8 GEMMs `counted` and `expected`, and the arms left `unproven`; emulated arms are in none.
        A line for each run whose FP8 layers do not run as asked, and for each that was not proved to.
    """
    count: Counter[str] = Counter()
    short: list[str] = []
    unproven: list[str] = []
    for setup in machine.trainings:
        for arm, about in setup.resolved.items():
            runs = setup.arms.get(arm)
            if not runs or not about.get("fp8_layers") or about.get("emulated"):
                continue
            for seed, run in runs.items():
                if run.doubted:
                    told = short if run.disproved else unproven
                    told.append(f"divergence {arm}, seed {seed}: {run.proof}")
            counted = about.get("fp8_gemms")
            if counted is None:
                count["unproven"] += 1
            else:
                count.update(arms=1, counted=counted, expected=about.get("fp8_gemms_expected", counted))
    return count, short, unproven


def named(arms: Iterable[str], most: int = 6) -> str:
    """Arms by name; how many where they are too many for a sentence and the evidence below has the names."""
    distinct = list(dict.fromkeys(arms))
    return ", ".join(distinct) if len(distinct) <= most else f"{len(distinct)} arms, named below,"


def summary_of(steps: Sequence[FirstStep]) -> str:
    """One sentence about steps that are sound."""
    far = max(steps, key=lambda s: s.loss_gap)
    return (
        f"The first training step of {named(s.arm for s in steps)} agrees with the control's: losses within "
        f"{text.number(far.loss_gap, 2)} nats."
    )


def evidence_of(steps: Sequence[FirstStep]) -> list[str]:
    """What the sentence rests on: the worst gaps, how the precision was proved, and every warning once."""
    far = max(steps, key=lambda s: s.loss_gap)
    sentences = [f"{SUITE}: largest gap of a first loss {text.number(far.loss_gap, 2)} nats, of {far.arm}"]
    ratios = [s for s in steps if not math.isnan(s.norm_ratio)]
    if ratios:
        worst = max(ratios, key=lambda s: abs(math.log(s.norm_ratio)) if s.norm_ratio > 0 else math.inf)
        sentences[0] += (
            f"; norm of the first gradients at worst {text.number(worst.norm_ratio, 4)} of the control's"
        )
        sentences[0] += f", of {worst.arm}"
    proved = [s for s in steps if s.proof]
    if proved:
        sentences.append(
            f"{SUITE}: fp8core.verify proves {', '.join(dict.fromkeys(s.arm for s in proved))}, each layer by its output"
        )
    warned: dict[str, list[str]] = {}
    for step in steps:
        for warning in step.warnings:
            warned.setdefault(warning, []).append(step.arm)
    return sentences + [f"warning: {w} ({', '.join(dict.fromkeys(arms))})" for w, arms in warned.items()]
