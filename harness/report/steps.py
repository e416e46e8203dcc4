"""Steps: what a training step of the suite `train` costs by arm, and where its time goes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from harness.advise.advised_arms import FLOOR, advised_arms, verdict
from harness.judge.model_title import title_of
from harness.machine.kernels_by_name import CLASSES
from harness.report.compile_break_even import compilations
from harness.report.drawing import INK, SERIES, Chart, sheet, styled
from harness.report.records import arm_records
from harness.report.table import (
    CASE_ID,
    Cell,
    Column,
    Table,
    axis_column,
    case_cell,
    known,
    make_table,
    number,
    number4,
    resolved_of,
)
from harness.report.tables import ARM, COMPILE_COLUMNS, GAIN, run_column, value_or_status
from harness.report.training_proof import SUITE
from harness.store import text
from harness.store.arm import controls
from harness.store.compare import rows_of
from harness.store.measurement import METRICS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from harness.advise.advised_arms import AdvisedArm
    from harness.report.runs import Machine
    from harness.report.table import Record

MOST_CASES = 6
_STYLES = {"below": "bad", "unclear": "muted", "missing": "muted"}
HATCHES = ("", "//", "..", "xx", "\\\\", "--", "++", "oo")


def steps_tables(machine: Machine) -> list[Table]:
    """One row a (case, arm): speed with its paired ratio, then memory, energy and what compiling costs."""
    records = [{**r} for r in arm_records(machine, SUITE)]
    compiling = compilations(machine)
    for r in records:
        key = (r["run_id"], r["case_id"], r["arm"])
        resolved = resolved_of(r)
        tokens = resolved.get("tokens_per_step")
        if r["status"] == "ok" and known(tokens) and tokens:
            r["tokens_per_s"] = tokens * (resolved.get("ranks") or 1) / (r["value"] * 1e-3)
        expected = resolved.get("prediction")
        if isinstance(expected, dict) and expected.get("speedup"):
            value, low, high = expected["speedup"]
            r |= {"predicted_speedup": value, "predicted_interval": text.interval(low, high)}
        r |= {k: v for k, v in compiling.get(key, {}).items() if k not in ("suite", "axes")}
    constant = machine.constant_axes(SUITE)
    axes = [text.axes_of(r["axes"]) for r in records]
    names = [n for n in sorted({n for a in axes for n in a}) if len({str(a.get(n)) for a in axes}) > 1]
    # Of a single case no axis varies: all of them are said.
    fixed = text.axes_said(axes[0], sorted(constant) or sorted(axes[0])) if axes else ""
    titles = list(dict.fromkeys(title_of(r) for r in records if r["status"] in ("ok", "partial")))
    ran = (
        f" Trained: {'; '.join(titles[:MOST_CASES])}{'; and more' if len(titles) > MOST_CASES else ''}."
        if titles
        else ""
    )
    lead = [*run_column(records), *map(axis_column, names), ARM]
    said = (f"All rows: {fixed}." if fixed else "") + ran
    tables = [make_table(f"train-speed-{machine.env_id}", [*lead, *_SPEED], records, said)]
    said = "Other costs of the same steps."
    cost = make_table(f"train-cost-{machine.env_id}", [*lead, *_COST], records, said)
    return [*tables, cost] if len(cost.columns) > len(lead) else tables


def advised_table(machine: Machine) -> Table:
    """Arms that converted what was advised, against the bar that no model may lose by the advice."""
    arms = advised_arms(machine.frame, machine.ratios)
    constant = machine.constant_axes(SUITE)

    def speedup(a: AdvisedArm) -> Cell:
        interval = text.interval(a.low, a.high) if a.outcome != "missing" else ""
        return Cell(text.ratio(a.speedup), a.speedup, _STYLES.get(a.outcome, ""), interval=interval)

    def predicted(a: AdvisedArm) -> Cell:
        is_control = a.layers and math.isnan(a.predicted)
        return Cell("its control" if is_control else text.ratio(a.predicted), a.predicted)

    columns = (
        Column("case", lambda a: Cell(text.case_label(a.axes, constant), a.model)),
        Column("arm", "arm"),
        Column("against", "baseline"),
        number("speedup", speedup),
        number("predicted", predicted),
        number(
            "layers in FP8",
            lambda a: Cell(f"{a.converted} of {a.layers}" if a.layers else text.NONE, a.converted),
        ),
        Column(
            f"not below {FLOOR:g}",
            lambda a: Cell(a.outcome, a.outcome, _STYLES.get(a.outcome, ""), text.reason(a.reason)),
            "holds or below: the whole interval is on that side of the bar",
        ),
    )
    caption = f"{verdict(arms)}." if arms else ""
    return make_table(f"advised-{machine.env_id}", columns, arms, caption, sortable=False)


def traces_table(machine: Machine) -> Table:
    """The traces that were asked for: which steps of which arm, and the file in the run's folder."""
    frame = machine.frame
    records: dict[tuple[str, str, str], Record] = {}
    for r in rows_of(frame[(frame["suite"] == SUITE) & ~controls(frame)]):
        if resolved_of(r).get("trace"):
            records.setdefault((r["run_id"], r["case_id"], r["arm"]), r)
    runs = list(dict.fromkeys(run for run, _, _ in records))
    constant = machine.constant_axes(SUITE)
    several = len({case for _, case, _ in records}) > 1
    columns = [
        *([Column("run", "run_id")] if len(runs) > 1 else []),
        *([Column("case", lambda r: case_cell(r, constant))] if several else []),
        ARM,
        Column("steps", lambda r: " to ".join(map(str, resolved_of(r).get("trace_steps", ())))),
        Column("trace", lambda r: str(resolved_of(r)["trace"])),
    ]
    where = f"the folder of run {runs[0]}" if len(runs) == 1 else "the folders of their runs"
    said = f"Traces, gzipped, in {where} on the machine that measured; Perfetto opens them."
    return make_table(f"traces-{machine.env_id}", columns, list(records.values()), said, sortable=False)


