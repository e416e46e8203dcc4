"""Rows: the verdict on what the suite `divergence` stored, one for each arm of each set-up.

The seed is an axis of the case, so the cases that differ in it alone are one set-up. Which arm is held against
which follows from its record (`harness.store.case`); by name:

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
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from harness.judge.verdict.curves import Curve, Run, at_the_same_steps
from harness.judge.verdict.integrity import LONG, STRETCH, stretch
from harness.judge.verdict.paired import Verdict, conclude, judge_other_seeds, judge_pairs
from harness.judge.verdict.result import GateResult
from harness.store import text
from harness.store.case import ABLATIONS, COOLDOWN, EPS, GOLDEN, NEGATIVE, OTHER, WARMUP, Arm, arm_of
from harness.store.differences import ENV_ID_FIELDS
from harness.store.errors import Cause
from harness.store.measurement import FIELD, LAYERS, ProofOutcome, proof_outcome
from harness.store.outside import parse
from harness.store.printer import picked
from harness.store.rows import grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pandas as pd

    from harness.judge.verdict.curves import Runs
    from harness.store.printer import Table, Tone

SUITE = "divergence"
CONTROL = "base"
_CURVES = {
    "loss": "loss",
    "heldout_loss": "heldout",
    "grad_norm": "grad_norm",
    "fp8_grad_norm": "fp8_grad_norm",
    "elapsed_s": "elapsed",
}
# What a run says of its own arm, of how it went or of what it read (compared apart); all else its control must share
_OWN = frozenset({
    "batches", "cpu_s", "device_s", "emulated", "fp8_gemms", "fp8_gemms_expected", "fp8_kernel_share", "fp8_layers",
    "memory", "nondeterministic", "nonfinite_step", "peer", "perturbed", "process_changed", "process_state", "recipe",
    "resumed_from_steps", "runs_on_this_gpu", "scaling", "schedule", "skipped_layers", "steps", "stopped", "switch_steps", "switches", "timed",
    "tokens_per_step", "verify", FIELD, LAYERS, "verify_warnings",
})  # fmt: skip
_WARM_UP = re.compile(r"(^|,)warmup_bf16:[^@,]+(,|$)")  # of the whole model: "warmup_bf16:1000", a share, ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredSetup:
    """All runs of one set-up on one machine: its axes without the seed, its runs by arm and seed, and why runs are missing."""

    run_id: str
    axes: Mapping[str, Any]
    arms: dict[str, dict[int, Run]]
    records: dict[str, Arm]
    failed: dict[str, dict[int, str]]  # arm -> seed -> reason
    resolved: dict[str, dict[str, Any]]  # arm -> what its runs say of themselves
    env_id: str

    def runs_of(self, arm: Arm | str) -> dict[int, Run] | None:
        """Runs of an arm by seed; None where it was not run."""
        name = str(arm)
        return self.arms[name] if self.records.get(name) == arm else None

    def fact(self, arm: Arm | str, field: str) -> Any:
        """What the runs of an arm say of themselves; None where they do not."""
        return self.resolved.get(str(arm), {}).get(field)


@dataclass(frozen=True, slots=True, eq=False)
class ArmVerdict:
    """The verdict on one arm of one set-up.

    Attributes:
        run_id, axes, env_id: the set-up, the seed left out, and its machine.
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
    env_id: str = ""

    @property
    def surprising(self) -> bool:
        """Whether the instrument itself is in doubt: a control did the opposite of what it must.

        The negative control must FAIL. Where it is INCONCLUSIVE, this set-up has not the power to see a gross fault, so
        a PASS beside it means little. The controls that should pass raise doubt only by a FAIL: INCONCLUSIVE shows
        no fault, just too little data, which the arms' own gates (power, partners, steps) judge for themselves; it
        becomes a note.
        """
        failed = self.verdict.outcome == "FAIL"
        must_fail = self.fields.variant == NEGATIVE
        return not failed if must_fail else failed and self.fields.recipe == CONTROL


def judge(frame: pd.DataFrame) -> list[ArmVerdict]:
    """Judges every arm of every set-up in some rows of the store, each machine's by themselves.

    Args:
        frame: rows as read by `harness.store.read`; rows of other suites are skipped.

    Returns:
        Verdicts in the order of the rows; none for the control itself. An arm whose set-up has no control run, or
        that has no run at all, is INCONCLUSIVE.
    """
    return [verdict for setup in setups(frame) for verdict in _judge_setup(setup)]


