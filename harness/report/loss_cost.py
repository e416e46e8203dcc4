"""What each arm of a training set-up costs in loss: the gaps of the verdict with their intervals, as table and figure."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from harness.judge.verdict import MARGIN
from harness.judge.verdict.result import percent
from harness.judge.verdict.rows import CONTROL, NEGATIVE, SUITE
from harness.report.drawing import BAND, INK, MUTED, Chart, sheet, signed, styled
from harness.report.looks import look
from harness.report.table import Cell, Column, Table, make_table, number
from harness.report.training import STYLES, setup_label
from harness.store import text
from harness.store.arm import (
    COOLDOWN,
    EPS,
    GOLDEN,
    GRAD_FORMAT,
    ONLY_GEMM,
    ONLY_OPERAND,
    OTHER,
    WARMUP,
    Arm,
)
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.judge.verdict import ArmVerdict, GateResult
    from harness.judge.verdict.rows import Setup
    from harness.report.runs import Machine

GAPS = {"L4": "late gap", "L4h": "held-out gap"}
FAR = 12 * MARGIN  # gaps beyond are written at the edge of the figure, so that the others stay legible
MOST_SETUPS = 8
SECONDS_PER_HOUR = 3600


def cost_table(machine: Machine) -> Table:
    """One row an arm: late and held-out gap with their 90 % intervals, the verdict, seeds and hours of CPU."""
    hours = _cpu_hours(machine)
    records = [
        {
            "set-up": setup_label(machine, v.axes),
            "verdict": v,
            "hours": hours.get((_key(v.axes), v.arm)),
            "schedule": str(v.axes.get("schedule") or ""),
        }
        for v in machine.verdicts
        if any(_gap(v, name) is not None for name in GAPS)
    ]
    hours_column = number(
        "CPU (h)", "hours", lambda h: text.number(h, 2), "of all seeds; evaluation included"
    )
    columns = [
        *([Column("set-up", "set-up")] if len(machine.trainings) > 1 else []),
        Column("arm", lambda r: r["verdict"].arm),
        Column("what is in FP8", lambda r: what(r["verdict"].fields, r["schedule"])),
        *(number(title, partial(_gap_cell, name)) for name, title in GAPS.items()),
        number("seeds", lambda r: _seeds(r["verdict"]), str),
        Column("verdict", lambda r: _outcome(r["verdict"])),
        *([hours_column] if any(r["hours"] for r in records) else []),
    ]
    total = sum(hours.values())
    caption = (
        f"Cost in loss: candidate minus {CONTROL} of the same seed, relative to the loss of {CONTROL}, mean over seeds with "
        f"its 90 % interval; margin {100 * MARGIN:g} %. Above 0 is worse."
        + (f" All runs with those of {CONTROL}: {_hours(total)} of CPU." if total else "")
    )
    return make_table(f"loss-cost-{machine.env_id}", columns, records, caption)


def cost_charts(machine: Machine) -> list[Chart]:
    """Gaps with their intervals of each set-up that has at least two arms with a gap."""
    charts = []
    for i, setup in enumerate(machine.trainings[:MOST_SETUPS]):
        mine = [
            v
            for v in machine.verdicts
            if (v.run_id, _key(v.axes)) == (setup.run_id, _key(setup.axes)) and _gap(v, "L4") is not None
        ]
        if len(mine) > 1:
            charts.append(_forest(machine, setup, mine, f"cost-{machine.env_id}-{i}"))
    return charts


def what(arm: Arm, schedule: str = "") -> str:
    """What of an arm is in FP8, in words; `schedule` is the precision schedule of its set-up.

    >>> what(Arm("tensorwise", variant="only_grad_output")), what(Arm("rowwise", variant="warmup"))
    ('only operand grad_output, emulated', 'all, after a warm-up without FP8')
    """
    if arm.recipe == CONTROL:
        return {EPS: "nothing; weights perturbed by 1e-4", OTHER: "nothing; other seeds"}.get(
            arm.variant, "nothing"
        )
    if arm.variant in ONLY_OPERAND:
        return f"only operand {ONLY_OPERAND[arm.variant]}, emulated"
    if arm.variant in ONLY_GEMM:
        return f"only GEMM {ONLY_GEMM[arm.variant]}, emulated"
    if arm.variant in GRAD_FORMAT:
        return f"all, gradients in {GRAD_FORMAT[arm.variant]}, emulated"
    return {
        "": f"all, by the schedule {schedule}" if schedule else "all",
        EPS: "all; weights perturbed by 1e-4",
        GOLDEN: "all, emulated",
        WARMUP: "all, after a warm-up without FP8",
        COOLDOWN: "all, before a cool-down without FP8",
        NEGATIVE: "all, broken on purpose",
    }.get(arm.variant, arm.variant)


@styled
def _forest(machine: Machine, setup: Setup, verdicts: list[ArmVerdict], key: str) -> Chart:
    drawn = sheet(key, 0.9 + 0.27 * len(verdicts), grid="x")
    axes = drawn.axes
    limit = 100 * MARGIN
    axes.axvspan(-limit, limit, color=BAND, linewidth=0, label=f"margin, {limit:g} %")
    axes.axvline(0, color=MUTED, linewidth=0.6)
    places = np.arange(len(verdicts))[::-1]
    inside = [1.3 * limit]
    for shift, (name, title), fill in zip((0.14, -0.14), GAPS.items(), ("full", "none"), strict=True):
        gates = [_gap(v, name) for v in verdicts]
        near = [
            (y, g, v.fields)
            for y, g, v in zip(places, gates, verdicts, strict=True)
            if g is not None and abs(g.effect) <= FAR
        ]
        if not near:
            continue
        x = np.array([100 * g.effect for _, g, _ in near])
        wings = (
            np.array([[g.effect - g.low for _, g, _ in near], [g.high - g.effect for _, g, _ in near]]) * 100
        )
        for at, wing, (y, _, arm) in zip(x, wings.T, near, strict=True):
            style = look(machine, arm) | {"fillstyle": fill}
            axes.errorbar(at, y + shift, xerr=wing[:, None], **style, linewidth=1.1, capsize=2.0)
        axes.plot([], [], "o", color=INK, fillstyle=fill, label=title)
        inside += [float(v) for v in (np.abs(x) + wings.max(axis=0))]
    edge = 1.08 * min(max(inside), 100 * FAR)
    for y, v in zip(places, verdicts, strict=True):
        late = _gap(v, "L4")
        if late is not None and abs(late.effect) > FAR:
            axes.text(
                math.copysign(0.98 * edge, late.effect),
                y,
                f"{percent(late.effect)} >" if late.effect > 0 else f"< {percent(late.effect)}",
                ha="right" if late.effect > 0 else "left",
                va="center",
                color=MUTED,
            )
    axes.set_xlim(-edge, edge)
    axes.set_ylim(-0.7, len(verdicts) - 0.3)
    axes.set_yticks(places, [v.arm for v in verdicts])
    axes.set_xlabel("gap (% of the loss); right of 0 is worse")
    signed(axes.xaxis)
    axes.xaxis.set_major_locator(MaxNLocator(9))
    seeds = sorted({g.seeds for v in verdicts if (g := _gap(v, "L4")) is not None})
    counted = text.plural(seeds[-1], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    caption = f"Mean over {counted} of the paired gap to {CONTROL} with its 90 % interval."
    return drawn.chart(f"Cost in loss: {setup_label(machine, setup.axes)}", caption)


def _gap(verdict: ArmVerdict, gate: str) -> GateResult | None:
    """A gap to the control with its interval; None where there is none, or the arm is held against another arm."""
    result = verdict.verdict.gate(gate)
    if verdict.against != CONTROL or result is None or not math.isfinite(result.high - result.low):
        return None
    return result


def _gap_cell(name: str, record: Mapping[str, Any]) -> Cell:
    gate = _gap(record["verdict"], name)
    if gate is None:
        return Cell(text.NONE, None, "muted")
    style = "bad" if gate.low > MARGIN or gate.high < -MARGIN else ""
    interval = f"{percent(gate.low)} to {percent(gate.high)}"
    return Cell(percent(gate.effect), gate.effect, style, interval=interval)


def _seeds(verdict: ArmVerdict) -> int:
    return max((g.seeds for name in GAPS if (g := _gap(verdict, name)) is not None), default=0)


def _outcome(verdict: ArmVerdict) -> Cell:
    outcome = verdict.verdict.outcome
    return Cell(outcome, outcome, "pass" if outcome == verdict.expected else STYLES[outcome])


def _cpu_hours(machine: Machine) -> dict[tuple[str, str], float]:
    """By set-up and arm: hours of CPU of all runs; nothing for rows that do not say, or of a GPU."""
    if machine.is_gpu:
        return {}
    frame = machine.frame
    rows = frame[(frame["suite"] == SUITE) & (frame["metric"] == "loss") & (frame["status"] == "ok")]
    hours: dict[tuple[str, str], float] = {}
    for row in rows.to_dict("records"):
        seconds = parse(row["resolved"]).get("cpu_s")
        if isinstance(seconds, int | float):
            key = _key({k: v for k, v in text.axes_of(row["axes"]).items() if k != "seed"}), row["arm"]
            hours[key] = hours.get(key, 0.0) + seconds / SECONDS_PER_HOUR
    return hours


def _hours(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 0.1 else f"{60 * hours:.1f} minutes"


def _key(axes: Mapping[str, Any]) -> str:
    return str(sorted((k, str(v)) for k, v in axes.items()))
