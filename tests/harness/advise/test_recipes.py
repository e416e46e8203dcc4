"""What our recipes cost. Oracle: bytes that each pass reads and writes, and `fp8core.kernels.traffic`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fp8core.recipe import RECIPES
from harness.advise.casts import GEMMS, TENSORS
from harness.advise.recipes import COUNTED, candidates, unavailable
from harness.machine.hardware import DEVICES

if TYPE_CHECKING:
    from harness.advise.casts import RecipeCost

EAGER, COMPILED = candidates(False), candidates(True)


def test_every_recipe_of_fp8core_is_weighed_but_the_one_that_is_measured_once() -> None:
    assert set(EAGER) == set(COMPILED) == set(RECIPES) - {"static"}


@pytest.mark.parametrize(
    ("name", "b"),
    [("tensorwise", 6.0), ("delayed", 4.0), ("rowwise", 6.0), ("blockwise", 4.04), ("mxfp8", 4.06)],
)
def test_bytes_of_fused_casts(name: str, b: float) -> None:
    """Section 3: both layouts fused 6; delayed 4; rowwise dim0 and dim1 6 to 8; blocks 4 to 4.1."""
    casts = EAGER[name].casts
    assert sum(casts[t].total for t in TENSORS) / 3 == pytest.approx(b, abs=0.01)
    assert all(not cast.strided for cast in casts.values()), "kernels transpose in tiles"


def test_bytes_of_generated_code() -> None:
    """Oracle: reports/published/studies/compiled-casts.md, what Inductor counts; and by hand its mean over a Llama-3-8B block."""
    page = (Path(__file__).parents[3] / "reports" / "published" / "studies" / "compiled-casts.md").read_text()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    rows = {(c[2], c[0]): tuple(map(float, c[4:7])) for c in cells if len(c) > 6 and c[1] == "fp8core"}
    assert rows == {(recipe, case): b for recipe, cases in COUNTED.items() for case, b in cases.items()}
    casts = COMPILED["tensorwise"].casts
    mean = (6 * 4096 + 2 * 2 * 4096 + 4 * 14336) / (3 * 4096 + 14336)
    assert casts["input"].total == pytest.approx(mean)
    assert (casts["weight"].total, casts["grad_output"].total) == pytest.approx((8, 6))


@pytest.mark.parametrize("options", [EAGER, COMPILED])
def test_recomputation_casts_what_the_forward_product_reads(options: dict[str, RecipeCost]) -> None:
    """One layout of input and weight: by hand 2 + 1, and an amax's read before; of the output gradient nothing."""
    for name, found in options.items():
        assert found.casts["grad_output"].forward == 0
        for tensor in ("input", "weight"):
            assert 0 < found.casts[tensor].forward <= found.casts[tensor].total, name
    assert EAGER["tensorwise"].casts["input"].forward == EAGER["tensorwise"].casts["weight"].forward == 5
    assert EAGER["delayed"].casts["input"].forward == COMPILED["tensorwise"].casts["input"].forward == 3
    assert COMPILED["tensorwise"].casts["weight"].forward == 5, "it takes its own amax"


@pytest.mark.parametrize("options", [EAGER, COMPILED])
def test_gemms_are_those_of_the_recipe(options: dict[str, object]) -> None:
    for name, found in options.items():
        assert found.fp8_gemms == tuple(g for g in GEMMS if RECIPES[name].gemms[g].is_fp8)
        assert 0 < found.product_share <= 1
        for tensor in TENSORS:
            assert found.casts[tensor].kernels >= 1


def test_where_a_recipe_cannot_run() -> None:
    assert unavailable("tensorwise", "8.9", False) == ""
    assert unavailable("rowwise", "9.0", True) == ""
    assert "this GPU is 12.0" in unavailable("rowwise", "12.0", True)
    assert "NVIDIA" in unavailable("blockwise", "gfx942", True)
    assert unavailable("rowwise", "gfx942", True) == ""
    assert "take mode=compile" in unavailable("rowwise", "gfx942", False)
    for device in DEVICES:
        assert "emulated" in unavailable("mxfp8", device.capability, True)
