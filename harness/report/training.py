"""Training: verdicts, time to loss and layer diagnostics of the suite `divergence`, as tables and as one answer."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge.verdict import GATES, MARGIN, ArmVerdict, time_to_loss
from harness.judge.verdict.result import percent
from harness.judge.verdict.rows import CONTROL, NEGATIVE
from harness.report.answer import Answer, Verdict
from harness.report.table import Cell, Column, Spec, Table, make_table, number_cell, share_cell
from harness.store import text
from harness.store.arm import ABLATIONS, COOLDOWN, EPS, GOLDEN, WARMUP, Arm, arms_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from harness.judge.verdict import GateResult, Settled
    from harness.judge.verdict.rows import Setup
    from harness.report.runs import Machine
    from harness.store.stats import Estimate

STYLES = {"PASS": "pass", "WARN": "warn", "FAIL": "bad", "INCONCLUSIVE": "muted"}
_SHORT = {"INCONCLUSIVE": "can't tell"}
_HEADINGS = {
    "L1": "L1 finite",
    "L2": "L2 spikes",
    "L3": "L3 early",
    "L4": "L4 late",
    "L4h": "L4 held-out",
    "L5": "L5 trend",
    "L6": "L6 gradients",
    "prefix": "first phase",
    "band": "seed band",
}
# Axes that follow from others (a longer run rises for longer): they name a set-up only where nothing else does.
SECONDARY = ("lr_warmup", "eval_every", "eval_batches", "diagnose_every")
_SETTLED = "gap stays small from step"
_SETTLED_HINT = (
    "median over seeds of the step from which the smoothed gap stays within the noise of the recipe, or, where no "
    "perturbed runs show that, within the margin"
)
_WHOLE = "the output"  # `loss_from` of a model that returns its loss alone
_DIAGNOSED = ("sqnr_db", "underflow_frac", "saturated_frac", "amax", "scale_log2")


def trains_the_same(machine: Machine) -> Answer:
    """Whether FP8 reaches the control's loss, by the verdicts on arms that are no controls themselves."""
    question = "Does it train the same?"
    candidates = [v for v in machine.verdicts if is_candidate(v.fields)]
    count = Counter(v.verdict.outcome for v in candidates)
    if not candidates:
        return Answer(question, "can't tell", "No FP8 arm was trained in these runs.")
    outcomes = ", ".join(f"{count[o]} {o}" for o in ("PASS", "FAIL", "INCONCLUSIVE") if count[o])
    verdict: Verdict = "partly"
    if count["FAIL"] and not count["PASS"]:
        verdict = "no"
    elif not count["FAIL"] and count["INCONCLUSIVE"] > count["PASS"]:
        verdict = "can't tell"
    elif not count["FAIL"] and not count["INCONCLUSIVE"]:
        verdict = "yes"
    evidence = []
    for v in candidates:
        late = v.verdict.gate("L4")
        gap = ""
        if late is not None and math.isfinite(late.high - late.low):
            gap = f", late gap {percent(late.effect)} ({percent(late.low)} to {percent(late.high)})"
        evidence.append(f"{label(machine, v)}: {v.verdict.outcome}{gap}")
    evidence += list(dict.fromkeys(v.verdict.limits for v in candidates))
    sentence = f"{text.plural(len(candidates), 'FP8 arm')} against {CONTROL}, margin {100 * MARGIN:g} % of the loss: {outcomes}."
    # A PASS says little where nobody has seen a fault fail: leaving the control out must not give a better answer.
    if unshown(machine) and verdict == "yes":
        verdict = "partly"
        sentence += f" No {NEGATIVE} shows that a fault would fail here."
    brief = f"{text.plural(len(candidates), 'FP8 arm')}: {outcomes}" + (
        f", no {NEGATIVE} to compare." if unshown(machine) and verdict == "partly" else "."
    )
    return Answer(question, verdict, sentence, tuple(evidence[:8]), brief)


