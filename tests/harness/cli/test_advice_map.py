"""The picture of predicted speedups. Oracle: the committed cells, of which `test_advice_page.py` recomputes some from the model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from advice_map import MODE, SIZE, TITLE, draw, main
from advice_page import GPUS, MODELS, Answered, from_json

from harness.report.heatmap import EDGES
from harness.store.errors import UsageError

PUBLISHED = Path(__file__).parents[3] / "reports" / "published"
CELLS = from_json((PUBLISHED / "advice.json").read_text())
SHOWN = {key: cell for key, cell in CELLS.items() if key[2:] == (MODE, SIZE)}


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_the_committed_picture_is_that_of_the_committed_cells() -> None:
    """Its words, since the bytes depend on the version of what draws. Run `make published` where this fails."""
    drawn = draw(CELLS)
    committed = (PUBLISHED / "advice_map.svg").read_text()
    assert texts(drawn) == texts(committed)
    assert len(SHOWN) == len(MODELS) * len(GPUS)
    said = texts(committed)
    for cell in SHOWN.values():
        if cell.ratio:
            at = said.index(cell.ratio + (" (some layers)" if cell.word == "partial" else ""))
            assert at >= 0
            assert cell.interval in said
    assert said.count("does not fit") == sum(c.word == "does not fit" for c in SHOWN.values()) > 0
    assert said.count("off") == sum(c.word == "off" for c in SHOWN.values()) > 0


def test_it_says_that_nothing_was_measured() -> None:
    svg = (PUBLISHED / "advice_map.svg").read_text()
    assert TITLE.startswith("PREDICTED, no GPU measured")
    assert TITLE in texts(svg)
    assert f"<title>{TITLE}</title>" in svg


def test_a_colour_means_a_gain_and_doubt_is_hatched() -> None:
    """All cells one word at a time: only a gain has the colour of one."""
    gain = Answered("on", "1.34x", "1.14 to 1.57", "tensorwise", "")
    words = {
        "on": gain,
        "can't tell": Answered("can't tell", "1.34x", "0.9 to 1.8", "tensorwise", ""),
        "off": Answered("off", "", "", "", ""),
        "does not fit": Answered("does not fit", "", "", "", ""),
    }
    for word, cell in words.items():
        svg = draw(dict.fromkeys(CELLS, cell))
        body = svg.partition("</style>")[2]
        assert ("var(--heat-" in body) == (word == "on"), word
        assert ("url(#" in body and "<pattern" in body) == (word == "can't tell"), word
    assert "var(--heat-7)" in draw(dict.fromkeys(CELLS, gain))
    assert EDGES[6] < 1.34 < EDGES[7]


def test_bad_input_is_refused(tmp_path: Path) -> None:
    for words in ([], ["a.html"], [str(tmp_path / "absent.json")]):
        with pytest.raises(UsageError):
            main(words)
