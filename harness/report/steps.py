"""Steps: what a training step of the suite `train` costs by arm, and where its time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from harness.compare import rows_of
from harness.measurement import METRICS
from harness.report import text
from harness.report.drawing import INK, SERIES, STYLE, Chart, legend, svg
from harness.report.table import (
    Cell,
    Spec,
    Table,
    axis_spec,
    known,
    make_table,
    number_cell,
    resolved_of,
    status_cell,
    word_cell,
)
from harness.report.tables import arm_cell, arm_records, gain_cell, peak_cell

if TYPE_CHECKING:
    from harness.report.runs import Machine
    from harness.report.table import Record

SUITE = "train"
MOST_BARS = 24
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "----", "++++", "oooo")


def steps_table(machine: Machine) -> Table:
    """One row a (case, arm): speed with its paired ratio, memory, energy and what compiling costs."""
    records: list[dict[str, Any]] = arm_records(machine, SUITE)
    compiling = _compile_seconds(machine)
    time_of = {(r["run_id"], r["case_id"], r["arm"]): r["value"] for r in records if r["status"] == "ok"}
    for r in records:
        key = (r["run_id"], r["case_id"], r["arm"])
        resolved = resolved_of(r)
        tokens = resolved.get("tokens_per_step")
        if r["status"] == "ok" and known(tokens) and tokens:
            r["tokens_per_s"] = tokens / (r["value"] * 1e-3)
        r |= compiling.get(key, {})
        eager = time_of.get((*key[:2], r["arm"].removesuffix("_compile") + "_eager"))
        if known(r.get("cold_s")) and r["status"] == "ok" and eager is not None:
            gain_s = (eager - r["value"]) * 1e-3
            r["pays_after"] = r["cold_s"] / gain_s if gain_s > 0 else float("inf")
    constant = machine.constant_axes(SUITE)
    axes = [text.axes_of(r["axes"]) for r in records]
    names = sorted({n for a in axes for n in a} - constant)
    fixed = {n: axes[0].get(n) for n in sorted(constant)} if axes else {}
    specs = [axis_spec(n) for n in names if len({str(a.get(n)) for a in axes}) > 1]
    specs += [s for s in _COLUMNS if not s.needs or any(known(r.get(s.needs)) for r in records)]
    said = ", ".join(f"{n} {text.axis_value(v)}" for n, v in fixed.items() if v not in (None, ""))
    return make_table(f"train-{machine.env_id}", specs, records, f"All rows: {said}." if said else "")


@mpl.rc_context(STYLE)
def breakdown(machine: Machine) -> list[Chart]:
    """Device time of a step by class of kernels, one bar an arm; classes differ in hatch as well as colour."""
    frame = machine.frame
    own = frame[(frame["suite"] == SUITE) & (frame["metric"] == "kernel_time_ms") & (frame["status"] == "ok")]
    bars: dict[tuple[str, str, str], dict[str, float]] = {}
    labels: dict[tuple[str, str, str], str] = {}
    constant = machine.constant_axes(SUITE)
    for r in rows_of(own[own["part"] != ""]):
        key = (r["run_id"], r["case_id"], r["arm"])
        bars.setdefault(key, {})[r["part"]] = r["value"]
        case = text.case_label(text.axes_of(r["axes"]), constant)
        labels[key] = f"{r['arm']} {case}" if own["case_id"].nunique() > 1 else r["arm"]
    if not bars:
        return []
    shown = list(bars)[:MOST_BARS]
    classes = sorted(
        {c for b in bars.values() for c in b}, key=lambda c: -sum(b.get(c, 0) for b in bars.values())
    )
    figure = Figure(figsize=(9.5, 0.9 + 0.34 * len(shown)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(shown)
    for i, name in enumerate(classes):
        widths = [bars[k].get(name, 0.0) for k in shown]
        style: Any = {"hatch": HATCHES[i % 8], "edgecolor": INK, "linewidth": 0.4}
        axes.barh(range(len(shown)), widths, left=left, height=0.62, color=SERIES[i % 8], label=name, **style)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, total in enumerate(left):
        axes.text(total, y, f" {text.number(total)} ms", va="center", fontsize=8.5)
    axes.set_yticks(range(len(shown)), [labels[k] for k in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max(left))
    axes.set_xlabel("device time of one profiled step (ms)")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    legend(figure, axes)
    more = f" The first {MOST_BARS} of {len(bars)}." if len(bars) > MOST_BARS else ""
    caption = f"Kernels by class, by their names; kernels that overlap count twice.{more} A profiled step is slower than a timed one."
    name = f"breakdown-{machine.env_id}"
    return [Chart(name, "Where a step's time goes", svg(figure, name), caption)]


def _compile_seconds(machine: Machine) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Seconds of the first call with cold and with warm caches, and how many graphs it made, by (run, case, arm)."""
    frame = machine.frame
    rows = frame[(frame["suite"] == SUITE) & (frame["metric"] == "compile_s") & (frame["status"] == "ok")]
    out: dict[tuple[str, str, str], dict[str, Any]] = {}
    for r in rows_of(rows):
        found = out.setdefault((r["run_id"], r["case_id"], r["arm"]), {})
        resolved = resolved_of(r)
        warm = r["part"] == "warm" or resolved.get("compile_cache") == "warm"
        found["warm_s" if warm else "cold_s"] = r["value"]
        if known(resolved.get("compile_graphs")):
            found["graphs"] = resolved["compile_graphs"]
    return out


