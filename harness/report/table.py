"""Table: cells of text with the values that they sort by, and the columns that make them from records.

The columns of the report's tables are data: `columns.yaml`, a list a table. A column is the name of its field, or says:
`title`, `field` (the title), `show` of a number ("number" and its like, see `SHOWS`), `hint` that the heading shows, and
`needs`: a field that some record must have, else the column is left out (`needs: true`: its own).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

from harness.store import text
from harness.store.case import arm_of
from harness.store.compare import NO_FP8, SECONDS
from harness.store.measurement import METRICS
from harness.store.outside import parse
from harness.store.printer import Cell, Heading, Table
from harness.store.tables import beside

if TYPE_CHECKING:
    from harness.report.runs import Machine

Record = Mapping[str, Any]
Row = dict[str, Any]

MOST = 5000  # rows of a table: with more a browser becomes slow, and the Parquet files have every row
NUMBERS = (*text.SIZES, "tokens", "mib", "cube")  # axes that are sizes: right-aligned, after the names
STYLES = {  # of words in cells
    "PASS": "pass", "WARN": "warn", "FAIL": "bad", "INCONCLUSIVE": "muted", "failed": "bad", "skipped": "muted",
    "partial": "muted", "refuses": "muted", "unsupported here": "muted", "below": "bad", "unclear": "muted",
    "missing": "muted",
}  # fmt: skip


NA = Cell(text.NONE, None, "muted")  # asked for, and not known


def word(shown: str, note: str = "") -> Cell:
    """A word in its style."""
    return Cell(shown, shown, STYLES.get(shown, ""), note)


def number4(value: float) -> str:
    """Four significant digits."""
    return text.number(value, 4)


SHOWS: Mapping[str, Callable[[float], str]] = {
    "number": text.number,
    "number4": number4,
    "percent": text.percent,
    "count": text.count,
    "bytes": text.bytes_,
    "plain": str,
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and how a cell of it is made from a record (a mapping or an object).

    Attributes:
        title: the heading, with the unit.
        value: the record's field (the title, unless given), or a function of the record. A `Cell` is taken as it is; a text is shown and sorts as
            it is; a number is shown by `show` and sorts by its value; anything else gives an empty cell.
        hint: what the heading means, shown when it is pointed at.
        numeric: numbers are aligned right and sort as numbers.
        show: how a number is written.
        needs: the field that some record must have, else the column is left out.
    """

    title: str
    value: str | Callable[[Any], Any] = ""
    hint: str = ""
    numeric: bool = False
    show: Callable[[float], str] = text.number
    needs: str = ""

    @property
    def heading(self) -> Heading:
        """What is printed above it."""
        return Heading(self.title, self.numeric, self.hint)

    def cell(self, record: Any) -> Cell:
        """The cell of one record."""
        found = self.value(record) if callable(self.value) else _field(record, self.value or self.title)
        if isinstance(found, Cell):
            return found
        if isinstance(found, str):
            return Cell(found, found)
        return Cell(self.show(found), found) if known(found) else Cell("", None)


def _field(record: Any, name: str) -> Any:
    """A field of a mapping, None where it has none, or of an object."""
    return record.get(name) if isinstance(record, Mapping) else getattr(record, name)


def number(
    title: str, value: str | Callable[[Any], Any] = "", show: Callable[[float], str] = text.number,
    hint: str = "", needs: str = "",
) -> Column:  # fmt: skip
    """A column of numbers."""
    return Column(title, value, hint, True, show, needs)


def status_cell(record: Record) -> Cell:
    """ "failed" or "skipped" in place of a number."""
    return word(record["status"])._replace(order=None)


def arm_cell(record: Record) -> Cell:
    """The arm; one that had to be emulated says so, since its time is none of FP8's, and a control that is not of bf16."""
    about, named_bf16 = resolved_of(record), arm_of(record).recipe == "bf16"
    note = (
        "emulated" if about.get("emulated") else "in fp32" * (named_bf16 and about.get("compute") == "fp32")
    )
    return Cell(record["arm"], record["arm"], note=note)


