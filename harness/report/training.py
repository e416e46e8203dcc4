"""Training: verdicts, cost in loss, time to loss, curves and layer diagnostics of the suite `divergence`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge.diagnosis import setting_of
from harness.judge.verdict import GATES, MARGIN, ArmVerdict, ema, time_to_loss
from harness.judge.verdict.curves import half_life, pair, relative_gap
from harness.judge.verdict.result import EQUIVALENCE, percent
from harness.judge.verdict.rows import CONTROL, SUITE, is_candidate
from harness.judge.verdict.rule import PASS_CONFIDENCE
from harness.report.drawing import BAND, INK, MUTED, Chart, evenly, look, sheet, styled, ticks
from harness.report.table import (
    STYLES,
    Column,
    estimate,
    make_table,
    number,
    table_of,
    word,
)
from harness.store import stats, text
from harness.store.case import (
    COOLDOWN,
    EPS,
    GOLDEN,
    GRAD_FORMAT,
    KNOBS,
    LOCAL,
    NEGATIVE,
    ONLY_GEMM,
    ONLY_OPERAND,
    OTHER,
    WARMUP,
    Arm,
    arm_of,
)
from harness.store.printer import Cell, Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from harness.judge.verdict import GateResult
    from harness.judge.verdict.rows import StoredSetup
    from harness.judge.verdict.time_to_loss import Reach
    from harness.report.runs import Machine
    from harness.report.table import Row
    from harness.store.stats import Effect, Vector

_HEADINGS = {
    "L1": "L1 finite", "L2": "L2 spikes", "L3": "L3 course", "L4": "L4 late", "L4h": "L4 held-out", "L5": "L5 trend",
    "L6": "L6 gradients", "prefix": "first phase", "band": "seed band",
}  # fmt: skip
# Axes that follow from others (a longer run rises for longer): they name a set-up only where nothing else does.
SECONDARY = ("lr_warmup", "eval_every", "eval_batches", "diagnose_every")
_WHOLE = "the output"  # `loss_from` of a model that returns its loss alone
LIMIT = 100 * MARGIN
MOST_CURVES = 6  # set-ups with a figure
MOST_POINTS = 240  # of a line; more cannot be seen and make the page heavy
DASHES = ("-", "--", "-.", ":")
_VARIANTS = {
    EPS: "weights perturbed by 1e-4",
    OTHER: "other seeds",
    GOLDEN: "emulated",
    WARMUP: "after a warm-up without FP8",
    COOLDOWN: "before a cool-down without FP8",
    NEGATIVE: "broken on purpose",
}


# Tables


def verdict_table(machine: Machine) -> Table:
    """One row an arm: the verdict, each gate's status with the figure that it rests on, and the seeds."""
    verdicts = sorted(machine.verdicts, key=lambda v: not is_candidate(v.fields))
    shown = [name for name in GATES if any(v.verdict.gate(name) for v in verdicts)]
    varying = varying_axes(machine)
    records = []
    for v in verdicts:
        outcome, note = v.verdict.outcome, "" if v.against == CONTROL else f"against {v.against}"
        cell = word(outcome, "must not" if v.surprising else "")
        if outcome == v.expected == "FAIL":
            cell = Cell(outcome, outcome, "pass", "as it should")
        record: Row = {n: Cell(text.axis_value(v.axes.get(n)), str(v.axes.get(n))) for n in varying}
        record |= {g.gate: _gate_cell(g, _gate_figure(g)) for g in v.verdict.gates}
        record |= {"arm": Cell(v.arm, v.arm, note=note), "verdict": cell}
        record["what"] = what(v.fields, str(v.axes.get("schedule") or ""))
        records.append(record | {"seeds": max((g.seeds for g in v.verdict.gates), default=0)})
    every = [
        *(Column(name) for name in (*varying, "arm")),
        Column("what is cast", "what"),
        Column("verdict"),
        *(Column(_HEADINGS[name], name, GATES[name]) for name in shown),
        number("seeds", show=str),
    ]
    return make_table(f"verdict-{machine.env_id}", every, records, _shared_by_all(machine), sortable=False)


