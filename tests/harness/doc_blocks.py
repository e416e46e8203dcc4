"""Blocks of code in a page of the documentation, for what runs them: tutorials' tests, the newcomer's script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """(language, what follows it, content) of each block of code; the language of a bare fence is ""."""
    for found in re.finditer(r"^```(\w*) ?([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield found[1], found[2], found[3]


def section(page: Path, heading: str) -> str:
    """The text under the headings of a page that match a pattern, each up to the next one of its rank; "" for all of it.

    Raises:
        LookupError: no heading matches.
    """
    text = page.read_text()
    if not heading:
        return text
    bare = re.sub(
        r"^```.*?^```",
        lambda code: re.sub("^#", " ", code[0], flags=re.MULTILINE),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    heads = [
        (found.start(), len(found[1]), found[2]) for found in re.finditer(r"^(#+) (.*)$", bare, re.MULTILINE)
    ]
    parts = []
    for number, (begin, rank, title) in enumerate(heads):
        if re.search(heading, title):
            ends = [start for start, other, _ in heads[number + 1 :] if other <= rank]
            parts.append(text[begin : ends[0] if ends else len(text)])
    if not parts:
        raise LookupError(
            f"{page.name}: no heading matches {heading!r}; there are {[title for _, _, title in heads]}"
        )
    return "\n".join(parts)
