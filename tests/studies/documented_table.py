"""Reads a table of a documentation page that a study writes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def documented(page: Path, name: str) -> list[str]:
    """Lines between the two marks of that name."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1).strip().splitlines()
