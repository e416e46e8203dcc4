"""Rows: the verdict on what the suite `divergence` stored, one for each arm of each set-up.

The seed is an axis of the case, so the cases that differ in it alone are one set-up. Which arm is held against
which follows from its record (`harness.store.arm`); by name:

    base_eps, RECIPE, RECIPE_golden, negative_control   base
    RECIPE_eps                                          RECIPE: the noise floor of FP8 itself
    base_to_RECIPE                                      base, bitwise equal to it until the switch
    RECIPE_to_base                                      base, bitwise equal to RECIPE until the switch
    base_other                                          the band that the seeds of base span; not paired
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge.verdict.curves import Curve, Run
from harness.judge.verdict.judge import Outcome, Verdict, conclude, judge_other_seeds, judge_pairs
from harness.judge.verdict.result import MARGIN, GateResult
from harness.judge.verdict.settle import Settled, settle
from harness.store.arm import ABLATIONS, COOLDOWN, EPS, GOLDEN, OTHER, WARMUP, Arm, arm_of
from harness.store.cause import Cause
from harness.store.json_columns import parse
from harness.store.proof import ProofOutcome, proof_outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

SUITE = "divergence"
CONTROL = "base"
NEGATIVE = "negative_control"
MUST_PASS = (f"{CONTROL}_eps", f"{CONTROL}_other")
_CURVES = {
    "loss": "loss",
    "heldout_loss": "heldout",
    "grad_norm": "grad_norm",
    "fp8_grad_norm": "fp8_grad_norm",
    "elapsed_s": "elapsed",
}

_UNASKED = "no row says that its FP8 layers ran in FP8: run it again, with fp8core.verify at its start"
_EMULATED = "emulated: the arithmetic of FP8 was judged, no FP8 GEMM ran"
_WARM_UP = re.compile(r"(^|,)warmup_bf16:[^@,]+(,|$)")  # of the whole model: "warmup_bf16:1000", a share, ...

Arms = dict[str, dict[int, Run]]


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """All runs of one set-up: its axes without the seed, its runs by arm and seed, and why runs are missing."""

    run_id: str
    axes: Mapping[str, Any]
    arms: Arms
    records: dict[str, Arm]
    failed: dict[str, dict[int, str]]  # arm -> seed -> reason
    resolved: dict[str, dict[str, Any]]  # arm -> what its runs say of themselves

    def runs_of(self, arm: Arm) -> dict[int, Run] | None:
        """Runs of an arm by seed; None where it was not run."""
        name = str(arm)
        return self.arms[name] if self.records.get(name) == arm else None


@dataclass(frozen=True, slots=True, eq=False)
class ArmVerdict:
    """The verdict on one arm of one set-up.

    Attributes:
        run_id, axes: the set-up, the seed left out.
        arm, against: what was judged and its control.
        fields: the arm as a record.
        expected: "FAIL" for the negative control, "PASS" for every other arm that a correct harness passes.
        missing: control arms that the set-up lacks, and what therefore was not shown.
    """

    run_id: str
    axes: Mapping[str, Any]
    arm: str
    fields: Arm
    against: str
    verdict: Verdict
    expected: str
    missing: tuple[str, ...] = ()

    @property
    def surprising(self) -> bool:
        """Whether the instrument itself is in doubt: a control did the opposite of what it must.

        The negative control must FAIL. Where it is INCONCLUSIVE, this set-up has not the power to see a gross fault, so
        a PASS beside it means little. The controls that should pass raise doubt only by a FAIL: INCONCLUSIVE shows
        no fault, just too little data, which the arms' own gates (power, partners, steps) judge for themselves; it is told
        as a note.
        """
        if self.arm == NEGATIVE:
            return self.verdict.outcome != "FAIL"
        return self.arm in MUST_PASS and self.verdict.outcome == "FAIL"


def judge(frame: pd.DataFrame, margin: float = MARGIN) -> list[ArmVerdict]:
    """Judges every arm of every set-up in some rows of the store.

    Args:
        frame: rows as read by `harness.store.read`; rows of other suites are passed over.
        margin: of equivalence, relative to the control's mean loss.

    Returns:
        Verdicts in the order of the rows; none for the control itself. An arm whose set-up has no control run, or
        that has no run at all, is INCONCLUSIVE.
    """
    return [verdict for setup in setups(frame) for verdict in _judge_setup(setup, margin)]


def setups(frame: pd.DataFrame) -> list[Setup]:
    """The training runs in some rows of the store, by set-up."""
    rows = frame[(frame["suite"] == SUITE) & (frame["metric"].isin(_CURVES) | (frame["status"] != "ok"))]
    found: dict[tuple[str, str], Setup] = {}
    curves: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    for row in rows.to_dict("records"):
        if row.get("part"):
            continue
        axes = dict(parse(row["axes"]))
        seed = int(axes.pop("seed", row["seed"]))
        key = (str(row["run_id"]), json.dumps(axes, sort_keys=True))
        setup = found.setdefault(key, Setup(key[0], axes, {}, {}, {}, {}))
        runs = setup.arms.setdefault(row["arm"], {})
        setup.records[row["arm"]] = arm_of({str(k): v for k, v in row.items()})
        if row["status"] != "ok":
            setup.failed.setdefault(row["arm"], {})[seed] = str(row["reason"])
            if row["cause"] == Cause.DIVERGED:  # at its very first step: there is no curve to store
                runs[seed] = Run(Curve.of([math.nan]))
            continue
        about = curves.setdefault((*key, row["arm"], seed), {"resolved": {}})
        about["resolved"] |= parse(row["resolved"])
        setup.resolved.setdefault(row["arm"], {}).update(about["resolved"])
        rounds = list(row["rounds"]) or list(range(len(row["samples"])))
        about[_CURVES[row["metric"]]] = Curve.of(row["samples"], rounds)
        if "loss" in about:
            runs[seed] = _run(about)
    return list(found.values())


def lines(verdicts: list[ArmVerdict]) -> list[str]:
    """Verdicts as text for a terminal: a line an arm, its decisive gates below; what several arms share comes once."""
    out = []
    groups: dict[tuple[str, str], list[ArmVerdict]] = {}
    for v in verdicts:
        groups.setdefault((v.run_id, json.dumps(v.axes, sort_keys=True)), []).append(v)
    for (_, _), members in groups.items():
        axes = members[0].axes
        out.append("verdict  " + " ".join(f"{k}={v}" for k, v in axes.items() if v not in (None, "")))
        arms: dict[str, list[str]] = {}
        for v in members:
            settled = [] if v.verdict.settled is None else [v.verdict.settled.sentence]
            for reason in (*v.verdict.reasons, *v.verdict.notes, *settled):
                arms.setdefault(reason, []).append(v.arm)
        for v in members:
            as_it_should = " (as it should)" if v.expected == "FAIL" == v.verdict.outcome else ""
            out.append(f"  {v.verdict.outcome:<12} {v.arm} against {v.against}{as_it_should}")
            out += [f"               {reason}" for reason, whose in arms.items() if whose == [v.arm]]
        out += [f"  {', '.join(whose)}: {reason}" for reason, whose in arms.items() if len(whose) > 1]
        out += [f"  missing: {m}" for m in members[0].missing]
        out.append(f"  {members[0].verdict.limits}")
    return out


def _run(about: Mapping[str, Any]) -> Run:
    resolved = about["resolved"]
    switches = resolved.get("switch_steps") or [None]
    return Run(
        **{name: about[name] for name in _CURVES.values() if name in about},
        planned_steps=int(resolved.get("steps") or 0),
        switch_step=None if switches[0] is None else int(switches[0]),
        switch_back_step=int(switches[1]) if len(switches) > 1 else None,
        nonfinite_step=resolved.get("nonfinite_step"),
        stopped=str(resolved.get("stopped") or ""),
        tokens_per_step=float(resolved.get("tokens_per_step") or 0),
        batches=resolved.get("batches") or {},
        proof=str(resolved.get("verify") or ""),
        proof_outcome=proof_outcome(resolved),
        emulated=bool(resolved.get("emulated")),
    )


def _judge_setup(setup: Setup, margin: float) -> list[ArmVerdict]:
    missing = _missing(setup)
    verdicts = []
    for arm in setup.arms:
        if arm == CONTROL:
            continue
        fields = setup.records[arm]
        against = control_of(fields, setup)
        verdict = _judge_arm(setup, arm, against, margin)
        expected = "FAIL" if arm == NEGATIVE else "PASS"
        verdicts.append(
            ArmVerdict(setup.run_id, setup.axes, arm, fields, against, verdict, expected, missing)
        )
    return _doubted(verdicts)


def _judge_arm(setup: Setup, arm: str, against: str, margin: float) -> Verdict:
    mine, control = setup.arms[arm], setup.arms.get(against, {})
    failed = [f"seed {seed}: {reason}" for seed, reason in sorted(setup.failed.get(arm, {}).items())]
    if not mine or not control:
        lacking = arm if not mine else against
        result = GateResult("L1", "INCONCLUSIVE", f"no finished run of {lacking}")
        return conclude([result], failed, "nothing was trained to the end")
    fields = setup.records[arm]
    is_perturbed, is_part = fields.variant == EPS, fields.variant in ABLATIONS
    golden = setup.runs_of(Arm(fields.recipe, variant=GOLDEN))
    if other := _other_layers(setup, arm, fields):
        golden = None
        if not is_perturbed and not is_part and fields.variant != GOLDEN:
            failed.append(f"{fields.recipe}_golden was not compared: it rounds other layers ({other})")
    if arm == f"{CONTROL}_other":
        verdict = judge_other_seeds(mine, control)
    else:
        schedule = str(setup.resolved.get(arm, {}).get("schedule") or "")
        cool_down = fields.variant == COOLDOWN
        warm_up = bool(_WARM_UP.search(schedule)) or fields.variant == WARMUP
        if schedule and (is_perturbed or not (warm_up or cool_down)):
            # The run that its first phase should equal is of another set-up, or starts from other weights.
            warm_up = False
            failed.append(f"schedule {schedule}: its first phase was not compared bit for bit")
            mine = {seed: replace(run, switch_step=None) for seed, run in mine.items()}
        verdict = judge_pairs(
            mine,
            control,
            golden=None if is_perturbed or is_part else golden,
            twin=control if warm_up else setup.runs_of(Arm(fields.recipe)) if cool_down else None,
            twin_name=against if warm_up else fields.recipe,
            margin=margin,
        )
        if against == CONTROL and fields.has_fp8:
            verdict = replace(verdict, settled=_settled(setup, fields, mine, control, warm_up, margin))
    if equal := _identical(mine, control):
        # An arm that should differ and does not was not run as it is named, in these seeds.
        named = "" if len(equal) == len(mine) else f"seed {', '.join(map(str, equal))}: "
        claims_fp8 = fields.has_fp8 and not is_perturbed
        why = "FP8 cannot have run" if claims_fp8 else "it was not run as it is named"
        failed.append(f"{named}every loss is bitwise equal to {against}: {why}")
        verdict = replace(verdict, not_fp8=failed[-1] if claims_fp8 else "")
        if verdict.outcome == "PASS":
            verdict = replace(verdict, outcome="INCONCLUSIVE")
    if fields.has_fp8 and not fields.variant and (copied := _identical(mine, golden or {})):
        named = f"seed {', '.join(map(str, copied))}: every loss is bitwise equal to {fields.recipe}_golden"
        if _differ_by_proof(setup, arm, fields, [mine[seed] for seed in copied]):
            failed.append(f"{named}, though its FP8 GEMMs were proved: here both form the same sums")
        else:
            failed.append(f"{named}: FP8 was emulated, or the golden arm was not")
            if verdict.outcome == "PASS":
                verdict = replace(verdict, outcome="INCONCLUSIVE")
    doubted = [f"seed {seed}: {run.proof}" for seed, run in sorted(mine.items()) if run.doubted]
    if fields.has_fp8 and fields.variant not in (
        GOLDEN,
        *ABLATIONS,
    ):  # which claim no FP8 GEMM by their names
        emulated = [seed for seed, run in mine.items() if run.emulated]
        if len(emulated) == len(mine):
            failed.append(_EMULATED)
        unasked = [
            str(seed)
            for seed, run in sorted(mine.items())
            if run.proof_outcome is ProofOutcome.NONE and len(emulated) < len(mine)
        ]
        if unasked:
            named = "" if len(unasked) == len(mine) else f"seed {', '.join(unasked)}: "
            doubted.append(f"{named}{_UNASKED}")
    failed += doubted
    if doubted and verdict.outcome == "PASS":
        verdict = replace(verdict, outcome="INCONCLUSIVE")
    return replace(verdict, notes=(*failed, *verdict.notes))


def _other_layers(setup: Setup, arm: str, fields: Arm) -> str:
    """Layers that either the arm or its golden arm has in FP8 and the other has not; "" where they have the same.

    Rows from before they were stored say nothing of it, and are compared.
    """
    mine, golden = (
        setup.resolved.get(name, {}).get("fp8_layers")
        for name in (arm, str(Arm(fields.recipe, variant=GOLDEN)))
    )
    if not isinstance(mine, list) or not isinstance(golden, list):
        return ""
    return ", ".join(sorted(map(str, set(mine) ^ set(golden))))


def _settled(
    setup: Setup,
    fields: Arm,
    mine: Mapping[int, Run],
    control: Mapping[int, Run],
    warm_up: bool,
    margin: float,
) -> Settled:
    """When an FP8 arm settles, by the noise of its recipe; a warm-up counts from its switch."""
    switches = [run.switch_step for run in mine.values() if run.switch_step is not None]
    return settle(
        mine,
        control,
        perturbed=setup.runs_of(Arm(fields.recipe, variant=EPS)),
        unperturbed=setup.runs_of(Arm(fields.recipe)),
        start=max(switches, default=0) if warm_up else 0,
        margin=margin,
    )


def control_of(arm: Arm, setup: Setup) -> str:
    """Name of the arm that an arm of a set-up is held against."""
    own = replace(arm, variant="")
    return str(own) if arm.variant == EPS and setup.runs_of(own) is not None else CONTROL


def _differ_by_proof(setup: Setup, arm: str, fields: Arm, runs: Sequence[Run]) -> bool:
    """Whether an arm is known to have run kernels and its golden arm to have emulated them."""
    both = (arm, str(Arm(fields.recipe, variant=GOLDEN)))
    emulated = [setup.resolved.get(name, {}).get("emulated") for name in both]
    return emulated == [False, True] and all(run.proof_outcome is ProofOutcome.PROVED for run in runs)


def _identical(candidate: Mapping[int, Run], control: Mapping[int, Run]) -> list[int]:
    """Seeds in which both have the same losses, bit for bit."""
    shared = sorted(candidate.keys() & control.keys())
    return [s for s in shared if np.array_equal(candidate[s].loss.values, control[s].loss.values)]


def _doubted(verdicts: list[ArmVerdict]) -> list[ArmVerdict]:
    """Where a control did the opposite of what it must, no other arm passes; where it can't tell, each is told so."""
    doubts = tuple(
        f"{v.arm} is {v.verdict.outcome}, not {v.expected}: this set-up cannot tell"
        for v in verdicts
        if v.surprising
    )
    unknown = tuple(
        f"{v.arm} is INCONCLUSIVE: that this set-up passes what it must was not shown"
        for v in verdicts
        if v.arm in MUST_PASS and v.verdict.outcome == "INCONCLUSIVE"
    )
    return [
        v if v.surprising or v.verdict.outcome != "PASS" else _with_doubt(v, doubts, unknown)
        for v in verdicts
    ]