def _shared_by_all(machine: Machine) -> str:
    """What all verdicts have in common: fixed axes, the margin, limits and missing controls."""
    if not machine.trainings:
        return ""
    axes = machine.trainings[0].axes
    shared = (n for n in axes if n not in LOCAL and all(s.axes.get(n) == axes[n] for s in machine.trainings))
    abouts = [about for setup in machine.trainings for about in setup.resolved.values()]
    loss_from = {str(about["loss_from"]) for about in abouts if about.get("loss_from")}
    judged = f"Loss judged: {'; '.join(sorted(loss_from))}." if loss_from - {_WHOLE} else ""
    lacks = dict.fromkeys(m for v in machine.verdicts for m in v.missing)
    everywhere = [m for m in lacks if all(m in v.missing for v in machine.verdicts)]
    in_some = [m for m in lacks if m not in everywhere]
    return " ".join(filter(None, (
        f"All rows: {text.axes_said(axes, shared)}.",
        judged,
        "Gaps are candidate minus control of the same seed, relative to the control's loss, mean over seeds with its "
        f"{100 * PASS_CONFIDENCE:g} % interval; margin {LIMIT:g} %; above 0 is worse.",
        *dict.fromkeys(v.verdict.limits for v in machine.verdicts),
        f"Missing: {'; '.join(everywhere)}." if everywhere else "",
        f"Missing in some of these set-ups: {'; '.join(in_some)}." if in_some else "",
    )))  # fmt: skip


def _gate_cell(gate: GateResult, figure: str = "") -> Cell:
    shown = "can't tell" if gate.status == "INCONCLUSIVE" else gate.status
    return Cell(shown, gate.status, STYLES[gate.status], figure)


def _gate_figure(gate: GateResult) -> str:
    if not math.isfinite(gate.effect):
        return ""
    if gate.unit == "of the loss" and gate.gate != "L5":
        within = f" ({percent(gate.low)} to {percent(gate.high)})" * (
            gate.gate in EQUIVALENCE and math.isfinite(gate.high - gate.low)
        )
        return f"{percent(gate.effect)}{within}"
    if gate.unit == "ratio":
        return text.number(gate.effect, 4)
    return f"{gate.effect:+.0f}" if gate.unit == "spikes" and gate.effect else ""


def gates_table(machine: Machine) -> Table:
    """Every gate in a sentence, and what else a verdict says."""
    rows: list[tuple[str, str, str | Cell, str]] = []
    for v in machine.verdicts:
        name = label(machine, v)
        rows += [(name, _HEADINGS[g.gate], _gate_cell(g), g.sentence) for g in v.verdict.gates]
        rows += [(name, "note", "", note) for note in v.verdict.notes]
    records = [dict(zip(("arm", "gate", "status", "what it says"), row, strict=True)) for row in rows]
    return table_of(machine, "gates", records)


def what(arm: Arm, schedule: str = "") -> str:
    """What of an arm is in FP8, in words; `schedule` is the precision schedule of its set-up.

    >>> what(Arm("tensorwise", variant="only_grad_output")), what(Arm("rowwise", variant="warmup"))
    ('only operand grad_output, emulated', 'all, after a warm-up without FP8')
    """
    parts = {
        "only operand": ONLY_OPERAND,
        "only GEMM": ONLY_GEMM,
        "all, gradients in": GRAD_FORMAT,
        "all but": KNOBS,
    }
    found = [f"{words} {own[arm.variant]}, emulated" for words, own in parts.items() if arm.variant in own]
    by = f"by the schedule {schedule}" if schedule and arm.recipe != CONTROL else ""
    whole = "nothing" if arm.recipe == CONTROL else "all"
    how = _VARIANTS.get(arm.variant, arm.variant) if arm.variant else by
    return found[0] if found else ", ".join(filter(None, (whole, how)))