@styled
def breakdown(machine: Machine) -> list[Chart]:
    """Time of a step by class of kernels, one bar an arm; classes differ in hatch as well as colour."""
    frame = machine.frame
    own = frame[(frame["suite"] == SUITE) & (frame["metric"] == "kernel_time_ms") & (frame["status"] == "ok")]
    cases: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    labels: dict[tuple[str, str], str] = {}
    constant = machine.constant_axes(SUITE)
    for r in rows_of(own[own["part"] != ""]):
        key = (r["run_id"], r["case_id"])
        cases.setdefault(key, {}).setdefault(r["arm"], {})[r["part"]] = r["value"]
        labels[key] = text.case_label(text.axes_of(r["axes"]), constant)
    if not cases:
        return []
    shown = dict(list(cases.items())[:MOST_CASES])
    seen = {name for arms in shown.values() for classes in arms.values() for name in classes}
    order = [name for name in (*CLASSES, *sorted(seen - CLASSES.keys())) if name in seen]
    counts = [len(arms) for arms in shown.values()]
    height = 0.5 + sum(0.75 + 0.31 * n for n in counts)
    # A scale for each case: a small model's bars would vanish beside a large one's.
    ratios = [1.2 + n for n in counts]
    drawn = sheet(f"breakdown-{machine.env_id}", height, 1, len(shown), grid="x", height_ratios=ratios)
    for axes, (key, arms) in zip(drawn.panels, shown.items(), strict=True):
        _bars(axes, arms, order)
        axes.set_title(labels[key] if len(shown) > 1 else "")
    for i, name in enumerate(order):
        drawn.axes.barh([0], [0], color=SERIES[i % 8], label=name, **_pattern(i))
    drawn.panels[-1].set_xlabel("time of one profiled step (ms)")
    more = f" The first {MOST_CASES} of {len(cases)} cases." if len(cases) > MOST_CASES else ""
    what = (
        "Device time of kernels by class, by their names; kernels that overlap count twice."
        if machine.is_gpu
        else "Own time of a CPU's operators by class, by their names: no kernel of a GPU is in it."
    )
    caption = f"{what}{more} A profiled step takes longer than a timed one."
    return [drawn.chart("Where a step's time goes", caption)]


def _bars(axes: Axes, arms: Mapping[str, Mapping[str, float]], order: Sequence[str]) -> None:
    """One stacked bar an arm, its sum at the end."""
    rows = range(len(arms))
    left = [0.0] * len(arms)
    for i, name in enumerate(order):
        widths = [classes.get(name, 0.0) for classes in arms.values()]
        axes.barh(rows, widths, left=left, height=0.62, color=SERIES[i % 8], **_pattern(i))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, total in enumerate(left):
        axes.annotate(f"{text.number(total)} ms", (total, y), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(rows, list(arms))
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.set_xlim(0, 1.14 * max(left) or 1.0)


def _pattern(i: int) -> dict[str, Any]:
    return {"hatch": HATCHES[i % 8], "edgecolor": INK, "linewidth": 0.4}


def _predicted(record: Record) -> Cell:
    value = record.get("predicted_speedup")
    shown = text.ratio(math.nan if value is None else value)
    return Cell(shown, value, interval=record.get("predicted_interval", ""))


_SPEED = (
    number(
        "tokens/s",
        "tokens_per_s",
        hint="tokens of a step, of all ranks, / its median time",
        needs="tokens_per_s",
    ),
    number("step (ms)", value_or_status, number4, "median of all samples"),
    GAIN,
    number(
        "predicted speedup",
        _predicted,
        hint="by the model of a step, with its 95 % interval: beside what was measured over ranks",
        needs="predicted_speedup",
    ),
    CASE_ID,
)
_COST = (
    *(
        number(title, metric, show, METRICS[metric].meaning, metric)
        for title, metric, show in (
            ("peak memory", "peak_memory_bytes", text.bytes_),
            ("reserved", "reserved_memory_bytes", text.bytes_),
            ("predicted", "predicted_memory_bytes", text.bytes_),
            ("J/token", "joules_per_token", text.number),
        )
    ),
    *COMPILE_COLUMNS,
)
