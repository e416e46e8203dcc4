"""Tables: rows of the store as cells of text, each with the value that it sorts by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.report import product_alone
from harness.report.paying import FACTS, compilations
from harness.report.records import arm_records, repeated
from harness.report.table import (
    NUMBERS,
    Cell,
    Column,
    Grid,
    Record,
    Spec,
    Table,
    axis_spec,
    case_cell,
    count_cell,
    given,
    known,
    make_table,
    number_cell,
    quantile,
    resolved_of,
    share_cell,
    status_cell,
)
from harness.store import text
from harness.store.compare import MODES, SECONDS, rows_of, square
from harness.store.measurement import METRICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.runs import Machine


def suite_table(machine: Machine, suite: str) -> Table:
    """One row a (case, arm, regime) of a suite: what it cost, what it gained and how exact it is.

    Columns that no row can fill are left out; axes that are the same in every row stand in the caption.
    """
    records: list[Record] = [*arm_records(machine, suite)]
    if suite == product_alone.LAYERS:
        records = product_alone.added(machine, records)
    axes = [text.axes_of(r["axes"]) for r in records]
    names = sorted(
        {name for a in axes for name in a}, key=lambda n: (n in NUMBERS, n in text.SIZES, "MKN".find(n), n)
    )
    constant = machine.constant_axes(suite)
    varying = [n for n in names if n not in constant]
    specs = [*run_column(records), *(axis_spec(name) for name in varying)]
    at = len(specs) + 1  # after the arm
    specs += [s for s in _SUITE_COLUMNS if not s.needs or any(given(r.get(s.needs)) for r in records)]
    if len({r["regime"] for r in records} - {""}) > 1:
        specs.insert(at, Spec("regime", lambda r: Cell(r["regime"], r["regime"]), numeric=False))
    caption = text.axes_said(axes[0] if axes else {}, (n for n in names if n in constant))
    return make_table(f"{suite}-{machine.env_id}", specs, records, f"All rows: {caption}." if caption else "")


def run_column(records: Sequence[Record]) -> list[Spec]:
    """The column that names the run, where several runs measured the same."""
    return (
        [Spec("run", lambda r: Cell(r["run_id"], r["run_id"], "id"), numeric=False)]
        if repeated(records)
        else []
    )


def squares(machine: Machine, most: int = 40) -> list[Grid]:
    """One 2x2 square (a row a precision, a column a mode) for each case and regime, under the case's name.

    The first `most` of them: the table of the suite has all.
    """
    timed = machine.frame[(machine.frame["suite"] == "linear") & (machine.frame["metric"] == "time_ms")]
    cases = timed[["run_id", "case_id"]].drop_duplicates().head(most)
    found = square(timed.merge(cases, on=["run_id", "case_id"]))
    out = []
    if len(found):
        for (run_id, case_id, regime), group in found.groupby(["run_id", "case_id", "regime"], sort=False):
            records = rows_of(group)
            axes = text.axes_of(records[0]["axes"])
            name = text.case_label(axes, machine.constant_axes("linear")) + (
                f", {regime}" if regime == "sustained" else ""
            )
            rows = tuple((Cell(r["precision"]), *(_square_cell(r, mode) for mode in MODES)) for r in records)
            columns = (Column("precision"), *(Column(f"{mode} (ms)", numeric=True) for mode in MODES))
            key = f"square-{run_id}-{case_id}-{regime}"
            out.append(Grid(name, Table(key, columns, rows, sortable=False)))
    return out


def troubles(machine: Machine) -> Table:
    """Every row that failed or was skipped, gathered by metric and reason: nothing is hidden, nothing said twice."""
    bad = machine.frame[machine.frame["status"] != "ok"]
    groups: dict[tuple[str, ...], list[Record]] = {}
    for r in rows_of(bad):
        groups.setdefault((r["status"], r["suite"], r["metric"], text.reason(r["reason"])), []).append(r)
    rows = []
    for (status, suite, metric, reason), members in sorted(groups.items()):
        constant = machine.constant_axes(suite)
        arms = list(dict.fromkeys(str(m["arm"]) for m in members))
        labels = list(dict.fromkeys(text.case_label(text.axes_of(m["axes"]), constant) for m in members))
        ids = list(dict.fromkeys(str(m["case_id"]) for m in members))
        rows.append(
            (
                Cell(status, status, "bad" if status == "failed" else "muted"),
                Cell(suite, suite),
                Cell(metric, metric),
                Cell(reason, reason),
                Cell(", ".join(arms), len(arms)),
                Cell(text.some(labels), len(labels), note=text.some(ids, 3)),
            )
        )
    titles = ("status", "suite", "metric", "reason", "arms", "cases")
    return Table(f"troubles-{machine.env_id}", tuple(Column(t) for t in titles), tuple(rows))


def compile_times(machine: Machine) -> Table:
    """First call of each compiled arm, apart from every other time, and when it has paid."""
    records = [about | {"arm": arm, "run_id": run} for (run, _, arm), about in compilations(machine).items()]
    specs = [
        Spec("suite", lambda r: Cell(r["suite"], r["suite"]), numeric=False),
        Spec("case", lambda r: case_cell(r, machine.constant_axes(r["suite"])), numeric=False),
        Spec("arm", lambda r: Cell(r["arm"], r["arm"]), numeric=False),
        *(s for s in COMPILE_COLUMNS if any(known(r.get(s.needs)) for r in records)),
    ]
    return make_table(f"compile-{machine.env_id}", specs, records)


def every_row(machine: Machine) -> Table:
    """Every row of a whole that is stored, controls included: the samples aggregated, none trimmed.

    Rows of a part (a layer, a class of kernels) can be thousands; they have tables of their own.
    """
    cases = machine.frame.drop_duplicates(["suite", "axes"])
    several = bool(cases["suite"].duplicated().any())  # else an id alone tells its case
    specs = [
        Spec("case", lambda r: Cell(r["case_id"], r["case_id"], "id"), numeric=False),
        Spec("suite", lambda r: Cell(r["suite"], r["suite"]), numeric=False),
        *(
            [Spec("axes", lambda r: case_cell(r, machine.constant_axes(r["suite"])), numeric=False)]
            if several
            else []
        ),
        Spec("arm", lambda r: Cell(r["arm"], r["arm"]), numeric=False),
        Spec("metric", lambda r: Cell(r["metric"], r["metric"]), numeric=False),
        Spec("regime", lambda r: Cell(r["regime"], r["regime"]), numeric=False),
        Spec(
            "value",
            lambda r: number_cell(r["value"], 4) if r["status"] == "ok" else status_cell(r),
            "median of the samples; of a curve the last",
        ),
        Spec("q1", lambda r: number_cell(_spread(r, 0.25), 4)),
        Spec("q3", lambda r: number_cell(_spread(r, 0.75), 4)),
        Spec("min", lambda r: number_cell(_spread(r, 0.0), 4)),
        Spec("samples", lambda r: Cell(str(len(r["samples"])), len(r["samples"]))),
        Spec("unit", lambda r: Cell(r["unit"], r["unit"]), numeric=False),
    ]
    whole = [r for r in machine.rows if not r["part"]]
    named = (f"{r['suite']}: {text.case_label(text.axes_of(r['axes']))}." for r in rows_of(cases))
    caption = "" if several else " ".join(named)
    return make_table(f"rows-{machine.env_id}", [*run_column(whole), *specs], whole, caption)


def _spread(record: Record, q: float) -> float | None:
    """A quantile of repeated samples; the points of a curve are not such."""
    metric = METRICS.get(record["metric"])
    curve = metric is not None and metric.series and len(record["rounds"]) > 0
    return None if curve else quantile(record["samples"], q)


def arm_cell(record: Record) -> Cell:
    """The arm; one that had to be emulated says so, since its time is none of FP8's."""
    return Cell(record["arm"], record["arm"], note="emulated" if resolved_of(record).get("emulated") else "")