def setups(frame: pd.DataFrame) -> list[StoredSetup]:
    """The training runs in some rows of the store, by set-up."""
    rows = frame[(frame["suite"] == SUITE) & (frame["metric"].isin(_CURVES) | (frame["status"] != "ok"))]
    found: dict[tuple[str, str, str], StoredSetup] = {}
    stored: dict[tuple[str, str, str, str, int], tuple[dict[str, Curve], dict[str, Any]]] = {}
    for row in rows.to_dict("records"):
        if row.get("part"):
            continue
        axes, arm = dict(parse(row["axes"])), row["arm"]
        seed = int(axes.pop("seed", row["seed"]))
        key = (str(row["run_id"]), json.dumps(axes, sort_keys=True), str(row["env_id"]))
        setup = found.setdefault(key, StoredSetup(key[0], axes, {}, {}, {}, {}, key[2]))
        runs = setup.arms.setdefault(arm, {})
        setup.records[arm] = arm_of({str(k): v for k, v in row.items()})
        if row["status"] != "ok":
            setup.failed.setdefault(arm, {})[seed] = str(row["reason"])
            if row["cause"] == Cause.DIVERGED:  # at its very first step: there is no curve to store
                runs[seed] = Run(Curve.of([math.nan]))
            continue
        curves, resolved = stored.setdefault((*key, arm, seed), ({}, {}))
        env = parse(row["env"])
        resolved |= {name: env[name] for name in ENV_ID_FIELDS if name in env}
        resolved |= parse(row["resolved"])
        setup.resolved.setdefault(arm, {}).update(resolved)
        steps = list(row["rounds"]) or None
        curves[_CURVES[row["metric"]]] = Curve.of(row["samples"], steps)
        if "loss" in curves:
            runs[seed] = _run(curves, resolved)
    return list(found.values())


def _run(curves: Mapping[str, Any], resolved: Mapping[str, Any]) -> Run:
    switch, back = (*(resolved.get("switch_steps") or ()), None, None)[:2]
    return Run(
        **curves,
        planned_steps=int(resolved.get("steps") or 0),
        switch_step=None if switch is None else int(switch),
        switch_back_step=None if back is None else int(back),
        nonfinite_step=resolved.get("nonfinite_step"),
        stopped=str(resolved.get("stopped") or ""),
        tokens_per_step=float(resolved.get("tokens_per_step") or 0),
        batches=resolved.get("batches") or {},
        proof=str(resolved.get("verify") or ""),
        proof_outcome=proof_outcome(resolved),
        emulated=bool(resolved.get("emulated")),
        settings={name: value for name, value in resolved.items() if name not in _OWN},
    )


def is_candidate(arm: Arm) -> bool:
    """Whether an arm is one that a user would train, and no control or emulation."""
    return arm.recipe != CONTROL and arm.variant not in (EPS, GOLDEN, NEGATIVE, *ABLATIONS)


def has_margin(arm: Arm) -> bool:
    """Whether an arm is judged by its paired gaps inside a margin: no control, no known fault, and not of other seeds."""
    return arm != Arm(CONTROL) and arm.variant not in (NEGATIVE, OTHER)


def by_setup(verdicts: list[ArmVerdict]) -> list[list[ArmVerdict]]:
    """The verdicts of each set-up."""
    keyed = (((v.run_id, json.dumps(v.axes, sort_keys=True), v.env_id), v) for v in verdicts)
    return list(grouped(keyed).values())


def unshown(verdicts: list[ArmVerdict]) -> str:
    """Which set-ups have no arm with a known fault, so that nobody has seen one fail there: "", "in 1 of 2 set-ups", "here"."""
    every = by_setup(verdicts)
    bare = sum(all(v.fields.variant != NEGATIVE for v in own) for own in every)
    return "" if not bare else "here" if bare == len(every) else f"in {bare} of {len(every)} set-ups"


