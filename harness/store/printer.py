"""Printer: a result as text, markdown, HTML, JSON and JUnit XML. The one place where tables are written.

A result has `lines()`, the answer first and then what it rests on, `tables()`, and `data()`, plain values for a program, which
are named by hand so that its records may change. Names and reasons come from whoever measured: none of them becomes markup, a
line, a cell or a control code.
"""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from markupsafe import Markup, escape

from harness.store.text import code, markdown, printable, slug

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.text import Text

MOST = 200  # characters of a line
WIDE = 10_000  # no table is wrapped
Tone = Literal["", "good", "bad"]  # of an answer
_COLOURS: Mapping[Tone, str] = {"": "", "good": "green", "bad": "red"}
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in no XML document


class Cell(NamedTuple):
    """Text of one cell, the key it sorts by (None sorts last) and a style: "", faster, slower, muted, bad."""

    text: str
    order: float | str | None = None
    style: str = ""
    note: str = ""  # a second, smaller line
    interval: str = ""  # of the text, "1.30 to 1.34": stands before the note, in markdown in parentheses
    href: str = ""  # where the text leads: within the page, or relative to it


class Heading(NamedTuple):
    """Title of a column, whether it holds numbers (aligned right) and what it means."""

    title: str
    numeric: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """One table. `sortable` ones get sorting and a filter in the browser."""

    key: str
    columns: Sequence[Heading]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = True
    left_out: int = 0  # rows that there are beyond these
    as_cards: bool = False  # on a narrow screen each row is a card, its cells named

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", slug(self.key))  # it holds names of suites and arms


class Result(Protocol):
    """What a command found."""

    @property
    def tone(self) -> Tone:
        """ "good" where the first line says that all is well, "bad" where it says that something is not."""

    def lines(self) -> Sequence[str]:
        """The answer, then what it rests on; each of at most `MOST` characters."""

    def tables(self) -> Sequence[Table]:
        """Tables behind the lines; those without a row are not shown."""

    def data(self) -> Mapping[str, Any]:
        """Plain values; numbers that are not finite become null."""


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str | Cell]]) -> Table:
    """A table of texts; a column ">name" holds numbers."""
    headings = [Heading(name.lstrip(">"), name.startswith(">")) for name in columns]
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    return Table(caption, headings, cells, caption, sortable=False)


def filled(of: Table, blank: str = "") -> Table:
    """A table without the columns in which every cell is blank."""
    kept = [i for i in range(len(of.columns)) if any(row[i].text != blank for row in of.rows)]
    rows = [[row[i] for i in kept] for row in of.rows]
    return replace(of, columns=[of.columns[i] for i in kept], rows=rows)


# Text


def show(result: Result, where: Console, tables_first: bool = False, as_program: bool = False) -> None:
    """Prints lines and tables, the answer in bold, in the colour of its tone; or `data()` for a program."""
    if as_program:
        sys.stdout.write(as_json(result))
        return
    if tables_first:
        _draw(result.tables(), where)
    for i, line in enumerate(_lines(result)):
        where.print(_text(line), style="" if i else f"bold {_COLOURS[result.tone]}", soft_wrap=True)
    if not tables_first:
        _draw(result.tables(), where)


def as_text(result: Result, width: int = WIDE, tables_first: bool = False) -> str:
    """Lines and tables as plain text."""
    from rich.console import Console

    where = Console(width=width, color_system=None, force_terminal=False)
    with where.capture() as seen:
        show(result, where, tables_first)
    return "".join(f"{line.rstrip()}\n" for line in seen.get().splitlines())


def _lines(result: Result) -> Iterator[str]:
    """The lines of a result, those that are too long continued on the next one."""
    for line in map(_flat, result.lines()):
        yield from (
            textwrap.wrap(line, MOST, subsequent_indent="  ", break_on_hyphens=False)
            if len(line) > MOST
            else [line]
        )


def _draw(tables: Iterable[Table], where: Console) -> None:
    from rich import box
    from rich.table import Table as Drawn

    for of in filter(lambda of: of.rows, tables):
        drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in of.columns:
            justify: Any = "right" if column.numeric else "left"
            drawn.add_column(_text(column.title), justify=justify, no_wrap=column.numeric, overflow="fold")
        for row in of.rows:
            drawn.add_row(*(_text(_whole(cell), "red" * (cell.style == "bad")) for cell in row))
        where.print()
        where.print(_text(of.caption), style="italic", soft_wrap=True)
        where.print(drawn)


def _whole(cell: Cell) -> str:
    return cell.text + f" ({cell.interval})" * bool(cell.interval) + f"; {cell.note}" * bool(cell.note)