def _time_cell(record: Record) -> Cell:
    if record["status"] != "ok":
        return status_cell(record)
    shown = text.number(record["value"], 4) + ("" if record["unit"] == "ms" else f" {record['unit']}")
    return Cell(shown, record["value"] * SECONDS[record["unit"]])


def peak_cell(record: Record) -> Cell:
    """Share of the peak; a share that is impossible at the measured clock says so."""
    if "peak_known" not in record:
        return Cell("", None)
    over = record.get("over_peak", False)
    note = "above the peak at the measured clock" if over else ""
    return Cell(text.percent(record["peak_share"]), record["peak_share"], "bad" if over else "", note)


def gain_cell(record: Record) -> Cell:
    """The paired ratio against the baseline, with its interval."""
    verdict, speedup = record.get("verdict"), record.get("speedup")
    if not verdict:
        return Cell("", None)
    if not known(speedup):
        return Cell(text.NONE, None, "muted")
    return Cell(
        text.ratio(speedup),
        speedup,
        verdict,
        interval="" if not known(record["low"]) else text.interval(record["low"], record["high"]),
    )


def _square_cell(record: Record, mode: str) -> Cell:
    note = record[f"{mode}_note"]
    if note:
        status, _, reason = note.partition(": ")
        return Cell(status, None, "bad" if status == "failed" else "muted", reason)
    time, speedup, verdict = record[f"{mode}_ms"], record[f"{mode}_speedup"], record[f"{mode}_verdict"]
    if not known(speedup):
        return Cell(text.number(time, 4), time)
    low, high = record[f"{mode}_low"], record[f"{mode}_high"]
    note = text.ratio(speedup) + (f" ({text.interval(low, high)})" if known(low) else "") + f" {verdict}"
    return Cell(text.number(time, 4), time, verdict, note)


