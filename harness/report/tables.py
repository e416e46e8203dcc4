"""Tables: the rows of any suite as cells of text, each with the value that it sorts by, and their sections."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.judge import gathered
from harness.report.drawing import EDGES, evenly
from harness.report.records import SQNR, arm_records, compilations, key_of, numerics_by_arm
from harness.report.table import (
    COMPUTED,
    NA,
    Cell,
    Column,
    Grid,
    Record,
    Table,
    axis_columns,
    columns,
    estimate,
    filled,
    known,
    make_table,
    number,
    status_cell,
    table_of,
)
from harness.report.verdicts import extremes, fp8_pairs, geometric_mean, rank, tally
from harness.store import stats, text
from harness.store.case import baseline_of
from harness.store.compare import MODES, PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.records import Worst
    from harness.report.runs import Machine
    from harness.report.table import Row

MOST_SQUARES = 40
MOST_ARMS, MOST_M, MOST_SIDE = 3, 4, 12  # of the maps


def findings(machine: Machine) -> Table:
    """What is probably wrong, with its figures, cause and way out."""
    return table_of(machine, "findings", machine.findings, sortable=False)


def run_column(records: Sequence[Record]) -> list[Column]:
    """The column that names the run, where several runs measured the same."""
    names = ("suite", "case_id", "arm", "regime", "metric", "part")
    several = len({r["run_id"] for r in records}) > 1
    seen = Counter(tuple(r[name] for name in names) for r in records if several)
    return [Column("run", COMPUTED["run"])] if any(count > 1 for count in seen.values()) else []


# FP8 against bf16


def gains(machine: Machine) -> Table:
    """FP8 against bf16 by suite, arm and regime: geometric mean, extremes with their intervals, verdict counts."""
    keys = ("suite", "arm", "baseline", "regime")
    groups = gathered((tuple(p[k] for k in keys), p) for p in fp8_pairs(machine))
    records = []
    for key, own in sorted(groups.items(), key=lambda each: (rank(each[0][0])[0], each[0][3])):
        ends = [
            Cell(
                text.ratio(p["speedup"]),
                float(p["speedup"]),
                p["verdict"],
                p["where"],
                text.interval(p["low"], p["high"]),
            )
            for p in extremes(machine, own)
        ] or [NA]
        mean = geometric_mean(own)
        more = {
            "geometric mean": Cell(text.ratio(mean), mean),
            "slowest pair": ends[0],
            "fastest pair": ends[-1],
        }
        records.append(
            dict(zip(keys, key, strict=True)) | more | {"verdicts": tally(p["verdict"] for p in own)}
        )
    return table_of(machine, "gains", records, sortable=False)


def heat_maps(machine: Machine, suite: str) -> list[Grid]:
    """The speedup over bf16 by M, K and N of a suite: a table for each arm and M, a row for each K, a column for each N.

    Of the isolated regime; none where a single shape was measured. The arms with the largest gain are drawn, compiled
    ones where there are any, since that is how models are trained, and sizes spread evenly where there are too many to draw.
    """
    pairs = [p for p in fp8_pairs(machine) if (p["suite"], p["regime"]) == (suite, "isolated")]
    found = [p for p in pairs if known(p["speedup"])]
    found = [r for r in found if baseline_of(r).mode == "compile"] or found
    sizes_of = [tuple(text.axes_of(r["axes"]).get(name) for name in text.SIZES) for r in found]
    cells = gathered(
        ((r["arm"], sizes), r)
        for r, sizes in zip(found, sizes_of, strict=True)
        if all(isinstance(size, int) for size in sizes)
    )
    if len({sizes for _, sizes in cells}) < 2:
        return []
    gain: dict[str, dict[tuple[Any, ...], float]] = {}
    for (arm, sizes), own in cells.items():
        gain.setdefault(arm, {})[sizes] = geometric_mean(own)
    arms = sorted(gain, key=lambda arm: -stats.geometric_mean(list(gain[arm].values())).value)[:MOST_ARMS]
    every = [sorted({sizes[i] for arm in arms for sizes in gain[arm]}) for i in range(3)]
    most = (MOST_M, MOST_SIDE, MOST_SIDE)
    ms, ks, ns = ([own[i] for i in evenly(len(own), n)] for own, n in zip(every, most, strict=True))
    maps = []
    for arm in arms:
        for m in ms:
            rows = [k for k in ks if any((m, k, n) in gain[arm] for n in every[2])]
            across = [n for n in ns if any((m, k, n) in gain[arm] for k in every[1])]
            records = [
                {"K": str(k)} | {str(n): _map_cell(gain[arm].get((m, k, n))) for n in across} for k in rows
            ]
            if rows and across:
                titles = [Column("K \\ N", "K"), *(number(str(n), str(n)) for n in across)]
                key = f"map-{suite}-{arm}-{m}-{machine.env_id}"
                maps.append(Grid(f"M = {m}", make_table(key, titles, records, sortable=False), arm))
    return maps


def _map_cell(speedup: float | None) -> Cell | None:
    if speedup is None:
        return None
    return Cell(text.number(speedup), speedup, f"h{bisect.bisect(EDGES, speedup)}")


def square_grids(machine: Machine) -> list[Grid]:
    """One 2x2 square (a row a precision, a column a mode) for each case and regime, under the case's name.

    The first `MOST_SQUARES` of them: the table of the suite has all.
    """
    times = [r for r in arm_records(machine, "linear") if r["metric"] == "time_ms"]
    across = [number(f"{mode} (ms)", partial(_square_cell, mode)) for mode in MODES]
    out = []
    for own in list(gathered((key_of(r)[:2], r) for r in times).values())[:MOST_SQUARES]:
        regimes = gathered((r["regime"], r) for r in own)
        absent = regimes.pop("", [])  # an arm that never ran has no regime: it is missing from all of them
        for regime, measured in (regimes or {"": []}).items():
            arms = {r["arm"]: r for r in (*absent, *measured)}
            load = ", sustained" if regime == "sustained" else ""
            key = "-".join(("square", *key_of(own[0])[:2], regime))
            records = [{"precision": name, "arms": arms} for name in PRECISIONS]
            made = make_table(key, [Column("precision"), *across], records, sortable=False)
            out.append(Grid(machine.label(own[0]) + load, made))
    return out


def _square_cell(mode: str, record: Record) -> Cell:
    r = record["arms"].get(f"{record['precision']}_{mode}")
    if r is None:
        return Cell("not measured in this run", None, "muted")
    if r["status"] != "ok":
        return replace(status_cell(r), note=r["reason"])
    shown = Cell(text.number(r["value"], 4), r["value"])
    if not known(r["speedup"]) or r["baseline"] != f"bf16_{mode}":
        return shown
    ratio = estimate(r["speedup"], r["low"], r["high"])
    interval = f" ({ratio.interval})" if ratio.interval else ""
    return replace(shown, style=r["verdict"], note=f"{ratio.text}{interval} {r['verdict']}")


# Numerics


def numerics_table(machine: Machine) -> Table:
    """Worst figures by arm against the bounds that their suites stored, without empty columns."""
    records = [_worst_cells(w) for w in numerics_by_arm(machine)]
    return filled(table_of(machine, "numerics", records, sortable=False), text.NONE)


def _worst_cells(w: Worst) -> Row:
    cells: Row = {"suite": w.suite, "arm": w.arm, "cases": w.cases}
    for m in SQNR:
        cells[m] = Cell(text.number(w.sqnr.get(m)), w.sqnr.get(m), "bad" if m in w.failing else "")
    bounds = " / ".join(text.number(w.bounds[m], 4) for m in SQNR if m in w.bounds)
    codes = text.count(w.mismatches) if w.checked_codes else text.NONE
    return cells | {
        "bound (dB)": Cell(bounds or text.NONE, max(w.bounds.values(), default=None)),
        "row_min": Cell(text.number(w.row_min), w.row_min),
        "accumulation": Cell(text.number(w.accumulation), w.accumulation),
        "underflow": Cell(text.percent(w.underflow), w.underflow),
        "codes that differ": Cell(codes, w.mismatches),
    }


# Each suite by itself


def suite_table(machine: Machine, suite: str) -> Table:
    """One row a (case, arm, regime) of a suite: what it cost, what it gained and how exact it is.

    Columns that no row can fill are left out; axes that are the same in every row stand in the caption.
    """
    records: list[Record] = [*arm_records(machine, suite)]
    if len({r["regime"] for r in records} - {""}) > 1:
        records = [{**r, "regime_cell": r["regime"]} for r in records]
    constant = machine.constant_axes(suite)
    lead = [*run_column(records), *axis_columns(records, constant)]
    every = [c.title for c in axis_columns(records, ())]
    said = text.axes_said(
        text.axes_of(records[0]["axes"]) if records else {}, [n for n in every if n in constant]
    )
    caption = f"All rows: {said}." if said else ""
    return table_of(machine, "suite", records, caption, lead=lead, key=suite)


# The rest


def agreement(machine: Machine) -> Table:
    """How far apart two precisions of one model are (`harness.agree`), and what is left without some layers."""
    records = [{**row, "arm_cell": row["arm"]} for row in machine.pick(suite="agree")]
    return table_of(machine, "agreement", records)


def compile_times(machine: Machine) -> Table:
    """First call of each compiled arm, apart from every other time, and when it has paid."""
    records = [
        about | {"arm": arm, "run_id": run, "case": machine.label(about)}
        for (run, _, arm), about in compilations(machine).items()
    ]
    return table_of(machine, "compile", records)


def troubles_table(machine: Machine) -> Table:
    """Failed and skipped rows, gathered by metric and reason: nothing is hidden, nothing said twice."""
    bad = (r for r in machine.rows if r["status"] != "ok")
    groups = gathered(((r["status"], r["suite"], r["metric"], text.reason(r["reason"])), r) for r in bad)
    records = []
    for key, members in sorted(groups.items()):
        arms, labels, ids = (
            list(dict.fromkeys(map(str, own)))
            for own in zip(*((m["arm"], machine.label(m), m["case_id"]) for m in members), strict=True)
        )
        cells = Cell(", ".join(arms), len(arms)), Cell(text.some(labels), len(labels), note=text.some(ids, 3))
        records.append(
            dict(zip(("status", "suite", "metric", "reason", "arms", "cases"), (*key, *cells), strict=True))
        )
    return table_of(machine, "troubles", records)


def rows_table(machine: Machine) -> Table:
    """Every row of a whole that is stored, controls included: the samples aggregated, none trimmed.

    Rows of a part (a layer, a class of kernels) can be thousands; they have tables of their own.
    """
    cases = dict.fromkeys((r["suite"], r["axes"]) for r in machine.rows)
    several = len(cases) > len(machine.suites)  # else an id alone tells its case
    whole = machine.pick(part="")
    lead = [*run_column(whole), *columns("rows_case"), *([Column("axes", machine.label)] if several else [])]
    named = " ".join(f"{suite}: {text.case_label(text.axes_of(axes))}." for suite, axes in cases)
    return table_of(machine, "rows", whole, "" if several else named, lead=lead)
