"""Blocks of code in a page of the documentation, for the tests that run them."""

from __future__ import annotations

import re
from collections.abc import Iterator


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """(language, what follows it, content) of each block of code; the language of a bare fence is ""."""
    for found in re.finditer(r"^```(\w*) ?([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield found[1], found[2], found[3]
