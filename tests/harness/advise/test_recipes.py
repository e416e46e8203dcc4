"""What our recipes cost. Oracle: bytes that each pass reads and writes, and `fp8core.kernels.traffic`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8core.kernels import traffic
from fp8core.recipe import RECIPES
from harness.advise.cast_traffic import cast_bytes
from harness.advise.casts import TENSORS
from harness.advise.recipes import CASES, COUNTED, candidates, unavailable
from harness.machine.hardware import DEVICES

EAGER, COMPILED = candidates(False), candidates(True)


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


def test_where_a_recipe_cannot_run() -> None:
    assert unavailable("tensorwise", "8.9", False) == ""
    assert unavailable("rowwise", "9.0", True) == ""
    assert "this GPU is 12.0" in unavailable("rowwise", "12.0", True)
    assert "NVIDIA" in unavailable("blockwise", "gfx942", True)
    assert unavailable("rowwise", "gfx942", True) == ""
    assert "take mode=compile" in unavailable("rowwise", "gfx942", False)
    for device in DEVICES:
        assert "emulated" in unavailable("mxfp8", device.capability, True)


SCHEMES_OF = {  # of input, weight and grad_output
    "tensorwise": ("tensorwise both",) * 3,
    "rowwise": ("rowwise both",) * 3,
    "delayed": ("delayed both",) * 3,
    "static": ("delayed both",) * 3,
    "blockwise": ("1x128 both", "128x128 both", "1x128 both"),
    "mxfp8": ("mx both",) * 3,
    "rowwise_with_gw_hp": ("rowwise", "rowwise + tensorwise both", "rowwise"),
}
LIMITS = {"tensorwise": 6.0, "rowwise": 6.0, "blockwise": 4.2, "delayed": 4.1, "static": 4.1}


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_of_casts_are_those_of_the_kernels(name: str) -> None:
    """Oracle: the kernels' own declarations, held by a test to what they load and store; and the promised limits."""
    tensors = dict.fromkeys(TENSORS, (256, 384))
    schemes = [scheme for tensor in SCHEMES_OF[name] for scheme in tensor.split(" + ")]
    declared = sum(traffic.bytes_per_element(scheme) for scheme in schemes)
    found = cast_bytes(RECIPES[name], tensors) / (256 * 384)
    assert found == pytest.approx(declared, rel=1e-12)
    if name in LIMITS:
        assert found / 3 <= LIMITS[name]


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
