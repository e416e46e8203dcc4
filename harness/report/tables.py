"""Tables: rows of the store as cells of text, each with the value that it sorts by."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.report.compile_break_even import FACTS, compilations
from harness.report.records import arm_records, repeated
from harness.report.table import (
    CASE_ID,
    NUMBERS,
    Cell,
    Column,
    Grid,
    Record,
    Table,
    axis_column,
    case_cell,
    identity,
    known,
    make_table,
    number,
    number4,
    quantile,
    resolved_of,
    status_cell,
)
from harness.store import text
from harness.store.compare import MODES, SECONDS, rows_of, square
from harness.store.measurement import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from harness.report.runs import Machine


def suite_table(machine: Machine, suite: str) -> Table:
    """One row a (case, arm, regime) of a suite: what it cost, what it gained and how exact it is.

    Columns that no row can fill are left out; axes that are the same in every row stand in the caption.
    """
    records: list[Record] = [*arm_records(machine, suite)]
    axes = [text.axes_of(r["axes"]) for r in records]
    names = sorted(
        {name for a in axes for name in a}, key=lambda n: (n in NUMBERS, n in text.SIZES, "MKN".find(n), n)
    )
    constant = machine.constant_axes(suite)
    varying = [n for n in names if n not in constant]
    regimes = len({r["regime"] for r in records} - {""}) > 1
    columns = [
        *run_column(records),
        *(axis_column(name) for name in varying),
        ARM,
        *([Column("regime", "regime")] if regimes else []),
        *_SUITE_COLUMNS,
    ]
    caption = text.axes_said(axes[0] if axes else {}, (n for n in names if n in constant))
    return make_table(
        f"{suite}-{machine.env_id}", columns, records, f"All rows: {caption}." if caption else ""
    )


def run_column(records: Sequence[Record]) -> list[Column]:
    """The column that names the run, where several runs measured the same."""
    return [identity("run", "run_id")] if repeated(records) else []


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
            columns = [
                Column("precision", "precision"),
                *(number(f"{mode} (ms)", partial(_square_cell, mode)) for mode in MODES),
            ]
            key = f"square-{run_id}-{case_id}-{regime}"
            out.append(Grid(name, make_table(key, columns, records, sortable=False)))
    return out


def troubles(machine: Machine) -> Table:
    """Every row that failed or was skipped, gathered by metric and reason: nothing is hidden, nothing said twice."""
    bad = machine.frame[machine.frame["status"] != "ok"]
    groups: dict[tuple[str, ...], list[Record]] = {}
    for r in rows_of(bad):
        groups.setdefault((r["status"], r["suite"], r["metric"], text.reason(r["reason"])), []).append(r)
    records = []
    for (status, suite, metric, reason), members in sorted(groups.items()):
        constant = machine.constant_axes(suite)
        arms = list(dict.fromkeys(str(m["arm"]) for m in members))
        labels = list(dict.fromkeys(text.case_label(text.axes_of(m["axes"]), constant) for m in members))
        ids = list(dict.fromkeys(str(m["case_id"]) for m in members))
        records.append(
            {
                "status": status, "suite": suite, "metric": metric, "reason": reason,
                "arms": Cell(", ".join(arms), len(arms)),
                "cases": Cell(text.some(labels), len(labels), note=text.some(ids, 3)),
            }
        )  # fmt: skip
    fields = ("suite", "metric", "reason", "arms", "cases")
    columns = [Column("status", status_cell), *(Column(field, field) for field in fields)]
    return make_table(f"troubles-{machine.env_id}", columns, records)


def compile_times(machine: Machine) -> Table:
    """First call of each compiled arm, apart from every other time, and when it has paid."""
    records = [about | {"arm": arm, "run_id": run} for (run, _, arm), about in compilations(machine).items()]
    columns = [
        Column("suite", "suite"),
        Column("case", lambda r: case_cell(r, machine.constant_axes(r["suite"]))),
        Column("arm", "arm"),
        *COMPILE_COLUMNS,
    ]
    return make_table(f"compile-{machine.env_id}", columns, records)


def every_row(machine: Machine) -> Table:
    """Every row of a whole that is stored, controls included: the samples aggregated, none trimmed.

    Rows of a part (a layer, a class of kernels) can be thousands; they have tables of their own.
    """
    cases = machine.frame.drop_duplicates(["suite", "axes"])
    several = bool(cases["suite"].duplicated().any())  # else an id alone tells its case
    axes = Column("axes", lambda r: case_cell(r, machine.constant_axes(r["suite"])))
    columns = [
        CASE_ID,
        Column("suite", "suite"),
        *([axes] if several else []),
        *(Column(field, field) for field in ("arm", "metric", "regime")),
        number("value", value_or_status, number4, "median of the samples; of a curve the last"),
        number("q1", lambda r: _spread(r, 0.25), number4),
        number("q3", lambda r: _spread(r, 0.75), number4),
        number("min", lambda r: _spread(r, 0.0), number4),
        number("samples", lambda r: len(r["samples"]), str),
        Column("unit", "unit"),
    ]
    whole = [r for r in machine.rows if not r["part"]]
    named = (f"{r['suite']}: {text.case_label(text.axes_of(r['axes']))}." for r in rows_of(cases))
    caption = "" if several else " ".join(named)
    return make_table(f"rows-{machine.env_id}", [*run_column(whole), *columns], whole, caption)


def _spread(record: Record, q: float) -> float | None:
    """A quantile of repeated samples; the points of a curve are not such."""
    metric = METRICS.get(record["metric"])
    curve = metric is not None and metric.series and len(record["rounds"]) > 0
    return None if curve else quantile(record["samples"], q)


def arm_cell(record: Record) -> Cell:
    """The arm; one that had to be emulated says so, since its time is none of FP8's."""
    return Cell(record["arm"], record["arm"], note="emulated" if resolved_of(record).get("emulated") else "")


