"""Words: the prose of a report, from the blocks of `words.j2` and the facts that they are given."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Collection

HERE = Path(__file__).parent


def say(block: str, **facts: Any) -> str:
    """The words of a block in one line."""
    return " ".join(paragraphs(block, **facts))


def blocks() -> Collection[str]:
    """Names of all blocks."""
    return _template().blocks


def titled(block: str, **facts: Any) -> tuple[str, str]:
    """The first paragraph of a block, and the rest in one line."""
    title, *rest = paragraphs(block, **facts)
    return title, " ".join(rest)


def paragraphs(block: str, **facts: Any) -> list[str]:
    """The paragraphs of a block, which blank lines part; what a fact holds of white space is never a paragraph's end."""
    template = _template()
    words = "".join(template.blocks[block](template.new_context(facts)))
    return [" ".join(p.split()) for p in re.split(r"\n\s*\n", words) if p.strip()]


@cache
def _template() -> jinja2.Template:
    # Nothing is escaped here: the page escapes what these words hold.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: re.sub(r"\s+", " ", value) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=text.number, ratio=text.ratio, count=text.count, plural=text.plural)
    return environment.get_template("words.j2")
