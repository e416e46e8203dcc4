"""What our recipes cost. Oracle: bytes that each pass reads and writes, and `fp8core.kernels.traffic`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8core.recipe import RECIPES
from harness.advise.cast_traffic import cast_bytes
from harness.advise.recipes import CASES, COUNTED, candidates

COMPILED = candidates(True)


def test_bytes_of_generated_code() -> None:
    """Oracle: reports/published/studies/compiled-casts.md, what Inductor counts; and by hand its mean over a Llama-3-8B block."""
    page = (Path(__file__).parents[3] / "reports" / "published" / "studies" / "compiled-casts.md").read_text()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    rows = {(c[2], c[0]): tuple(map(float, c[4:7])) for c in cells if len(c) > 6 and c[1] == "fp8core"}
    assert rows == {
        (recipe, case): b
        for recipe, counted in COUNTED.items()
        for case, b in zip(CASES, counted, strict=True)
    }
    casts = COMPILED["tensorwise"].casts
    mean = (6 * 4096 + 2 * 2 * 4096 + 4 * 14336) / (3 * 4096 + 14336)
    assert casts["input"].total == pytest.approx(mean)
    assert (casts["weight"].total, casts["grad_output"].total) == pytest.approx((8, 6))
    weight = COMPILED["rowwise_with_gw_hp"].casts["weight"]
    assert (weight.total, weight.strided) == (8, 3), "the amax of its second cast is read in order"


def test_bytes_of_casts_that_differ_by_tensor() -> None:
    """With gw_hp, input and grad_output are cast along one axis (2 + 1), the weight along both, but differently: 2 + 1
    rowwise, and tensorwise 2 + 2 + 1 + 1, of which one copy is dropped.

    Blockwise, the weight is scaled in squares of 128 x 128 for both uses, the other two in lines of 128.
    """
    sizes = {"input": (30, 100), "weight": (50, 100), "grad_output": (30, 50)}
    hp = cast_bytes(RECIPES["rowwise_with_gw_hp"], sizes)
    assert hp == 30 * 100 * 3 + 50 * 100 * 9 + 30 * 50 * 3
    block = cast_bytes(RECIPES["blockwise"], sizes)
    lines, squares = 2 + 2 * (1 + 4 / 128), 2 + 2 + 4 / 128**2  # squares: one set of scales for both
    assert block == pytest.approx(30 * 100 * lines + 50 * 100 * squares + 30 * 50 * lines)
    assert (
        cast_bytes(RECIPES["tensorwise"].in_high_precision("output", "grad_input", "grad_weight"), sizes) == 0
    )
