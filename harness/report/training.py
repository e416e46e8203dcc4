"""Training: verdicts, time to loss and layer diagnostics of the suite `divergence`, as tables and as one answer."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge.verdict import GATES, MARGIN, ArmVerdict, time_to_loss
from harness.judge.verdict.result import percent
from harness.judge.verdict.rows import CONTROL, NEGATIVE
from harness.report.answer import Answer, Verdict
from harness.report.table import Cell, Column, Table, make_table, number, number4
from harness.store import text
from harness.store.arm import ABLATIONS, COOLDOWN, EPS, GOLDEN, WARMUP, Arm, arms_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from harness.judge.verdict import Settled
    from harness.judge.verdict.rows import Setup
    from harness.judge.verdict.time_to_loss import Reach
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
    settled = Column(_SETTLED, lambda v: _settled_cell(v.verdict.settled), _SETTLED_HINT)
    columns = [
        *(Column(name, partial(_axis_cell, name)) for name in varying),
        Column(
            "arm",
            lambda v: Cell(v.arm, v.arm, note="" if v.against == CONTROL else f"against {v.against}"),
        ),
        Column("verdict", _outcome_cell),
        *(Column(_HEADINGS[name], partial(_gate_cell, name), GATES[name]) for name in shown),
        *([settled] if settles else []),
    ]
    return make_table(f"verdict-{machine.env_id}", columns, verdicts, _said(machine), sortable=False)


def gates_table(machine: Machine) -> Table:
    """Every gate in a sentence, and what else a verdict says."""
    titles = ("arm", "gate", "status", "what it says")
    rows: list[tuple[str, str, str | Cell, str]] = []
    for v in machine.verdicts:
        name = label(machine, v)
        for g in v.verdict.gates:
            status = _SHORT.get(g.status, g.status)
            rows.append((name, _HEADINGS[g.gate], Cell(status, status, STYLES[g.status]), g.sentence))
        if v.verdict.settled is not None:
            rows.append((name, _SETTLED, "", v.verdict.settled.sentence))
        rows += [(name, "note", "", note) for note in v.verdict.notes]
    columns = [Column(title, itemgetter(i)) for i, title in enumerate(titles)]
    return make_table(f"gates-{machine.env_id}", columns, rows)


def reach_table(machine: Machine) -> Table:
    """When each arm reaches a loss; seconds on a GPU only."""
    found: list[tuple[Reach, Setup, bool]] = []  # and whether its runs had the GPU to themselves
    for setup in machine.trainings:
        arms = {
            a: runs for a, runs in setup.arms.items() if a != f"{CONTROL}_other"
        }  # other batches: no pair
        alone = all(about.get("runs_on_this_gpu", 1) == 1 for about in setup.resolved.values())
        found += [(reach, setup, alone) for reach in time_to_loss(arms, CONTROL)]
    shared = Cell(text.NONE, None, "muted", "runs shared the GPU")
    columns = [
        Column("set-up", lambda f: setup_label(machine, f[1].axes)),
        Column("arm", lambda f: f[0].arm),
        number("loss (nats)", lambda f: f[0].target, number4),
        number("reached", lambda f: _reached_cell(f[0])),
        number("step", lambda f: _median(f[0].steps)),
        number("sooner, steps", lambda f: _ratio_cell(f[0].step_ratio, f[0])),
    ]
    if machine.is_gpu:
        columns += [
            number("second", lambda f: _median(f[0].seconds) if f[2] else shared),
            number("sooner, seconds", lambda f: _ratio_cell(f[0].second_ratio, f[0]) if f[2] else shared),
        ]
    by = " and ".join(sorted({reach.curve for reach, _, _ in found}))
    caption = (
        f"Time to loss, by the {by}: medians over seeds; ratios are control / arm, paired by seed, with 95 % intervals. "
        f"The loss lies {100 * MARGIN:g} % above the lowest that every run of the control reaches."
        + ("" if machine.is_gpu else " Seconds are left out: a CPU's are no evidence about a GPU.")
    )
    return make_table(f"reach-{machine.env_id}", columns, found, caption, sortable=False)


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
    columns = [
        *([Column("set-up", "set-up")] if len(machine.trainings) > 1 else []),
        Column("arm", "arm"),
        Column("tensor", "part"),
        number("SQNR (dB)", lambda r: _extreme(r, "sqnr_db", min)),
        number("underflow", lambda r: _extreme(r, "underflow_frac", max), text.percent),
        number("saturated", lambda r: _extreme(r, "saturated_frac", max), text.percent),
        number("least amax", lambda r: _extreme(r, "amax", min)),
        number("most amax", lambda r: _extreme(r, "amax", max)),
        number("drift (log2)", "drift", hint="largest change of log2(scale) within a run"),
    ]
    caption = (
        "Layers, by tensor before its cast: the worst look of any seed. The curves are in the Parquet files."
    )
    return make_table(f"layers-{machine.env_id}", columns, list(worst.values()), caption)


def findings_table(machine: Machine) -> Table:
    """What is probably wrong, with its figures, cause and way out."""
    columns = (
        Column("finding", "symptom"),
        Column("figures", lambda f: "; ".join(f.evidence)),
        Column("cause", "cause"),
        Column("change", "change"),
    )
    return make_table(f"findings-{machine.env_id}", columns, machine.findings, sortable=False)


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


def _axis_cell(name: str, found: ArmVerdict) -> Cell:
    value = found.axes.get(name)
    return Cell(text.axis_value(value), str(value))


def _gate_cell(name: str, found: ArmVerdict) -> Cell:
    gate = found.verdict.gate(name)
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


def _outcome_cell(found: ArmVerdict) -> Cell:
    outcome = found.verdict.outcome
    if outcome == found.expected == "FAIL":
        return Cell(outcome, outcome, "pass", "as it should")
    return Cell(outcome, outcome, STYLES[outcome], "must not" if found.surprising else "")


def _reached_cell(reach: Reach) -> Cell:
    seeds = len(reach.steps)
    return Cell(f"{reach.reached} of {seeds}", reach.reached, "" if reach.reached == seeds else "bad")


def _median(by_seed: Mapping[int, float]) -> float | Cell:
    known = [v for v in by_seed.values() if math.isfinite(v)]
    return float(np.median(known)) if len(known) == len(by_seed) else Cell("not reached", None, "bad")


def _ratio_cell(ratio: Estimate | None, reach: Reach) -> Cell:
    if ratio is None:
        not_reached = reach.reached < len(reach.steps)
        said = "" if reach.arm == CONTROL else "not reached" if not_reached else text.NONE
        return Cell(said, None, "muted")
    if not math.isfinite(ratio.high):
        return Cell(text.ratio(ratio.value), ratio.value, note="one seed")
    return Cell(text.ratio(ratio.value), ratio.value, interval=text.interval(ratio.low, ratio.high))


def _extreme(record: Mapping[str, Any], metric: str, pick: Any) -> float | None:
    values = record.get(metric)
    return float(pick(values)) if values else None