def unshown(machine: Machine) -> bool:
    """Whether a set-up has no arm with a known fault, so that nobody has seen one fail there."""
    return any(setup.runs_of(Arm(variant=NEGATIVE)) is None for setup in machine.trainings)


def is_candidate(arm: Arm) -> bool:
    """Whether an arm is one that a user would train, and no control or emulation."""
    return arm.recipe != CONTROL and arm.variant not in (EPS, GOLDEN, NEGATIVE, *ABLATIONS)


def verdict_table(machine: Machine) -> Table:
    """One row an arm: the verdict, and each gate's status with the figure that it rests on."""
    verdicts = sorted(machine.verdicts, key=lambda v: not is_candidate(v.fields))
    shown = [name for name in GATES if any(v.verdict.gate(name) for v in verdicts)]
    varying = _varying(machine)
    settles = any(v.verdict.settled for v in verdicts)
    columns = (
        *(Column(name) for name in varying),
        *(Column(t) for t in ("arm", "verdict")),
        *(Column(_HEADINGS[name], hint=GATES[name]) for name in shown),
        *([Column(_SETTLED, hint=_SETTLED_HINT)] if settles else []),
    )
    rows = []
    for v in verdicts:
        outcome = v.verdict.outcome
        note = "as it should" if outcome == v.expected == "FAIL" else "must not" if v.surprising else ""
        style = "pass" if note == "as it should" else STYLES[outcome]
        rows.append(
            (
                *(Cell(text.axis_value(v.axes.get(n)), str(v.axes.get(n))) for n in varying),
                Cell(v.arm, v.arm, note="" if v.against == CONTROL else f"against {v.against}"),
                Cell(outcome, outcome, style, note),
                *(_gate_cell(v.verdict.gate(name)) for name in shown),
                *([_settled_cell(v.verdict.settled)] if settles else []),
            )
        )
    return Table(f"verdict-{machine.env_id}", columns, tuple(rows), _said(machine), sortable=False)


def gates_table(machine: Machine) -> Table:
    """Every gate in a sentence, and what else a verdict says."""
    columns = tuple(Column(t) for t in ("arm", "gate", "status", "what it says"))
    rows = []
    for v in machine.verdicts:
        name = label(machine, v)
        for g in v.verdict.gates:
            title = _HEADINGS[g.gate]
            status = _SHORT.get(g.status, g.status)
            rows.append(
                (
                    Cell(name, name),
                    Cell(title, title),
                    Cell(status, status, STYLES[g.status]),
                    Cell(g.sentence),
                )
            )
        if v.verdict.settled is not None:
            rows.append((Cell(name, name), Cell(_SETTLED), Cell(""), Cell(v.verdict.settled.sentence)))
        rows += [(Cell(name, name), Cell("note"), Cell(""), Cell(note)) for note in v.verdict.notes]
    return Table(f"gates-{machine.env_id}", columns, tuple(rows))


def reach_table(machine: Machine) -> Table:
    """When each arm reaches a loss; seconds on a GPU only."""
    titles = ["set-up", "arm", "loss (nats)", "reached", "step", "sooner, steps"]
    titles += ["second", "sooner, seconds"] if machine.is_gpu else []
    columns = tuple(Column(t, numeric=i > 1) for i, t in enumerate(titles))
    rows, curves = [], set()
    for setup in machine.trainings:
        arms = {
            a: runs for a, runs in setup.arms.items() if a != f"{CONTROL}_other"
        }  # other batches: no pair
        alone = all(about.get("runs_on_this_gpu", 1) == 1 for about in setup.resolved.values())
        for reach in time_to_loss(arms, CONTROL):
            curves.add(reach.curve)
            seeds = len(reach.steps)
            name = setup_label(machine, setup.axes)
            row = [
                Cell(name, name),
                Cell(reach.arm, reach.arm),
                number_cell(reach.target, 4),
                Cell(f"{reach.reached} of {seeds}", reach.reached, "" if reach.reached == seeds else "bad"),
                _median_cell(reach.steps),
                _ratio_cell(reach.step_ratio, reach.arm, reach.reached < seeds),
            ]
            if machine.is_gpu:
                seconds = (
                    _median_cell(reach.seconds),
                    _ratio_cell(reach.second_ratio, reach.arm, reach.reached < seeds),
                )
                row += seconds if alone else (Cell(text.NONE, None, "muted", "runs shared the GPU"),) * 2
            rows.append(tuple(row))
    by = " and ".join(sorted(curves))
    caption = (
        f"Time to loss, by the {by}: medians over seeds; ratios are control / arm, paired by seed, with 95 % intervals. "
        f"The loss lies {100 * MARGIN:g} % above the lowest that every run of the control reaches."
        + ("" if machine.is_gpu else " Seconds are left out: a CPU's are no evidence about a GPU.")
    )
    return Table(f"reach-{machine.env_id}", columns, tuple(rows), caption, sortable=False)


