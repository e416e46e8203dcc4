"""The page of advice. Oracles: the command that each cell names; the committed cells; the words' own meaning."""

from __future__ import annotations

import re

import pytest
from advice_map import draw
from advice_page import (
    ROOT,
    WORDS,
    accuracy_of,
    answered,
    from_json,
    page,
    words_of,
)

from harness.store.errors import UsageError

PUBLISHED = ROOT / "reports" / "published"
CELLS = from_json((PUBLISHED / "advice.json").read_text())
NUMBER = re.compile(r"\d[\d,.]*")
# A handful, spread over models, GPUs, modes and sizes: an answer takes a second.
SAMPLE = list(CELLS)[:: len(CELLS) // 7]


def test_the_page_is_what_its_cells_and_the_document_give() -> None:
    """Run `make published` where this fails."""
    accuracy = accuracy_of(ROOT / "docs" / "advise-accuracy.md")
    assert (PUBLISHED / "advice.html").read_text() == page(CELLS, accuracy)


@pytest.mark.parametrize("key", SAMPLE, ids=lambda key: "-".join(map(str, key)))
def test_a_cell_is_what_its_command_answers(key: tuple[str, str, str, int]) -> None:
    """Words exactly; figures to 2 %, since another torch may trace a norm as more or fewer operators."""
    if "/" in key[0]:
        pytest.importorskip("transformers", reason="the extra hf is not installed")
    committed, now = CELLS[key], answered(words_of(*key))
    for name in ("word", "recipe", "reason", "command"):
        assert getattr(now, name) == getattr(committed, name)
    for one, other in zip((now.ratio, now.interval), (committed.ratio, committed.interval), strict=True):
        assert [float(x) for x in NUMBER.findall(one)] == pytest.approx(
            [float(x) for x in NUMBER.findall(other)], rel=0.02
        )


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


def test_the_committed_picture_is_that_of_the_committed_cells() -> None:
    """Its words, since the bytes depend on the version of what draws. Run `make published` where this fails."""
    texts = [
        re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        for svg in (draw(CELLS), (PUBLISHED / "advice_map.svg").read_text())
    ]
    assert texts[0] == texts[1]
    assert any("PREDICTED, no GPU measured" in text for text in texts[1])


def test_a_refused_command_makes_no_cell() -> None:
    """A library that is absent says nothing of FP8; the page names no folder of the machine that made it."""
    with pytest.raises(UsageError, match=r"^unknown model"):
        answered(["model=no_such_model", "gpu=h200"])
    assert str(ROOT) not in (PUBLISHED / "advice.json").read_text()
    assert not [cell for cell in CELLS.values() if "not installed" in cell.reason]
