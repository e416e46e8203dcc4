"""block: the predicted table by hand, and what hands on an amax is worth what it says."""

from __future__ import annotations

from pathlib import Path

import fused_block as block
import pytest

from harness.advise.rates import rates_of
from harness.advise.recipes import candidates
from harness.machine.hardware import named

RATES = rates_of(named("h200"))


def test_what_handing_on_saves_in_tensorwise() -> None:
    """Oracle: by hand: two bytes for each element of the gradients of gate, up and o; six of an addition in both arms."""
    recipe = candidates(compiled=False)["tensorwise"]
    saved = block.seconds(RATES, recipe, False) - block.seconds(RATES, recipe, True)
    elements = 16384 * (14336 + 14336 + 4096)
    casts = 2 * elements / (RATES["bandwidth"] * RATES["casts"])
    addition = 6 * 16384 * 4096 / RATES["bandwidth"]
    assert saved == pytest.approx(casts + addition)
    assert block.seconds(RATES, None, False) - block.seconds(RATES, None, True) == pytest.approx(addition)


def test_predictions_keep_their_order() -> None:
    """Oracle: the bytes of the casts: after is never below before, and blockwise is the least of all, near to no gain."""
    for rates in (RATES, block.cautious_rates(RATES)):
        found = {p.recipe: p for p in block.predictions(rates)}
        assert all(p.after >= p.before - 0.002 for p in found.values())
        assert min(found, key=lambda name: found[name].after) == "blockwise"
        assert found["delayed"].after > found["tensorwise"].after > found["rowwise"].after
    assert {p.recipe: p for p in block.predictions(block.cautious_rates(RATES))}["blockwise"].after < 1


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: docs/training.md holds what is printed."""
    assert block.main([]) == 0
    printed = capsys.readouterr().out.strip().splitlines()
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert "\n".join(printed[2:]) in page
