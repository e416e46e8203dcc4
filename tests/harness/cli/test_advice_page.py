"""The page of advice. Oracles: the command that each cell names; the committed cells; the words' own meaning."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from advice_page import (
    GPUS,
    MODELS,
    MODES,
    ROOT,
    SIZES,
    WORDS,
    accuracy_of,
    answered,
    from_json,
    page,
    words_of,
)

from harness.advise.command import answer, parse

PUBLISHED = ROOT / "reports" / "published"
CELLS = from_json((PUBLISHED / "advice.json").read_text())
NUMBER = re.compile(r"\d[\d,.]*")
# A handful, spread over models, GPUs, modes and sizes: an answer takes a second.
SAMPLE = list(CELLS)[:: len(CELLS) // 7]


def test_the_page_is_what_its_cells_and_the_document_give() -> None:
    """Run `make published` where this fails."""
    accuracy = accuracy_of(ROOT / "docs" / "advise-accuracy.md")
    assert (PUBLISHED / "advice.html").read_text() == page(CELLS, accuracy)


def test_the_cells_are_the_whole_grid_and_name_their_commands() -> None:
    assert set(CELLS) == {(m, g, mode, n) for m in MODELS for g in GPUS for mode in MODES for n in SIZES}
    for key, cell in CELLS.items():
        assert shlex.split(cell.command) == ["python", "-m", "harness", "advise", *words_of(*key)]


@pytest.mark.parametrize("key", SAMPLE, ids=lambda key: "-".join(map(str, key)))
def test_a_cell_is_what_its_command_answers(key: tuple[str, str, str, int]) -> None:
    """Words exactly; figures to 2 %, since another torch may trace a norm as more or fewer operators."""
    committed, now = CELLS[key], answered(words_of(*key))
    assert (now.word, now.recipe, now.command) == (committed.word, committed.recipe, committed.command)
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
            assert not cell.ratio, "no gain stands beside a no"
    assert {"on", "off", "can't tell", "does not fit"} <= seen


def test_what_does_not_fit_is_more_than_the_memory() -> None:
    """By hand: 16 bytes a parameter; 405,853,388,800 of them over 8 H100 are 756 GiB of 80."""
    for n in (1, 8):
        assert CELLS["llama3_405b", "h100", "compile", n].word == "does not fit"
    assert CELLS["llama3_70b", "h100", "compile", 8].word == "does not fit"
    assert CELLS["llama3_70b", "h100", "compile", 64].word != "does not fit"
    assert CELLS["gpt2", "h100", "compile", 1].word != "does not fit"


def test_the_interval_is_that_of_the_record() -> None:
    words = words_of("llama3_8b", "h100", "compile", 64)
    step = answer(parse(words)).chosen.step
    low, high = map(float, NUMBER.findall(answered(words).interval))
    assert (low, high) == pytest.approx((step.low, step.high), rel=1e-2)


def test_the_page_says_first_that_nothing_was_measured_and_how_good_predictions_are() -> None:
    text = (PUBLISHED / "advice.html").read_text()
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)
    first_grid = text.index('<table class="grid">')
    assert text.index("Predicted, no GPU has measured it") < text.index("held out") < first_grid
    captions = re.findall(r"<caption>(.*?)</caption>", text)
    assert len(captions) == len(MODELS) * len(MODES)
    assert all(c.endswith("Predicted, no GPU has measured it.") for c in captions)
    for cell in CELLS.values():
        assert f'title="{cell.command}"' in text


def test_accuracy_is_the_table_of_the_document(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# x\n\n| | one | held out |\n|---|---|---|\n| signs | 1 | 2 |\n\n| a | b |\n"
    )
    assert accuracy_of(tmp_path / "a.md") == [["", "one", "held out"], ["signs", "1", "2"]]