def reach_table(machine: Machine) -> Table:
    """When each arm reaches a loss; seconds on a GPU only."""
    records: list[Row] = []
    shared = Cell(text.NONE, None, "muted", "runs shared the GPU")
    curves = set()
    for setup in machine.trainings:
        arms = {
            a: runs for a, runs in setup.arms.items() if a != f"{CONTROL}_other"
        }  # other batches: no pair
        alone = all(about.get("runs_on_this_gpu", 1) == 1 for about in setup.resolved.values())
        for reach in time_to_loss(arms, CONTROL):
            seeds = len(reach.steps)
            curves.add(reach.curve)
            record = {"set-up": setup_label(machine, setup.axes), "arm": reach.arm, "target": reach.target}
            style = "" if reach.reached == seeds else "bad"
            record["reached"] = Cell(f"{reach.reached} of {seeds}", reach.reached, style)
            record |= {"step": _median(reach.steps), "sooner, steps": _sooner(reach.step_ratio, reach)}
            if machine.is_gpu:
                times = _median(reach.seconds), _sooner(reach.second_ratio, reach)
                record["second"], record["sooner, seconds"] = times if alone else (shared, shared)
            records.append(record)
    caption = (
        f"Time to loss, by the {' and '.join(sorted(curves))}: medians over seeds; ratios are control / arm, paired by seed, with 95 % "
        f"intervals. The loss lies {LIMIT:g} % above the lowest that every run of the control reaches."
    )
    caption += "" if machine.is_gpu else " Seconds are left out: a CPU's are no evidence about a GPU."
    return table_of(machine, "reach", records, caption, sortable=False)


def _median(by_seed: Mapping[int, float]) -> float | Cell:
    known = [v for v in by_seed.values() if math.isfinite(v)]
    return float(np.median(known)) if len(known) == len(by_seed) else Cell("not reached", None, "bad")


def _sooner(ratio: Effect | None, reach: Reach) -> Cell:
    if ratio is None:
        why = "not reached" if reach.reached < len(reach.steps) else text.NONE
        return Cell("" if reach.arm == CONTROL else why, None, "muted")
    if not math.isfinite(ratio.high):
        return Cell(text.ratio(ratio.speedup), ratio.speedup, note="one seed")
    return estimate(ratio.speedup, 1 / ratio.high, 1 / ratio.low)


def layers_table(machine: Machine) -> Table:
    """Worst figures of each cast tensor over all looks and seeds, for the arms that train in FP8 throughout."""
    several = len(machine.trainings) > 1
    worst: dict[tuple[str, str, str], Row] = {}
    for row in machine.pick(suite=SUITE, status="ok", metric=_DIAGNOSED):
        arm = arm_of(row)
        if row["part"] and is_candidate(arm) and arm.variant not in (WARMUP, COOLDOWN):
            setup = setup_label(machine, setting_of(row))
            record = worst.setdefault(
                (setup, row["arm"], row["part"]), {"arm": row["arm"], "part": row["part"]}
            )
            record["set-up"] = setup if several else ""
            own = [float(v) for v in row["samples"]]
            if row["metric"] == "scale_log2":
                own = [max(own) - min(own)]
            for field, pick in _DIAGNOSED[row["metric"]].items():
                record[field] = pick([*own, record[field]] if field in record else own)
    caption = (
        "Layers, by tensor before its cast: the worst look of any seed. The curves are in the Parquet files."
    )
    return table_of(machine, "layers", list(worst.values()), caption)


_DIAGNOSED: Mapping[str, Mapping[str, Any]] = {  # metric -> column -> its worst
    "sqnr_db": {"sqnr": min},
    "underflow_frac": {"underflow": max},
    "saturated_frac": {"saturated": max},
    "amax": {"least amax": min, "most amax": max},
    "scale_log2": {"drift": max},
}