ARM = Column("arm", arm_cell)


def value_or_status(record: Record) -> Any:
    """The median; of a row without one its status."""
    return record["value"] if record["status"] == "ok" else status_cell(record)


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


def _square_cell(mode: str, record: Record) -> Cell:
    status, why = record[f"{mode}_status"], record[f"{mode}_note"]
    if status != "ok":
        return Cell(status or why, None, "bad" if status == "failed" else "muted", why if status else "")
    time, speedup, verdict = record[f"{mode}_ms"], record[f"{mode}_speedup"], record[f"{mode}_verdict"]
    if not known(speedup):
        return Cell(text.number(time, 4), time)
    low, high = record[f"{mode}_low"], record[f"{mode}_high"]
    note = text.ratio(speedup) + (f" ({text.interval(low, high)})" if known(low) else "") + f" {verdict}"
    return Cell(text.number(time, 4), time, verdict, note)


def _stored(metric: str, title: str, show: Callable[[float], str] = text.number) -> Column:
    """The column of a metric, with its meaning."""
    return number(title, lambda r: r.get(metric), show, METRICS[metric].meaning, metric)


def _pays(calls: float | None) -> Any:
    return Cell("never", calls, "bad") if calls == math.inf else calls


_PAYS_HINT = "cold compile time / what a call gains over the same arm in eager mode"
COMPILE_COLUMNS = (
    number("compile cold (s)", "cold_s", hint="first call, empty caches", needs="cold_s"),
    number("warm (s)", "warm_s", hint="first call again, from filled caches", needs="warm_s"),
    number("pays after (calls)", lambda r: _pays(r.get("cold_pays")), text.count, _PAYS_HINT, "cold_pays"),
    *(
        number(fact.removeprefix("compile_").replace("_", " "), fact, text.count, needs=fact)
        for fact in FACTS
    ),
)
GAIN = number(
    "speedup",
    gain_cell,
    hint="baseline time / this time, with its 95 % interval over rounds",
    needs="speedup",
)
_SUITE_COLUMNS = (
    number("time (ms)", _time_cell, hint="median of all samples"),
    number("TFLOP/s", "tflops", hint="declared FLOPs / median time", needs="tflops"),
    number("GB/s", "gb_per_s", hint="logical bytes / median time, 1e9 a second", needs="gb_per_s"),
    number(
        "of copy",
        "copy_share",
        text.percent,
        "share of the copy bandwidth measured on this machine at that size",
        "copy_share",
    ),
    number(
        "of peak",
        peak_cell,
        hint="share of the published dense peak: FLOPs of each dtype against its own, else bytes against bandwidth",
        needs="peak_known",
    ),
    GAIN,
    _stored("sqnr_db", "SQNR (dB)"),
    _stored("accum_sqnr_db", "exact sum (dB)"),
    _stored("fp22_sqnr_db", "fp22 sum (dB)"),
    _stored("fp22_promote128_sqnr_db", "promoted (dB)"),
    _stored("grad_input_sqnr_db", "grad_input (dB)"),
    _stored("grad_weight_sqnr_db", "grad_weight (dB)"),
    _stored("sqnr_row_min_db", "worst row (dB)"),
    _stored("bulk_sqnr_db", "bulk (dB)"),
    _stored("underflow_frac", "underflow", text.percent),
    _stored("saturated_frac", "saturated", text.percent),
    _stored("cast_bytes_per_elem", "cast (B/element)"),
    _stored("saved_bytes_per_elem", "saved (B/element)"),
    _stored("mismatches", "mismatches", text.count),
    CASE_ID,
)
