"""Judge: what rows mean. Loss verdict, findings, differences, fleets, targets; no torch."""

from __future__ import annotations

import statistics
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.store.text import markdown, plural, some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console

K = TypeVar("K")
V = TypeVar("V")


def gathered(pairs: Iterable[tuple[K, V]]) -> defaultdict[K, list[V]]:
    """Values by their key, both in order."""
    found: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


def print_tables(
    where: Console, tables: Iterable[tuple[str, Sequence[str], Sequence[Sequence[str]]]]
) -> None:
    """Prints tables, each a title, names of columns as `terminal.table` reads them, and rows; none without a row."""
    from harness.machine.terminal import row, table

    for title, columns, rows in tables:
        if rows:
            made = table(title, *columns)
            for cells in rows:
                row(made, *cells)
            where.print(made)


@cache
def macros(file: Path, **filters: Callable[..., object]) -> Any:
    """The macros of a Jinja file, as functions."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(file.parent),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= filters
    return made.get_template(file.name).module


def words() -> Any:
    """The macros of `words.j2`."""
    file = Path(__file__).with_name("words.j2")
    return macros(file, plural=plural, some=some, median=statistics.median, markdown=markdown)
