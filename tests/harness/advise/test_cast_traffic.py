"""Bytes of fused casts by recipe. Oracle: the kernels' own declarations, and counts by hand."""

from __future__ import annotations

import pytest

from fp8core.kernels import traffic
from fp8core.recipe import RECIPES
from harness.advise.cast_traffic import TENSORS, cast_bytes

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
