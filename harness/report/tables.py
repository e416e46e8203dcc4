"""Tables: the rows of any suite as cells of text, each with the value that it sorts by, and their sections."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from harness.judge.model_title import title_of
from harness.judge.reproduced import figure, in_words
from harness.machine.ceilings import SUITES as PRODUCTS
from harness.machine.hardware import DEVICES
from harness.report.records import SQNR, arm_records, compilations, is_fp8, numerics_by_arm, timed_records
from harness.report.table import (
    COMPUTED,
    MOST,
    Column,
    Record,
    axis_columns,
    columns,
    known,
    make_table,
    table_of,
)
from harness.store import text
from harness.store.printer import Cell, Table, filled
from harness.store.published import rates_on
from harness.store.rows import grouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.records import Worst
    from harness.report.runs import Machine
    from harness.report.table import Row


STEPS = "train"
MOST_PUBLIC = 3  # of published products on each side of the best one


def findings(machine: Machine) -> Table:
    """What is probably wrong, with its figures, cause and way out."""
    return table_of(machine, "findings", machine.findings, sortable=False)


def run_column(records: Sequence[Record]) -> list[Column]:
    """The column that names the run, where several runs measured the same."""
    names = ("suite", "case_id", "arm", "regime", "metric", "part")
    several = len({r["run_id"] for r in records}) > 1
    seen = Counter(tuple(r[name] for name in names) for r in records if several)
    return [Column("run", COMPUTED["run"])] if any(count > 1 for count in seen.values()) else []


# Numerics


def numerics_table(machine: Machine) -> Table:
    """Worst figures by arm against the bounds that their suites stored, without empty columns."""
    records = [_worst_cells(w) for w in numerics_by_arm(machine)]
    return filled(table_of(machine, "numerics", records, sortable=False))


def _worst_cells(w: Worst) -> Row:
    names = ("suite", "arm", "cases", "row_min", "accumulation", "underflow")
    bounds = " / ".join(text.number(w.bounds[m], 4) for m in SQNR if m in w.bounds)
    return {
        **{name: getattr(w, name) for name in names},
        **{m: Cell(text.number(v), v, "bad" if w.below(m) else "") for m, v in w.sqnr.items()},
        "bound (dB)": Cell(bounds, max(w.bounds.values(), default=None)),
        "codes that differ": w.mismatches if w.checked_codes else None,
    }


# Each suite by itself


def suite_table(machine: Machine, suite: str) -> Table:
    """One row a (case, arm, regime) of a suite: what it cost, what it gained and how exact it is.

    Columns that no row can fill are left out; axes that are the same in every row stand in the caption.
    """
    every = timed_records(machine, suite)
    records = arm_records(machine, suite, MOST)
    if len({r["regime"] for r in every} - {""}) > 1:
        records = [{**r, "regime_cell": r["regime"]} for r in records]
    named = axis_columns(every, ())
    one_case = len({r["axes"] for r in every}) == 1
    constant = {c.title for c in named} if one_case else machine.constant_axes(suite)
    first = [*run_column(records), *(c for c in named if c.title not in constant)]
    axes = text.axes_of(records[0]["axes"]) if records else {}
    shared = text.axes_said(axes, [c.title for c in named if c.title in constant])
    models = (r for r in records if r["status"] in ("ok", "partial") and "model" in text.axes_of(r["axes"]))
    titles = text.some(list(dict.fromkeys(map(title_of, models))) if suite == STEPS else [])
    sentences = (
        f"All rows: {shared}." if shared else "",
        f"Trained: {titles}." if titles else "",
        best_product(machine, suite),
    )
    caption = " ".join(filter(None, sentences))
    return table_of(machine, "suite", records, caption, first=first, key=suite, count=len(every))


def best_product(machine: Machine, suite: str) -> str:
    """How the fastest FP8 product of a suite stands to those that others publish of this architecture, in words; "" without one."""
    own = [
        r for r in timed_records(machine, suite) if r["status"] == "ok" and known(r["tflops"]) and is_fp8(r)
    ]
    if suite not in PRODUCTS or machine.device is None or not own:
        return ""
    best, capability = max(own, key=lambda r: r["tflops"]), machine.device.capability
    public = {(e.high, e.device, e.source) for e in rates_on(capability)}
    for device in (d for d in DEVICES if d.capability == capability):
        for r in (r for r in device.reached if r.rate == "fp8" and not r.of):
            name = f"{device.key}{f' at {r.power_w:g} W' if r.power_w else ''}"
            public |= {(r.tflops, name, r.source)} - {
                (rate, name, who) for rate, _, who in public if rate == r.tflops
            }
    rate = best["tflops"]
    groups = {
        "below": sorted((e for e in public if e[0] <= rate), reverse=True),
        "above": sorted(e for e in public if e[0] > rate),
    }
    clocks = [c for c in best["sample_clock_mhz"] if c > 0]
    at = [machine.label(best), best["regime"], f"{statistics.median(clocks):,.0f} MHz" if clocks else ""]
    words = f"Fastest FP8 product: {best['arm']}, {rate:,.0f} TFLOP/s ({', '.join(filter(None, at))})."
    for side, found in groups.items():
        shown = "; ".join(f"{rate:,.0f} ({', '.join(who)})" for rate, *who in found[:MOST_PUBLIC])
        words += f" Public figures of this architecture {side} it: {shown or 'none known'}."
    return words


# The rest


def peers(machine: Machine) -> Table:
    """Each arm of a peer beside what its own authors publish of it: the figures, their shapes, and the source."""
    records = []
    for arm, found in sorted(machine.reproductions.items()):
        theirs, ours = found.theirs, found.ours
        records.append({
            "arm": arm, "found": str(found.found).replace("_", " "),
            "ours": figure(ours.value, ours.unit) if ours else text.NONE, "at": in_words(ours.shape, ours.cut) if ours else "",
            "authors": figure(theirs), "authors at": in_words(theirs.shape), "mode": theirs.mode, "device": theirs.device,
            "conditions": "; ".join(filter(None, (theirs.base, theirs.remark))), "source": _linked(theirs.source),
        })  # fmt: skip
    return make_table(f"peers-{machine.env_id}", columns("peers"), records, sortable=False)


def _linked(source: str) -> Cell:
    """An address as a link; whatever else a record names is text."""
    shown = source.removeprefix("https://")
    return Cell(shown, href=source if shown != source else "")


def trials(machine: Machine) -> Table:
    """A row a line of each trial's answer; a CPU's says that its times decide nothing."""
    rows = []
    for run in machine.runs:
        answer = run.about.get("answer")
        for place, line in enumerate(answer if isinstance(answer, list) else ()):
            rows.append({"trial": Cell(run.run_id if place == 0 else "", run.run_id), "answer": str(line)})
    return table_of(machine, "trials", rows, sortable=False)


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
    """Failed and skipped rows, gathered by metric and reason: nothing is hidden or repeated."""
    bad = machine.pick(status=lambda status: status != "ok")
    groups = grouped(((r["status"], r["suite"], r["metric"], text.reason(r["reason"])), r) for r in bad)
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
    cases = list(machine.frame[["suite", "axes"]].drop_duplicates().itertuples(index=False))
    several = len(cases) > len(machine.suites)  # else an id alone tells its case
    whole = machine.rows.pick(MOST, part="")
    first = [*run_column(whole), *columns("rows_case"), *([Column("axes", machine.label)] if several else [])]
    named = " ".join(f"{suite}: {text.case_label(text.axes_of(axes))}." for suite, axes in cases)
    count = int(machine.rows.where(part="").sum())
    return table_of(machine, "rows", whole, "" if several else named, first=first, count=count)
