"""Tables of a documentation page that a study writes, each between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def documented(page: Path, name: str) -> list[str]:
    """Lines between the two marks of that name."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1).strip().splitlines()


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Writes every table for which the page has marks."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        if begin:
            text = f"{before}{begin}{table}\n{''.join(rest.partition(f'<!-- /{name} -->')[1:])}"
    page.write_text(text, encoding="utf-8")