def _value(record: Record) -> Any:
    return record["value"] if record["status"] == "ok" else status_cell(record)


def _time(record: Record) -> Cell:
    if record["status"] != "ok":
        return status_cell(record)
    shown = text.number(record["value"], 4) + ("" if record["unit"] == "ms" else f" {record['unit']}")
    return Cell(shown, record["value"] * SECONDS[record["unit"]])


_ABOVE = {"over_peak": "above the peak at the measured clock", "over_published": "above the published peak"}


def _peak(record: Record) -> Cell | None:
    """Share of the peak; one above it says so."""
    if "peak_known" not in record:
        return None
    shown = Cell(text.percent(record["peak_share"]), record["peak_share"])
    flag = record.get("over_peak", "")
    if flag in _ABOVE:
        return shown._replace(style="bad", note=_ABOVE[flag])
    return shown._replace(note=flag.replace("_", " ")) if flag else shown


def _gain(record: Record) -> Cell | None:
    """The paired ratio against the baseline, with its interval."""
    verdict = record.get("verdict")
    if record.get("condition") == NO_FP8:
        return Cell(NO_FP8, None, "muted")
    return estimate(record["speedup"], record["low"], record["high"], verdict) if verdict else None


def _pays(record: Record) -> Any:
    calls = record.get("cold_pays")
    return Cell("never", calls, "bad") if calls == math.inf else calls


def _quartile(q: float) -> Callable[[Record], float | None]:
    """A quantile of repeated samples; the points of a curve are not such."""

    def of(record: Record) -> float | None:
        metric = METRICS.get(record["metric"])
        curve = metric is not None and metric.series and len(record["rounds"]) > 0
        return None if curve else quantile(record["samples"], q)

    return of


# Fields that are worked out: of a row, or of a record of an arm.
COMPUTED: Mapping[str, Callable[[Any], Any]] = {
    "run": lambda r: Cell(r["run_id"], r["run_id"], "id"),
    "id": lambda r: Cell(r["case_id"], r["case_id"], "id"),
    "status_cell": status_cell,
    "arm_cell": arm_cell,
    "value_or_status": _value,
    "time": _time,
    "peak": _peak,
    "gain": _gain,
    "pays": _pays,
    "q1": _quartile(0.25),
    "q3": _quartile(0.75),
    "min": _quartile(0.0),
    "count": lambda r: len(r["samples"]),
    "figures": lambda finding: "; ".join(finding.evidence),
}


@cache
def columns(table: str) -> tuple[Column, ...]:
    """The columns of a table, from `columns.yaml`."""
    return tuple(
        column(entry) if isinstance(entry, str) else column(**entry) for entry in column_entries()[table]
    )


@cache
def column_entries() -> Mapping[str, Sequence[Any]]:
    """What `columns.yaml` says of each table."""
    found: Mapping[str, Sequence[Any]] = beside(__file__, "columns.yaml")
    return found


def column(title: str, *, field: str = "", show: str = "", hint: str = "", needs: bool | str = "") -> Column:
    """A column as the table of columns says it; by its arguments a key that is none of them is an error."""
    field = field or title
    if not hint and needs is True and field in METRICS:
        hint = METRICS[field].meaning
    value, shown = COMPUTED.get(field, field), SHOWS[show or "number"]
    return Column(title, value, hint, bool(show), shown, field if needs is True else needs or "")


def table_of(
    machine: Machine, name: str, records: Sequence[Any], caption: str = "", *, first: Sequence[Column] = (),
    sortable: bool = True, key: str = "", count: int = 0,
) -> Table:  # fmt: skip
    """The table of a machine with the columns of that name, `first` before them; `key` where it is another than its name."""
    every = [beside_authors(machine, column) for column in (*first, *columns(name))]
    return make_table(
        f"{key or name}-{machine.env_id}", every, records, caption, sortable=sortable, count=count
    )


