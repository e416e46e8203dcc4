"""Length of the documentation's pages and the first words of docstrings. Oracle: the rules themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_WORDS = 1800
PACKAGES = ("fp8core", "harness", "tests")
UNTOUCHED = ROOT / "tests" / "contracts"


# LOG.md is the maintainers' log, which is searched and not read.
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "LOG.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_page_has_more_than_1800_words(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_start_with_a_verb_or_the_thing_itself(package: str) -> None:
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if UNTOUCHED in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split(maxsplit=1)
                if words and words[0] in {"Of", "As"}:
                    wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}")
    assert not wrong
