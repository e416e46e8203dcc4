"""The picture of predicted speedups. Oracle: the committed cells, of which `test_advice_page.py` recomputes some from the model."""

from __future__ import annotations

import re
from pathlib import Path

from advice_map import MODE, SIZE, draw
from advice_page import GPUS, MODELS, from_json

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