def _time_cell(record: Record) -> Cell:
    return number_cell(record["value"], 4) if record["status"] == "ok" else status_cell(record)


def _bytes_cell(value: float | None) -> Cell:
    return Cell(text.bytes_(value), value) if known(value) else Cell("", None)


def _pays_cell(record: Record) -> Cell:
    steps = record.get("pays_after")
    if not known(steps):
        return Cell("", None)
    return Cell("never", steps, "bad") if steps == float("inf") else Cell(text.count(steps), steps)


_COLUMNS = (
    Spec("arm", arm_cell, numeric=False),
    Spec(
        "tokens/s",
        lambda r: number_cell(r.get("tokens_per_s")),
        "tokens of a step / its median time",
        needs="tokens_per_s",
    ),
    Spec("step (ms)", _time_cell, "median of all samples"),
    Spec(
        "speedup", gain_cell, "baseline time / this time, with its 95 % interval over rounds", needs="speedup"
    ),
    Spec("TFLOP/s", lambda r: number_cell(r["tflops"]), "FLOPs of the GEMMs / median time", needs="tflops"),
    Spec(
        "MFU (mixed)",
        peak_cell,
        "share of the published dense peak, the FLOPs of each dtype against its own: sum of F_d / P_d over the step",
        needs="peak_share",
    ),
    Spec(
        "peak memory",
        lambda r: _bytes_cell(r.get("peak_memory_bytes")),
        METRICS["peak_memory_bytes"].meaning,
        needs="peak_memory_bytes",
    ),
    Spec(
        "reserved",
        lambda r: _bytes_cell(r.get("reserved_memory_bytes")),
        METRICS["reserved_memory_bytes"].meaning,
        needs="reserved_memory_bytes",
    ),
    Spec(
        "predicted",
        lambda r: _bytes_cell(r.get("predicted_memory_bytes")),
        METRICS["predicted_memory_bytes"].meaning,
        needs="predicted_memory_bytes",
    ),
    Spec(
        "J/token",
        lambda r: number_cell(r.get("joules_per_token")),
        METRICS["joules_per_token"].meaning,
        needs="joules_per_token",
    ),
    Spec(
        "compile cold (s)",
        lambda r: number_cell(r.get("cold_s")),
        "first call with empty caches",
        needs="cold_s",
    ),
    Spec(
        "warm (s)",
        lambda r: number_cell(r.get("warm_s")),
        "first call again, from filled caches",
        needs="warm_s",
    ),
    Spec(
        "pays after (steps)",
        _pays_cell,
        "cold compile time / what a step gains over the same arm in eager mode",
        needs="pays_after",
    ),
    Spec(
        "graph breaks",
        lambda r: word_cell(r["graphs"] - 1 if known(r.get("graphs")) else None),
        needs="graphs",
    ),
    Spec("case", lambda r: Cell(r["case_id"], r["case_id"], "id"), numeric=False),
)