def label(machine: Machine, verdict: ArmVerdict) -> str:
    """An arm, with its set-up where there are several."""
    setup = setup_label(machine, verdict.axes)
    return f"{verdict.arm}, {setup}" if len(machine.trainings) > 1 and setup else verdict.arm


def setup_label(machine: Machine, axes: Mapping[str, Any]) -> str:
    """A set-up in a few words: the axes that differ between set-ups, as far as they are set, or its model."""
    stated = {name: axes[name] for name in varying_axes(machine) if axes.get(name) not in (None, "")}
    return ", ".join(f"{name} {text.axis_value(value)}" for name, value in stated.items()) or text.axis_value(
        axes.get("model", "")
    )


def varying_axes(machine: Machine) -> list[str]:
    """Axes that tell set-ups apart, those that follow from others only where they must."""

    def distinct(names: Sequence[str]) -> int:
        return len({json.dumps([s.axes.get(n) for n in names]) for s in machine.trainings})

    every = sorted({name for s in machine.trainings for name in s.axes} - {*LOCAL})
    varying = [n for n in every if distinct([n]) > 1]
    telling = [n for n in varying if n not in SECONDARY]
    return telling if distinct(telling) == distinct(varying) else varying


# Figures


def loss_charts(machine: Machine) -> list[Chart]:
    """Loss curves and gaps of each set-up that has a control."""
    setups = [s for s in machine.trainings if _smoothed(s, CONTROL)[1].size]
    found = []
    for i, setup in enumerate(setups[:MOST_CURVES]):
        found += [
            _curves(machine, setup, f"loss-{machine.env_id}-{i}"),
            *_gaps(machine, setup, f"gap-{machine.env_id}-{i}"),
        ]
    return found


def _line(axes: Axes, i: int, x: Vector, y: Vector, **more: Any) -> None:
    at = evenly(x.size, MOST_POINTS)
    axes.plot(x[at], y[at], linewidth=1.2, linestyle=DASHES[i % len(DASHES)], **more)


def _band(axes: Axes, x: Vector, middle: Any, half: Vector, label: str) -> None:
    at = evenly(x.size, MOST_POINTS)
    axes.fill_between(x[at], (middle - half)[at], (middle + half)[at], color=BAND, linewidth=0, label=label)


