"""Blocks of code in a page of the documentation, for what runs them: tests of pages, the newcomer's script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """(language, what follows it, content) of each block of code; the language of a bare fence is ""."""
    for found in re.finditer(r"^```(\w*) ?([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield found[1], found[2], found[3]


def section(page: Path, heading: str) -> str:
    """The text from the first heading that matches a pattern up to the next heading of level 1 or 2; "" for the page.

    Raises:
        LookupError: no heading matches.
    """
    text = page.read_text()
    if not heading:
        return text
    code = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    bare = code.sub(lambda block: re.sub("^#", " ", block[0], flags=re.MULTILINE), text)
    heads = list(re.finditer(r"^##? (.*)$", bare, re.MULTILINE))
    for found, after in zip(heads, [*heads[1:], None], strict=True):
        if re.search(heading, found[1]):
            return text[found.start() : after.start() if after else len(text)]
    raise LookupError(f"{page.name}: no heading matches {heading!r}")
