"""Table: cells of text with the values that they sort by, and the columns that make them from records."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from harness.report import text

Record = Mapping[str, Any]

NUMBERS = (*text.SIZES, "tokens", "mib", "cube")  # axes that are sizes: right-aligned, after the names


@dataclass(frozen=True, slots=True)
class Cell:
    """Text of one cell, the key it sorts by (None sorts last) and a style: "", faster, slower, muted, bad."""

    text: str
    order: float | str | None = None
    style: str = ""
    note: str = ""  # a second, smaller line


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


@dataclass(frozen=True, slots=True)
class Spec:
    """How one column is made from a record; left out where no record has a value for it."""

    title: str
    make: Callable[[Record], Cell]
    hint: str = ""
    numeric: bool = True
    needs: str = ""  # the field that some record must have


def make_table(key: str, specs: Sequence[Spec], records: Sequence[Record], caption: str = "") -> Table:
    """A table of records: a column a spec, a row a record."""
    columns = tuple(Column(s.title, s.numeric, s.hint) for s in specs)
    return Table(key, columns, tuple(tuple(s.make(r) for s in specs) for r in records), caption)


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


def word_cell(value: object) -> Cell:
    """A stored word or number as it is."""
    return (
        Cell("", None)
        if value is None
        else Cell(str(value), value if isinstance(value, int | float) else str(value))
    )


def resolved_of(record: Record) -> dict[str, Any]:
    """What really ran, as the row stores it."""
    return json.loads(record["resolved"] or "{}")


def quantile(samples: Sequence[float], q: float) -> float | None:
    """A quantile of the samples; None without samples."""
    if not len(samples):
        return None
    if np.isfinite(samples).all():
        return float(np.quantile(samples, q))
    # An exact result has an infinite SQNR, between which there is nothing to interpolate.
    return float(np.quantile(samples, q, method="nearest"))


def known(value: object) -> TypeGuard[float]:
    """Whether a value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def given(value: object) -> bool:
    """Whether a value is there at all: a number or a yes or no."""
    return isinstance(value, bool) or known(value)


def some(items: Sequence[str], most: int = 4) -> str:
    """The first few items and how many more there are."""
    more = len(items) - most
    return "; ".join(items[:most]) + (f" and {more} more" if more > 0 else "")