def trains_the_same(verdicts: list[ArmVerdict]) -> Literal["yes", "partly", "no", "can't tell"]:
    """The answer over all candidates; no yes where nobody has seen a fault fail."""
    count = Counter(v.verdict.outcome for v in verdicts if is_candidate(v.fields))
    if not count or (not count["FAIL"] and count["INCONCLUSIVE"] > count["PASS"]):
        return "can't tell"
    if count["FAIL"] and not count["PASS"]:
        return "no"
    return "yes" if set(count) == {"PASS"} and not unshown(verdicts) else "partly"


@dataclass(frozen=True, slots=True)
class StoredVerdicts:
    """The verdicts on the training runs of some rows, as a result of the printer."""

    verdicts: list[ArmVerdict]

    @property
    def tone(self) -> Tone:
        """Good where all train the same, bad where none does."""
        tones: Mapping[str, Tone] = {"yes": "good", "no": "bad"}
        return tones.get(trains_the_same(self.verdicts), "")

    def lines(self) -> list[str]:
        """The answer, then an arm a line with its decisive gates; what several arms share comes once."""
        notes = {note for v in self.verdicts for note in (*v.verdict.reasons, *v.verdict.notes, *v.missing)}
        beside = f"; {text.plural(len(notes), 'remark')} below" if notes else ""
        found = [f"trains the same: {trains_the_same(self.verdicts)}{beside}"] if self.verdicts else []
        machines = {v.env_id for v in self.verdicts}
        for own in by_setup(self.verdicts):
            reasons = grouped((why, v.arm) for v in own for why in (*v.verdict.reasons, *v.verdict.notes))
            axes = [f"{name}={value}" for name, value in own[0].axes.items() if value not in (None, "")]
            axes += [f"on {own[0].env_id}"] * (len(machines) > 1)
            found.append(f"verdict  {' '.join(axes)}")
            for v in own:
                due = " (as it should)" if v.verdict.outcome == v.expected == "FAIL" else ""
                found.append(f"  {v.verdict.outcome:<12} {v.arm} against {v.against}{due}")
                found += [f"               {why}" for why, arms in reasons.items() if arms == [v.arm]]
            found += [f"  {', '.join(arms)}: {why}" for why, arms in reasons.items() if len(arms) > 1]
            found += [f"  missing: {each}" for each in own[0].missing]
            found.append(f"  {own[0].verdict.limits}")
        return found

    def tables(self) -> list[Table]:
        """None: a report draws them."""
        return []

    def data(self) -> dict[str, Any]:
        """Plain values."""
        each = [
            picked(v, "run_id env_id axes arm against expected missing")
            | picked(v.verdict, "outcome reasons notes limits not_fp8")
            for v in self.verdicts
        ]
        return {"answer": trains_the_same(self.verdicts), "verdicts": each}


class ReaderNote(NamedTuple):
    """What a reader must know, whether nothing passes beside it, and whether FP8 cannot have run."""

    text: str
    withholds: bool = True
    not_fp8: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    """One arm of a set-up and what it is compared with."""

    setup: StoredSetup
    arm: str
    fields: Arm
    against: str
    runs: Runs
    control: Runs

    @property
    def golden(self) -> Arm:
        """The emulation of its recipe."""
        return Arm(self.fields.recipe, variant=GOLDEN)

    @property
    def other_layers(self) -> str:
        """Layers that either the arm or its golden arm has in FP8 and the other has not; "" where they have the same.

        Rows from before they were stored say nothing of it, and are compared.
        """
        mine, golden = (self.setup.fact(arm, "fp8_layers") for arm in (self.arm, self.golden))
        both = isinstance(mine, list) and isinstance(golden, list)
        return ", ".join(sorted(map(str, set(mine) ^ set(golden)))) if both else ""

    def equal(self, runs: Runs | None, curve: str = "loss", share: float = 1.0) -> list[int]:
        """Seeds in which a curve is that of other runs, bit for bit, in a stretch of at least such a share of its values after
        the switch to FP8."""
        found = []
        for seed in sorted(self.runs.keys() & (runs or {}).keys()):
            both = at_the_same_steps([getattr(of[seed], curve) for of in (self.runs, runs or {})])
            if both:
                steps, (mine, theirs) = both
                same = (mine == theirs)[steps >= (self.runs[seed].switch_step or 0)]
                found += [seed] * (stretch(same) >= min(same.size, max(LONG, math.ceil(share * same.size))))
        return found

    def seeds(self, some: list[int]) -> str:
        """ "seed 1, 2: ", or "" where it is all of them."""
        return "" if len(some) == len(self.runs) else f"seed {', '.join(map(str, some))}: "


