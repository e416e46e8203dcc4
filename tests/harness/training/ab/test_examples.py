"""docs/howto-ab-adapters.md and its scripts. Oracles: the scripts themselves, which run as they stand; the count of their lines."""

from __future__ import annotations

import re
from pathlib import Path

import examples
import pytest

PAGE = examples.ROOT / "docs" / "howto-ab-adapters.md"


@pytest.mark.parametrize("name", examples.NAMES)
def test_at_most_five_lines_change(name: str) -> None:
    written, moved = examples.changed(name)
    assert written <= 5
    row = re.search(rf"\| \[{name}\]\([^)]*\) \| [^|]* \| (\d+) \| (\d+) \|", PAGE.read_text())
    assert row is not None
    assert (int(row[1]), int(row[2])) == (written, moved)


@pytest.mark.parametrize(
    ("name", "ranks"), [("plain_loop", 1), pytest.param("fsdp2_torchrun", 2, marks=pytest.mark.slow)]
)
def test_a_script_comes_to_an_answer_as_it_stands(name: str, ranks: int, tmp_path: Path) -> None:
    found, printed = examples.run(name, tmp_path, ranks)
    for each in found:
        examples.check(each, ranks)
        assert each["layers"] == 15  # of the small Llama: 2 blocks of 7, and the head
    assert printed.count("against bf16 in this loop") == 1
    assert "for speed: cannot tell, because a cpu multiplies FP8 codes in float32" in printed
    if ranks == 2:
        assert "gathered in FP8" in found[1]["proof"]
        assert "the slowest of 2 ranks" in printed