def _with_doubt(passed: ArmVerdict, doubts: tuple[str, ...], unknown: tuple[str, ...]) -> ArmVerdict:
    own = passed.verdict
    outcome: Outcome = "INCONCLUSIVE" if doubts else own.outcome
    return replace(passed, verdict=replace(own, outcome=outcome, notes=(*doubts, *unknown, *own.notes)))


def _missing(setup: Setup) -> tuple[str, ...]:
    """Control arms that were not run, with what is therefore not shown."""
    controls = (EPS, OTHER, GOLDEN, WARMUP, COOLDOWN, NEGATIVE, *ABLATIONS)
    recipes = [
        a.recipe or name
        for name, a in setup.records.items()
        if a.recipe != CONTROL and a.variant not in controls
    ]
    wanted = {
        Arm(CONTROL, variant=EPS): "the numeric noise floor of the control is not known",
        Arm(CONTROL, variant=OTHER): "the spread between seeds was not tested",
        Arm(variant=NEGATIVE): "that a broken arm would fail here was not shown",
    }
    for recipe in recipes:
        wanted[Arm(recipe, variant=GOLDEN)] = (
            f"fixed limits replace the early band of {recipe}, and an error of its gradients' scale below 2 % is not seen"
        )
        wanted[Arm(recipe, variant=EPS)] = f"the noise floor of {recipe} is not known"
    return tuple(f"{arm} ({why})" for arm, why in wanted.items() if not setup.runs_of(arm))