def layers_table(machine: Machine) -> Table:
    """Worst figures of each cast tensor over all looks and seeds, for the arms that train in FP8 throughout."""
    frame = machine.frame
    own = frame[(frame["suite"] == "divergence") & (frame["part"] != "") & (frame["status"] == "ok")]
    own = own[own["metric"].isin(_DIAGNOSED)]
    own = own[[is_candidate(arm) and arm.variant not in (WARMUP, COOLDOWN) for arm in arms_of(own)]]
    worst: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in own.to_dict("records"):
        axes = {k: v for k, v in text.axes_of(row["axes"]).items() if k != "seed"}
        key = (setup_label(machine, axes), row["arm"], row["part"])
        record = worst.setdefault(key, dict(zip(("set-up", "arm", "part"), key, strict=True)))
        values = np.asarray(row["samples"], np.float64)
        metric = row["metric"]
        record.setdefault(metric, []).extend(values.tolist())
        if metric == "scale_log2":
            record["drift"] = max(record.get("drift", 0.0), float(np.ptp(values)))
    specs = [
        *(
            [Spec("set-up", lambda r: Cell(r["set-up"], r["set-up"]), numeric=False)]
            if len(machine.trainings) > 1
            else []
        ),
        Spec("arm", lambda r: Cell(r["arm"], r["arm"]), numeric=False),
        Spec("tensor", lambda r: Cell(r["part"], r["part"]), numeric=False),
        Spec("SQNR (dB)", lambda r: number_cell(_extreme(r, "sqnr_db", min))),
        Spec("underflow", lambda r: share_cell(_extreme(r, "underflow_frac", max))),
        Spec("saturated", lambda r: share_cell(_extreme(r, "saturated_frac", max))),
        Spec("least amax", lambda r: number_cell(_extreme(r, "amax", min))),
        Spec("most amax", lambda r: number_cell(_extreme(r, "amax", max))),
        Spec(
            "drift (log2)",
            lambda r: number_cell(r.get("drift")),
            "largest change of log2(scale) within a run",
        ),
    ]
    caption = (
        "Layers, by tensor before its cast: the worst look of any seed. The curves are in the Parquet files."
    )
    return make_table(f"layers-{machine.env_id}", specs, list(worst.values()), caption)


def findings_table(machine: Machine) -> Table:
    """What is probably wrong, with its figures, cause and way out."""
    columns = tuple(Column(t) for t in ("finding", "figures", "cause", "change"))
    rows = tuple(
        (Cell(f.symptom), Cell("; ".join(f.evidence)), Cell(f.cause), Cell(f.change))
        for f in machine.findings
    )
    return Table(f"findings-{machine.env_id}", columns, rows, sortable=False)


def label(machine: Machine, verdict: ArmVerdict) -> str:
    """An arm, with its set-up where there are several."""
    setup = setup_label(machine, verdict.axes)
    return f"{verdict.arm}, {setup}" if len(machine.trainings) > 1 and setup else verdict.arm