def _text(words: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(_flat(words), style)


def _flat(words: str) -> str:
    """In one line, without control characters: none of it is a command to a terminal or to GitHub."""
    return printable(words).replace("\n", " ")


# Markdown


def as_markdown(result: Result, level: int = 2) -> str:
    """The answer as a heading, the other lines as a list, then the tables."""
    first, *rest = map(markdown, result.lines())
    parts = [f"{'#' * level} {first}\n", "".join(f"- {line.strip()}\n" for line in rest)]
    parts += [markdown_table(each) for each in result.tables() if each.rows]
    return "\n".join(filter(None, parts))


def markdown_table(of: Table, most: int | None = None) -> str:
    """A table of GitHub's markdown, of at most so many rows."""
    lines = [f"{markdown(of.caption)}\n"] if of.caption else []
    lines.append(_row(markdown(column.title) for column in of.columns))
    lines.append(_row("---:" if column.numeric else "---" for column in of.columns))
    lines += [_row(map(cell_markdown, row)) for row in of.rows[:most]]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell_markdown(cell: Cell) -> str:
    """A cell of a markdown table."""
    shown = (
        "<br>".join(map(code, cell.text.split("\n"))).replace("|", "\\|")
        if cell.style == "command"
        else markdown(cell.text)
    )
    if cell.href and not cell.href.startswith("#"):
        shown = f"[{shown}]({cell.href})"
    # Parentheses mean an interval and nothing else.
    shown += f" ({markdown(cell.interval)})" if cell.interval else ""
    return f"{shown}; {markdown(cell.note)}" if cell.note and shown else shown + markdown(cell.note)


# HTML; in Python, because a template takes thirty times as long for a cell, and a sweep has a hundred thousand of them


def as_html(result: Result) -> Markup:
    """The answer in bold, the other lines as a list, then the tables."""
    first, *rest = map(_escaped, result.lines())
    listed = "".join(f"<li>{line}</li>" for line in rest)
    tables = "\n".join(html_table(each) for each in result.tables() if each.rows)
    return Markup(f"<p><strong>{first}</strong></p>\n<ul>{listed}</ul>\n{tables}\n")


def html_table(of: Table, stop: int | None = None) -> Markup:
    """A table with its caption and headings; of one whose rows stop early the rest is packed as `p-KEY`."""
    heads = "".join(
        f'<th scope="col"{_named("n" * c.numeric)}{_attribute("title", c.hint)}>{_escaped(c.title)}</th>'
        for c in of.columns
    )
    caption = f"<caption>{_escaped(of.caption)}</caption>" if of.caption else ""
    about = _named("sortable" if of.sortable else "cards" * of.as_cards)
    about += _attribute("data-rest", f"p-{of.key}" * (stop is not None))
    return Markup(
        f'<table id="t-{of.key}"{about}>{caption}<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{rows_html(of, 0, stop)}\n</tbody></table>"
    )


def rows_html(of: Table, start: int = 0, stop: int | None = None) -> Markup:
    """Rows [start, stop) of a table as <tr> elements, a line each; the first cell names its row."""
    lines = []
    for row in of.rows[start:stop]:
        cells = [
            _cell_html(cell, column, of.as_cards and bool(i), 'th scope="row"' if i == 0 else "td")
            for i, (cell, column) in enumerate(zip(row, of.columns, strict=True))
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return Markup("\n".join(lines))


def _cell_html(cell: Cell, column: Heading, is_named: bool, tag: str) -> str:
    name = _named(f"n {cell.style}".rstrip() if column.numeric else cell.style)
    name += _attribute("data-name", column.title * is_named)
    key = ""
    if cell.order is not None and str(cell.order) != cell.text:
        key = f' data-order="{escape(sort_key(cell.order))}"'
    shown = _escaped(cell.text)
    if cell.href:
        shown = f'<a href="{escape(cell.href)}">{shown}</a>'
    below = ", ".join(filter(None, (cell.interval, cell.note)))
    note = f"<small>{_escaped(below)}</small>" if below else ""
    return f"<{tag}{name}{key}>{shown}{note}</{tag[:2]}>"


def _named(style: str) -> str:
    return _attribute("class", style)


def _attribute(name: str, value: str) -> str:
    return f' {name}="{escape(printable(value))}"' if value else ""


@lru_cache(maxsize=1 << 14)  # tables repeat their arms, sizes and rates
def _escaped(words: str) -> str:
    return str(escape(printable(words)))


def sort_key(value: object) -> str:
    """What a table of a page sorts by, as JavaScript reads it."""
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        # JavaScript's parser knows no "inf".
        return repr(math.copysign(1e308, value)) if math.isinf(value) else repr(value)
    return str(value)


# For programs


def as_json(result: Result) -> str:
    """`data()` as JSON."""
    return json.dumps(plain(result.data()), indent=1, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Mappings, lists and plain values alone; a number that is not finite is None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "items"):
        return {str(name): plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple | set | frozenset) else value


def picked(of: object, names: str) -> dict[str, Any]:
    """Attributes of a record by name, for `data()`."""
    return {name: getattr(of, name) for name in names.split()}


class JUnitCase(NamedTuple):
    """One test case of JUnit XML; `outcome`: "" where it passed, "failure", "error", "skipped", or "system-out" for a remark."""

    group: str
    name: str
    outcome: str = ""
    message: str = ""
    kind: str = ""


def junit(suite: str, tests: Sequence[JUnitCase]) -> str:
    """JUnit XML of one suite."""
    counts = {
        f"{what}{'s' * (what != 'skipped')}": str(sum(test.outcome == what for test in tests))
        for what in ("failure", "error", "skipped")
    }
    lines = [
        "<?xml version='1.0' encoding='utf-8'?>",
        "<testsuites>",
        f"  <testsuite{_attributes(name=suite, **counts, tests=str(len(tests)))}>",
    ]
    for test in tests:
        inner = ""
        if test.outcome == "system-out":
            inner = f"<system-out>{escape(_xml(test.message))}</system-out>"
        elif test.outcome:
            inner = f"<{test.outcome}{_attributes(message=test.message, type=test.kind)}/>"
        head = _attributes(classname=test.group, name=test.name, time="0")
        lines.append(f"    <testcase{head}>{inner}</testcase>")
    return "\n".join([*lines, "  </testsuite>", "</testsuites>"]) + "\n"


def _attributes(**given: str) -> str:
    return "".join(f' {name}="{escape(_xml(value))}"' for name, value in given.items())


def _xml(words: str) -> str:
    """Without the characters that no XML document may hold."""
    return _NO_XML.sub("?", words)