@styled
def _curves(machine: Machine, setup: StoredSetup, key: str) -> Chart:
    drawn = sheet(key, 3.6, grid="y")
    axes, (steps, base), (_, other) = (
        drawn.axes,
        _smoothed(setup, CONTROL),
        _smoothed(setup, f"{CONTROL}_other"),
    )
    centre = base.mean(axis=0)
    others = other.shape[0] if other.shape[0] > 1 and other.shape[1] == steps.size else 0
    if others:
        half = stats.t_quantile(0.975, others - 1) * other.std(axis=0, ddof=1)
        _band(axes, steps, centre, half, "other seeds, 95 %")
    shown = [CONTROL, *(a for a in setup.arms if a == NEGATIVE or is_candidate(setup.records[a]))]
    ends = [centre.min(), centre[centre.size // 20]]
    for i, arm in enumerate(shown):
        x, y = _smoothed(setup, arm)
        if y.size:
            mean = y.mean(axis=0)
            _line(axes, i, x, mean, color=look(machine, setup.records[arm])["color"], label=arm)
            ends += [] if arm == NEGATIVE else [mean.min()]
    room = 0.06 * (max(ends) - min(ends)) or 0.01 * abs(max(ends)) or 1.0  # a curve may be flat
    axes.set(
        ylim=(min(ends) - room, max(ends) + 4 * room),
        xlim=(steps[0], steps[-1]),
        xlabel="step",
        ylabel="loss (nats)",
    )
    ticks(axes.yaxis, 6)
    caption = "A line an arm: the mean over seeds of the smoothed training loss."
    caption += f" Band: control +/- t sd of {others} runs of other seeds." if others else ""
    return drawn.chart(f"Loss: {setup_label(machine, setup.axes)}", caption)


@styled
def _gaps(machine: Machine, setup: StoredSetup, key: str) -> list[Chart]:
    """The smoothed gap of each arm that is paired with the control, in percent of the control's loss."""
    records = setup.records
    arms = [
        a for a in setup.arms if a == NEGATIVE or is_candidate(records[a]) or records[a].variant == GOLDEN
    ]
    found = {arm: gap for arm in arms if (gap := _paired_gap(setup, arm)) is not None}
    if not found:
        return []
    drawn = sheet(key, 3.6, grid="")
    axes, noise = drawn.axes, _paired_gap(setup, f"{CONTROL}_eps", spread=True)
    far = {arm: mean[np.abs(mean).argmax()] for arm, (_, mean) in found.items()}
    top = max([1.25 * LIMIT, *(1.1 * abs(v) for v in far.values() if abs(v) <= 12 * LIMIT)])
    if noise is not None:
        _band(axes, noise[0], 0.0, noise[1], f"{CONTROL}_eps, 3 sd")
    axes.axhline(0, color=MUTED, linewidth=0.6)
    for side in (LIMIT, -LIMIT):
        axes.axhline(side, color=INK, linewidth=0.9, linestyle="--", label="margin" if side > 0 else None)
    switches = {}
    for i, (arm, (x, mean)) in enumerate(found.items()):
        colour = look(machine, records[arm])["color"]
        _line(axes, i, x, mean, color=colour, label=arm)
        switch = next((r.switch_step for r in setup.arms[arm].values() if r.switch_step), None)
        if switch is not None:
            axes.axvline(switch, color=colour, linewidth=0.8, linestyle=":")
            switches[arm] = switch
    axes.set(ylim=(-top, top), xlim=(x[0], x[-1]), xlabel="step", ylabel="gap (% of the loss)")
    ticks(axes.yaxis, 6, signed=True)
    beyond = [f"{arm} reaches {v:+.3g} %" for arm, v in far.items() if abs(v) > top]
    caption = [
        "Candidate minus control of the same seed, smoothed, mean over seeds",
        *["Band: 3 sd between seeds of the perturbed control"] * (noise is not None),
        *(f"{arm} switches at step {step}" for arm, step in switches.items()),
        *[f"Beyond the scale: {', '.join(beyond)}"] * bool(beyond),
    ]
    return [drawn.chart(f"Paired gap: {setup_label(machine, setup.axes)}", f"{'. '.join(caption)}.")]


def _smoothed(setup: StoredSetup, arm: str) -> tuple[Vector, Vector]:
    """Steps, and the smoothed loss of each whole run of an arm, [S, T]; empty where there is none."""
    runs = [r for r in setup.arms.get(arm, {}).values() if r.loss.first_nonfinite is None]
    longest = max((r.loss.steps for r in runs), key=len, default=np.zeros(0))
    whole = [r.loss.values for r in runs if r.loss.steps.size == longest.size]
    if not whole or longest.size < 2:
        return longest, np.zeros((0, 0))
    return longest, ema(np.array(whole), longest, half_life(longest.size))


def _paired_gap(setup: StoredSetup, arm: str, *, spread: bool = False) -> tuple[Vector, Vector] | None:
    """Steps, and the mean smoothed gap in percent of the loss, or three sd of it between seeds; None without pairs."""
    pairs = pair(setup.arms.get(arm, {}), setup.arms[CONTROL])
    if not pairs.seeds or pairs.steps.size < 2 or (spread and len(pairs.seeds) < 2):
        return None
    gap = 100 * relative_gap(pairs)
    return pairs.steps, 3 * gap.std(axis=0, ddof=1) if spread else gap.mean(axis=0)