def _judge_setup(setup: StoredSetup) -> list[ArmVerdict]:
    missing = tuple(_missing(setup))
    verdicts = []
    for arm in setup.arms:
        if arm != CONTROL:
            fields = setup.records[arm]
            against = control_of(fields, setup)
            it = _Judged(setup, arm, fields, against, setup.arms[arm], setup.arms.get(against, {}))
            expected = "FAIL" if fields.variant == NEGATIVE else "PASS"
            verdict = _judge_arm(it)
            verdicts.append(
                ArmVerdict(
                    setup.run_id, setup.axes, arm, fields, against, verdict, expected, missing, setup.env_id
                )
            )
    return _doubted(verdicts)


def _judge_arm(it: _Judged) -> Verdict:
    setup, fields, runs = it.setup, it.fields, it.runs
    notes = [f"seed {seed}: {reason}" for seed, reason in sorted(setup.failed.get(it.arm, {}).items())]
    if not runs or not it.control:
        result = GateResult("L1", "INCONCLUSIVE", f"no finished run of {it.against if runs else it.arm}")
        return conclude([result], notes, "nothing was trained to the end")
    is_perturbed = fields.variant == EPS
    has_golden = not is_perturbed and fields.variant not in ABLATIONS
    if it.other_layers and has_golden:
        has_golden = False
        if fields.variant != GOLDEN:
            notes.append(
                f"{fields.recipe}_golden was not compared: it rounds other layers ({it.other_layers})"
            )
    if fields.variant == OTHER:
        verdict = judge_other_seeds(runs, it.control)
    else:
        schedule = str(setup.fact(it.arm, "schedule") or "")
        cool_down = fields.variant == COOLDOWN
        warm_up = bool(_WARM_UP.search(schedule)) or fields.variant == WARMUP
        if schedule and (is_perturbed or not (warm_up or cool_down)):
            # The run that its first phase should equal is of another set-up, or starts from other weights.
            warm_up = False
            notes.append(f"schedule {schedule}: its first phase was not compared bit for bit")
            runs = {seed: replace(run, switch_step=None) for seed, run in runs.items()}
        verdict = judge_pairs(
            runs,
            it.control,
            golden=setup.runs_of(it.golden) if has_golden else None,
            twin=it.control if warm_up else setup.runs_of(Arm(fields.recipe)) if cool_down else None,
            twin_name=it.against if warm_up else fields.recipe,
            excused=("equals_base", "barely_differs") if is_perturbed else ("equals_base",),
        )
    for note in (note for condition in CONDITIONS for note in condition(it)):
        notes.append(note.text)
        if note.withholds and verdict.outcome == "PASS":
            verdict = replace(verdict, outcome="INCONCLUSIVE")
        if note.not_fp8:
            verdict = replace(verdict, not_fp8=note.text)
    return replace(verdict, notes=(*notes, *verdict.notes))


def _equals_control(it: _Judged) -> Iterator[ReaderNote]:
    """An arm that should differ and does not was not run as it is named, in these seeds; or a curve is not its own."""
    claims_fp8 = it.fields.has_fp8 and it.fields.variant != EPS
    for curve in ("loss", "heldout", "grad_norm"):
        if equal := it.equal(it.control, curve, STRETCH):
            why = "FP8 cannot have run" if claims_fp8 and curve == "loss" else "it was not run as it is named"
            yield ReaderNote(
                f"{it.seeds(equal)}{curve}, whole or in a stretch, is bitwise equal to {it.against}: {why}",
                not_fp8=claims_fp8 and curve == "loss",
            )


