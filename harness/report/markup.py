"""Markup: cells of a table as HTML and as markdown, and long text packed small.

Names, reasons and commands come from whoever measured: nothing of them may become markup here. Rows are written in
Python because a template takes thirty times as long for a cell, and a sweep has a hundred thousand of them.
"""

from __future__ import annotations

import base64
import gzip
import math
from functools import lru_cache
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from harness.store.text import code, markdown, printable

if TYPE_CHECKING:
    from harness.report.table import Cell, Column, Table

SHOWN = 100  # rows that stand in the page as they are; the rest of a longer table is packed beside it
MOST_MARKDOWN = 40


def cell_markdown(cell: Cell) -> str:
    """A cell of a markdown table."""
    shown = (
        "<br>".join(map(code, cell.text.split("\n"))).replace("|", "\\|")
        if cell.style == "command"
        else markdown(cell.text)
    )
    # Parentheses mean an interval and nothing else.
    shown += f" ({markdown(cell.interval)})" if cell.interval else ""
    return f"{shown}; {markdown(cell.note)}" if cell.note and shown else shown + markdown(cell.note)


def rows_html(table: Table, start: int = 0, stop: int | None = None) -> Markup:
    """Rows [start, stop) of a table as <tr> elements, a line each; the first cell names its row."""
    columns = table.columns
    lines = []
    for row in table.rows[start:stop]:
        cells = [
            _cell_html(cell, column, table.as_cards and bool(i), 'th scope="row"' if i == 0 else "td")
            for i, (cell, column) in enumerate(zip(row, columns, strict=True))
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return Markup("\n".join(lines))


def _cell_html(cell: Cell, column: Column, is_named: bool, tag: str) -> str:
    style = f"n {cell.style}".rstrip() if column.numeric else cell.style
    name = f' class="{style}"' if style else ""
    name += f' data-name="{escape(column.title)}"' if is_named else ""
    key = ""
    if cell.order is not None and str(cell.order) != cell.text:
        key = f' data-order="{escape(sort_key(cell.order))}"'
    shown: str = _escaped(cell.text)
    if cell.href:
        shown = f'<a href="{escape(cell.href)}">{shown}</a>'
    below = ", ".join(filter(None, (cell.interval, cell.note)))
    note = f"<small>{_escaped(below)}</small>" if below else ""
    return f"<{tag}{name}{key}>{shown}{note}</{tag[:2]}>"


@lru_cache(maxsize=1 << 14)  # tables repeat their arms, sizes and rates
def _escaped(words: str) -> str:
    return str(escape(printable(words)))


def sort_key(value: object) -> str:
    """What a table of the page sorts by, as JavaScript reads it."""
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        # JavaScript's parser knows no "inf".
        return repr(math.copysign(1e308, value)) if math.isinf(value) else repr(value)
    return str(value)


def pack(text: str) -> str:
    """Text as gzip in base64, for the page to unpack; the same text gives the same bytes (mtime=0)."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
