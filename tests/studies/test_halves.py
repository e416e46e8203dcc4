"""The split of the published figures. Oracle: sha256 worked out by coreutils, so that no later change can move a row.

printf '%s' 'torchao docs, training workflow|llama3_8b|B200|mxfp8' | sha256sum
"""

from __future__ import annotations

import pytest
from speedups.halves import FITTED, HELD_OUT, half
from speedups.table import RAW, SEEN


@pytest.mark.parametrize(
    ("source", "model", "gpu", "recipe", "first", "expected"),
    [
        ("torchao docs, training workflow", "llama3_8b", "B200", "mxfp8", 0x44, HELD_OUT),
        ("torchtitan issue 1207", "llama3_8b", "H100 500 W, HBM2e", "rowwise", 0xA0, FITTED),
        ("RFC of 2023", "llama2_7b", "H100 500 W, HBM2e", "tensorwise", 0x61, FITTED),
    ],
)
def test_a_row_stays_in_its_half(
    source: str, model: str, gpu: str, recipe: str, first: int, expected: str
) -> None:
    assert half(source, model, gpu, recipe) == expected == (HELD_OUT if first < 86 else FITTED)


def test_every_row_of_the_table_lies_where_its_key_says() -> None:
    for cells in RAW:
        assert cells["half"] == half(cells["source"], cells["model"], cells["gpu"], cells["recipe"])
        assert cells["seen"] in SEEN
        assert cells["date"]
    assert {cells["half"] for cells in RAW} == {FITTED, HELD_OUT}
    assert 0.2 < sum(cells["half"] == HELD_OUT for cells in RAW) / len(RAW) < 0.45