def beside_authors(machine: Machine, of: Column) -> Column:
    """A column of the records' arms, in which each of a peer says whether it does here what its authors publish; others as they are."""
    if (of.value or of.title) not in ("arm", arm_cell):
        return of

    def value(record: Any) -> Cell:
        cell = of.cell(record)
        theirs = machine.reproductions.get(cell.text)
        return cell._replace(note=", ".join(filter(None, (cell.note, theirs.words)))) if theirs else cell

    return replace(of, value=value)


def make_table(
    key: str, columns: Sequence[Column], records: Sequence[Any], caption: str = "", *, sortable: bool = True,
    count: int = 0,
) -> Table:  # fmt: skip
    """A table of records: a row a record, as many as a browser can bear.

    Args:
        key: its id within the page.
        columns: those that need a field which no record has are left out.
        records: mappings or objects that the columns read.
        caption: what holds of all rows.
        sortable: with sorting and a filter in the browser.
        count: how many records there are, where only the first are given.
    """
    shown = records[:MOST]
    columns = [c for c in columns if not c.needs or any(given(_field(r, c.needs)) for r in shown)]
    rows = [tuple(c.cell(r) for c in columns) for r in shown]
    count = count or len(records)
    left_out = count - len(shown)
    if left_out:
        caption += f" The first {text.count(MOST)} of {text.count(count)} rows; the Parquet files have all."
    return Table(key, [c.heading for c in columns], rows, caption.strip(), sortable, left_out)


def axis_columns(
    records: Sequence[Record], without: Sequence[str] | frozenset[str] | None = None
) -> list[Column]:
    """A column for each axis that tells the records apart (or for all but those of `without`), sizes last as M, K, N."""
    axes = [text.axes_of(r["axes"]) for r in records]
    names = sorted(
        {n for a in axes for n in a}, key=lambda n: (n in NUMBERS, n in text.SIZES, "MKN".find(n), n)
    )
    if without is not None:
        shown = [n for n in names if n not in without]
    else:
        shown = [n for n in sorted(names) if len({str(a.get(n)) for a in axes}) > 1]
    return [_axis_column(n) for n in shown]


def _axis_column(name: str) -> Column:
    def cell(record: Any) -> Cell | None:
        value = text.axes_of(record["axes"]).get(name)
        shown = "" if value is None else text.axis_value(value)
        return Cell(shown, value if known(value) else str(value))

    return Column(name, cell, numeric=name in NUMBERS)


def estimate(value: float | None, low: float | None, high: float | None, style: str = "") -> Cell:
    """A ratio with its interval, where there is one."""
    interval = text.interval(low, high) if known(low) and known(high) else ""
    return Cell(text.ratio(value), value, style, interval=interval) if known(value) else NA


def resolved_of(record: Record) -> Mapping[str, Any]:
    """What really ran, as the row stores it; to be read only."""
    return parse(record["resolved"])


def quantile(samples: Sequence[float], q: float) -> float | None:
    """A quantile of the samples by linear interpolation (numpy's default); None without samples."""
    if not len(samples):
        return None
    ordered = sorted(samples)  # a twentieth of numpy's time on the few samples of a row
    place = q * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    # An exact result has an infinite SQNR, between which there is nothing to interpolate.
    return float(low if low == high or math.isinf(low) else low + (high - low) * (place - math.floor(place)))


def known(value: object) -> TypeGuard[float]:
    """Whether a value is a number."""
    return isinstance(value, (float, int)) and value == value and not isinstance(value, bool)


def given(value: object) -> bool:
    """Whether a value is there at all: a number, a yes or no, a text or a cell."""
    return known(value) or isinstance(value, bool | Cell) or (isinstance(value, str) and bool(value))
