"""The page of advice. Oracles: the command that each cell names; the committed cells; the words' own meaning."""

from __future__ import annotations

import re

from advice_page import (
    ROOT,
    WORDS,
    accuracy_of,
    from_json,
    page,
)

from harness.advise import losses

PUBLISHED = ROOT / "reports" / "published"
CELLS = from_json((PUBLISHED / "advice.json").read_text())
NUMBER = re.compile(r"\d[\d,.]*")


def test_the_page_is_what_its_cells_and_the_document_give() -> None:
    """Run `make published` where this fails."""
    accuracy = accuracy_of(ROOT / "docs" / "advise-accuracy.md")
    assert (PUBLISHED / "advice.html").read_text() == page(CELLS, accuracy)


def test_the_first_screen_has_every_verdict_on_the_loss_of_a_recipe_that_it_names() -> None:
    """Oracle: the table of verdicts itself, with the gap and the word of each; a recipe without one is named."""
    first = page(CELLS, accuracy_of(ROOT / "docs" / "advise-accuracy.md")).partition("<table")[0]
    recipes = {cell.recipe for cell in CELLS.values()} - {""}
    judged = [each for each in losses.known() if each.recipe in recipes]
    assert {each.recipe for each in judged} >= {"tensorwise"}
    assert [each for each in judged if f"{each.recipe} {each.word} {each.gap}" not in first] == []
    assert [name for name in recipes if name not in first] == []


def test_on_is_never_said_of_an_interval_that_contains_1() -> None:
    seen = set()
    for cell in CELLS.values():
        assert cell.word in WORDS
        seen.add(cell.word)
        if cell.word in ("on", "partial"):
            low, high = map(float, NUMBER.findall(cell.interval))
            assert 1 < low < high, cell
            assert low < float(cell.ratio.rstrip("x")) < high
        if cell.word in ("off", "does not fit"):
            assert cell.reason
            assert not cell.ratio or float(cell.ratio.rstrip("x")) <= 1.02, "no gain stands beside a no"
    assert {"on", "off", "can't tell", "does not fit"} <= seen
