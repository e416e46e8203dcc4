"""Table: cells of text with the values that they sort by, and the columns that make them from records."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from harness.store import text
from harness.store.json_columns import parse

Record = Mapping[str, Any]

MOST = 5000  # rows of a table: with more a browser becomes slow, and the Parquet files have every row
NUMBERS = (*text.SIZES, "tokens", "mib", "cube")  # axes that are sizes: right-aligned, after the names


@dataclass(frozen=True, slots=True)
class Cell:
    """Text of one cell, the key it sorts by (None sorts last) and a style: "", faster, slower, muted, bad."""

    text: str
    order: float | str | None = None
    style: str = ""
    note: str = ""  # a second, smaller line
    interval: str = ""  # of the text, "1.30 to 1.34": stands before the note, in markdown in parentheses
    href: str = ""  # where the text leads, within the page
    anchor: str = ""  # the id under which others lead here


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and how a cell of it is made from a record (a mapping or an object).

    Attributes:
        title: the heading, with the unit.
        value: the record's field, or a function of the record. A `Cell` is taken as it is; a text is shown and sorts as
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

    def cell(self, record: Any) -> Cell:
        """The cell of one record."""
        found = self.value(record) if callable(self.value) else _field(record, self.value)
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


def number4(value: float) -> str:
    """Four significant digits."""
    return text.number(value, 4)


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the report. `sortable` ones get sorting and a filter in the browser."""

    key: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    sortable: bool = True
    left_out: int = 0  # rows beyond `MOST`
    as_cards: bool = False  # on a narrow screen each row is a card, its cells named

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", text.slug(self.key))  # it holds names of suites and arms


@dataclass(frozen=True, slots=True)
class Grid:
    """A small table that stands beside others; those of one group follow each other under its name."""

    name: str
    table: Table
    group: str = ""


def make_table(
    key: str, columns: Sequence[Column], records: Sequence[Any], caption: str = "", *, sortable: bool = True
) -> Table:  # fmt: skip
    """A table of records: a row a record, as many as a browser can bear.

    Args:
        key: its id within the page.
        columns: those that need a field which no record has are left out.
        records: mappings or objects that the columns read.
        caption: what holds of all rows.
        sortable: with sorting and a filter in the browser.
    """
    columns = [c for c in columns if not c.needs or any(given(r.get(c.needs)) for r in records)]
    rows = [tuple(c.cell(r) for c in columns) for r in records[:MOST]]
    left_out = max(0, len(records) - MOST)
    if left_out:
        caption += (
            f" The first {text.count(MOST)} of {text.count(len(records))} rows; the Parquet files have all."
        )
    return Table(key, tuple(columns), tuple(rows), caption.strip(), sortable, left_out)


def filled(table: Table, blank: str = "") -> Table:
    """Without the columns in which every cell is blank."""
    kept = [i for i in range(len(table.columns)) if any(row[i].text != blank for row in table.rows)]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[i] for i in kept), rows=rows)


def axis_column(name: str) -> Column:
    """The column of one axis."""

    def cell(record: Any) -> Cell:
        value = text.axes_of(_field(record, "axes")).get(name)
        shown = "" if value is None else text.axis_value(value)
        return Cell(shown, value if known(value) else str(value))

    return Column(name, cell, numeric=name in NUMBERS)


def identity(title: str, field: str) -> Column:
    """The column of an id, which the page writes small."""
    return Column(title, lambda r: Cell(r[field], r[field], "id"))


CASE_ID = identity("case", "case_id")


def case_cell(record: Record, without: Collection[str] = ()) -> Cell:
    """The case in words, without the axes that say nothing."""
    label = text.case_label(text.axes_of(record["axes"]), without)
    return Cell(label, label)


def status_cell(record: Record) -> Cell:
    """ "failed" or "skipped" in place of a number."""
    return Cell(record["status"], None, "bad" if record["status"] == "failed" else "muted")


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
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def given(value: object) -> bool:
    """Whether a value is there at all: a number or a yes or no."""
    return isinstance(value, bool) or known(value)