def setup_label(machine: Machine, axes: Mapping[str, Any]) -> str:
    """A set-up in a few words: the axes that differ between set-ups, or its model where there is one."""
    varying = _varying(machine)
    if not varying:
        return text.axis_value(axes.get("model", ""))
    return ", ".join(f"{name} {text.axis_value(axes.get(name))}" for name in varying)


def _varying(machine: Machine) -> list[str]:
    setups: list[Setup] = machine.trainings

    def distinct(names: Collection[str]) -> int:
        return len({json.dumps([s.axes.get(n) for n in names]) for s in setups})

    every = sorted({name for s in setups for name in s.axes})
    varying = [n for n in every if distinct([n]) > 1]
    telling = [n for n in varying if n not in SECONDARY]
    return telling if distinct(telling) == distinct(varying) else varying


def _said(machine: Machine) -> str:
    """What all verdicts have in common: fixed axes, the margin, limits and missing controls."""
    if not machine.trainings:
        return ""
    axes, varying = machine.trainings[0].axes, _varying(machine)
    fixed = text.axes_said(axes, (n for n in axes if n not in varying))
    limits = " ".join(dict.fromkeys(v.verdict.limits for v in machine.verdicts))
    missing = "; ".join(dict.fromkeys(m for v in machine.verdicts for m in v.missing))
    abouts = [about for setup in machine.trainings for about in setup.resolved.values()]
    found = {str(about["loss_from"]) for about in abouts if about.get("loss_from")}
    judged = f"Loss judged: {'; '.join(sorted(found))}. " if found - {_WHOLE} else ""
    return (
        f"All rows: {fixed}. {judged}Gaps are candidate minus control of the same seed, relative to the control's loss; margin "
        f"{100 * MARGIN:g} %. {limits}" + (f" Missing: {missing}." if missing else "")
    )


def _gate_cell(gate: GateResult | None) -> Cell:
    if gate is None:
        return Cell("", None)
    figure = ""
    if math.isfinite(gate.effect):
        if gate.unit == "of the loss" and gate.gate != "L5":
            figure = percent(gate.effect)
        elif gate.unit == "ratio":
            figure = text.number(gate.effect, 4)
        elif gate.unit == "spikes" and gate.effect:
            figure = f"{gate.effect:+.0f}"
    return Cell(_SHORT.get(gate.status, gate.status), gate.status, STYLES[gate.status], figure)


def _settled_cell(settled: Settled | None) -> Cell:
    if settled is None:
        return Cell("", None)
    if settled.problem:
        return Cell(_SHORT["INCONCLUSIVE"], None, "muted", settled.problem)
    low, high, coverage = settled.interval
    if math.isinf(settled.step):
        return Cell(
            "not reached",
            None,
            "bad",
            f"{settled.unsettled} of {len(settled.steps)} seeds outside at the end",
        )
    end = f"{high:,.0f}" if math.isfinite(high) else "open"
    within = "within the noise" if settled.noise_runs else "within the margin"
    interval = f"{low:,.0f} to {end}"
    return Cell(
        f"{settled.step:,.0f}",
        settled.step,
        note=f"{within}; covers {100 * coverage:.0f} %",
        interval=interval,
    )


def _median_cell(by_seed: Mapping[int, float]) -> Cell:
    known = [v for v in by_seed.values() if math.isfinite(v)]
    return (
        number_cell(float(np.median(known)))
        if len(known) == len(by_seed)
        else Cell("not reached", None, "bad")
    )


def _ratio_cell(ratio: Estimate | None, arm: str, not_reached: bool) -> Cell:
    if ratio is None:
        said = "" if arm == CONTROL else "not reached" if not_reached else text.NONE
        return Cell(said, None, "muted")
    if not math.isfinite(ratio.high):
        return Cell(text.ratio(ratio.value), ratio.value, note="one seed")
    return Cell(text.ratio(ratio.value), ratio.value, interval=text.interval(ratio.low, ratio.high))


def _extreme(record: Mapping[str, Any], metric: str, pick: Any) -> float | None:
    values = record.get(metric)
    return float(pick(values)) if values else None
