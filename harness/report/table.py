"""Table: cells of text with the values that they sort by, and the columns that make them from records."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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
    """A heading; numbers are aligned right and sort as numbers."""

    title: str
    numeric: bool = False
    hint: str = ""


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


@dataclass(frozen=True, slots=True)
class Spec:
    """How one column is made from a record; left out where no record has a value for it."""

    title: str
    make: Callable[[Record], Cell]
    hint: str = ""
    numeric: bool = True
    needs: str = ""  # the field that some record must have


def make_table(key: str, specs: Sequence[Spec], records: Sequence[Record], caption: str = "") -> Table:
    """A table of records: a column a spec, a row a record, as many as a browser can bear."""
    columns = tuple(Column(s.title, s.numeric, s.hint) for s in specs)
    rows = tuple(tuple(s.make(r) for s in specs) for r in records[:MOST])
    left_out = max(0, len(records) - MOST)
    if left_out:
        caption += (
            f" The first {text.count(MOST)} of {text.count(len(records))} rows; the Parquet files have all."
        )
    return Table(key, columns, rows, caption.strip(), left_out=left_out)


def axis_spec(name: str) -> Spec:
    """The column of one axis."""

    def make(record: Record) -> Cell:
        value = text.axes_of(record["axes"]).get(name)
        shown = "" if value is None else text.axis_value(value)
        return Cell(shown, value if known(value) else str(value))

    return Spec(name, make, numeric=name in NUMBERS)


def case_cell(record: Record, without: Collection[str] = ()) -> Cell:
    """The case in words, without the axes that say nothing."""
    label = text.case_label(text.axes_of(record["axes"]), without)
    return Cell(label, label)


def status_cell(record: Record) -> Cell:
    """ "failed" or "skipped" in place of a number."""
    return Cell(record["status"], None, "bad" if record["status"] == "failed" else "muted")


def number_cell(value: float | None, digits: int = 3) -> Cell:
    """A number with so many significant digits; empty where there is none."""
    return Cell(text.number(value, digits), value) if known(value) else Cell("", None)


def count_cell(value: float | None) -> Cell:
    """A whole number."""
    return Cell(text.count(value), value) if known(value) else Cell("", None)


def share_cell(value: float | None) -> Cell:
    """A share in percent."""
    return Cell(text.percent(value), value) if known(value) else Cell("", None)


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