def _equals_golden(it: _Judged) -> Iterator[ReaderNote]:
    """An arm whose losses are the emulation's was emulated, unless both are proved to form the same sums."""
    if not it.fields.has_fp8 or it.fields.variant or it.other_layers:
        return
    if copied := it.equal(it.setup.runs_of(it.golden)):
        emulated = [it.setup.fact(arm, "emulated") for arm in (it.arm, it.golden)]
        proved = all(it.runs[seed].proof_outcome is ProofOutcome.PROVED for seed in copied)
        withholds, why = True, ": FP8 was emulated, or the golden arm was not"
        if proved and emulated == [False, True]:
            withholds, why = False, ", though its FP8 GEMMs were proved: here both form the same sums"
        seeds = ", ".join(map(str, copied))
        yield ReaderNote(
            f"seed {seeds}: every loss is bitwise equal to {it.fields.recipe}_golden{why}", withholds
        )


def _unproved(it: _Judged) -> Iterator[ReaderNote]:
    """FP8 was proved in every seed of an arm that claims FP8 GEMMs, or all of it was emulated."""
    runs = dict(sorted(it.runs.items()))
    emulated = all(run.emulated for run in runs.values())
    # Neither an emulation nor a part of one, by its name
    claims_fp8 = it.fields.has_fp8 and it.fields.variant not in (GOLDEN, *ABLATIONS)
    if claims_fp8 and emulated:
        yield ReaderNote(
            f"emulated: the arithmetic of {it.fields.recipe} was judged, no GEMM of it ran on hardware",
            withholds=False,
        )
    yield from (
        ReaderNote(f"seed {seed}: {run.proof_outcome}: {run.proof}")
        for seed, run in runs.items()
        if run.doubted
    )
    unasked = [seed for seed, run in runs.items() if run.proof_outcome is ProofOutcome.NONE]
    if claims_fp8 and not emulated and unasked:
        unproven = (
            "no row says that its FP8 layers ran in FP8: run it again, with fp8core.verify at its start"
        )
        yield ReaderNote(f"{it.seeds(unasked)}{unproven}")


# What must hold of the stored runs of an arm, whatever the gates say: each yields a note on what does not.
CONDITIONS: tuple[Callable[[_Judged], Iterator[ReaderNote]], ...] = (
    _equals_control,
    _equals_golden,
    _unproved,
)


def control_of(arm: Arm, setup: StoredSetup) -> str:
    """Name of the arm that an arm of a set-up is held against."""
    own = replace(arm, variant="")
    return str(own) if arm.variant == EPS and setup.runs_of(own) is not None else CONTROL


def _doubted(verdicts: list[ArmVerdict]) -> list[ArmVerdict]:
    """Where a control did the opposite of what it must, no other arm passes; where it can't tell, each gets a note."""
    doubts = [
        f"{v.arm} is {v.verdict.outcome}, not {v.expected}: this set-up cannot tell"
        for v in verdicts
        if v.surprising
    ]
    unknown = [
        f"{v.arm} is INCONCLUSIVE: that this set-up passes what it must was not shown"
        for v in verdicts
        if v.fields.recipe == CONTROL and v.verdict.outcome == "INCONCLUSIVE"
    ]
    demoted = []
    for v in verdicts:
        own = v.verdict
        if own.outcome == "PASS" and not v.surprising:
            outcome = "INCONCLUSIVE" if doubts else own.outcome
            v = replace(v, verdict=replace(own, outcome=outcome, notes=(*doubts, *unknown, *own.notes)))
        demoted.append(v)
    return demoted


def _missing(setup: StoredSetup) -> Iterator[str]:
    """Control arms that were not run, with what is therefore not shown."""
    wanted: dict[Arm | str, str] = {
        Arm(CONTROL, variant=EPS): "the numeric noise floor of the control is not known",
        Arm(CONTROL, variant=OTHER): "the spread between seeds was not tested",
        Arm(variant=NEGATIVE): "that a broken arm would fail here was not shown",
    }
    for name, arm in setup.records.items():
        if arm.recipe != CONTROL and not arm.variant:
            recipe = arm.recipe or name
            if setup.fact(name, "emulated"):
                wanted["an emulation by other code"] = f"an error of {recipe}'s arithmetic is not seen"
            else:
                wanted[Arm(recipe, variant=GOLDEN)] = (
                    f"an error of {recipe}'s gradients' scale below 2 % is not seen"
                )
            wanted[Arm(recipe, variant=EPS)] = f"the noise floor of {recipe} is not known"
    return (f"{arm} ({why})" for arm, why in wanted.items() if not setup.runs_of(arm))
