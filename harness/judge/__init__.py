"""Judge: what rows mean. Loss verdict, findings, differences, fleets, targets; no torch."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

K = TypeVar("K")
V = TypeVar("V")


def gathered(pairs: Iterable[tuple[K, V]]) -> defaultdict[K, list[V]]:
    """Values by their key, both in order."""
    found: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


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
    return macros(file)