def _figure_spec(metric: str, title: str) -> Spec:
    return Spec(title, lambda r: number_cell(r.get(metric)), METRICS[metric].meaning, needs=metric)


def _compile_spec(fact: str) -> Spec:
    title = fact.removeprefix("compile_").replace("_", " ")
    return Spec(title, lambda r: count_cell(r.get(fact)), needs=fact)


def _pays_cell(calls: float | None) -> Cell:
    if not known(calls):
        return Cell("", None)
    return Cell("never", calls, "bad") if calls == math.inf else Cell(text.count(calls), calls)


COMPILE_COLUMNS = (
    Spec(
        "compile cold (s)", lambda r: number_cell(r.get("cold_s")), "first call, empty caches", needs="cold_s"
    ),
    Spec(
        "warm (s)",
        lambda r: number_cell(r.get("warm_s")),
        "first call again, from filled caches",
        needs="warm_s",
    ),
    Spec(
        "pays after (calls)",
        lambda r: _pays_cell(r.get("cold_pays")),
        "cold compile time / what a call gains over the same arm in eager mode",
        needs="cold_pays",
    ),
    *map(_compile_spec, FACTS),
)
_SUITE_COLUMNS = (
    Spec("arm", arm_cell, numeric=False),
    Spec("time (ms)", _time_cell, "median of all samples"),
    Spec("TFLOP/s", lambda r: number_cell(r["tflops"]), "declared FLOPs / median time", needs="tflops"),
    Spec(
        "GB/s",
        lambda r: number_cell(r["gb_per_s"]),
        "logical bytes / median time, 1e9 a second",
        needs="gb_per_s",
    ),
    Spec(
        "of copy",
        lambda r: share_cell(r.get("copy_share")),
        "share of the copy bandwidth measured on this machine at that size",
        needs="copy_share",
    ),
    Spec(
        "of peak",
        peak_cell,
        "share of the published dense peak: FLOPs of each dtype against its own, else bytes against bandwidth",
        needs="peak_known",
    ),
    Spec(
        "speedup",
        gain_cell,
        "baseline time / this time, with its 95 % interval over rounds",
        needs="speedup",
    ),
    Spec(
        "products alone",
        product_alone.cell,
        "what the three products of this layer gain without their casts: bf16 time over FP8 time of the same sizes in "
        "suite gemm, operands already cast",
        needs=product_alone.DUE,
    ),
    _figure_spec("sqnr_db", "SQNR (dB)"),
    _figure_spec("accum_sqnr_db", "exact sum (dB)"),
    _figure_spec("fp22_sqnr_db", "fp22 sum (dB)"),
    _figure_spec("fp22_promote128_sqnr_db", "promoted (dB)"),
    _figure_spec("grad_input_sqnr_db", "grad_input (dB)"),
    _figure_spec("grad_weight_sqnr_db", "grad_weight (dB)"),
    _figure_spec("sqnr_row_min_db", "worst row (dB)"),
    _figure_spec("bulk_sqnr_db", "bulk (dB)"),
    Spec(
        "underflow",
        lambda r: share_cell(r.get("underflow_frac")),
        METRICS["underflow_frac"].meaning,
        needs="underflow_frac",
    ),
    Spec(
        "saturated",
        lambda r: share_cell(r.get("saturated_frac")),
        METRICS["saturated_frac"].meaning,
        needs="saturated_frac",
    ),
    _figure_spec("cast_bytes_per_elem", "cast (B/element)"),
    _figure_spec("saved_bytes_per_elem", "saved (B/element)"),
    Spec(
        "mismatches",
        lambda r: count_cell(r.get("mismatches")),
        METRICS["mismatches"].meaning,
        needs="mismatches",
    ),
    Spec("case", lambda r: Cell(r["case_id"], r["case_id"], "id"), numeric=False),
)
