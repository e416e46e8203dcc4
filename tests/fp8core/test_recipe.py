"""recipe: a recipe is data. That the published ones are torchao's: test_config.py and tests/contracts/test_names.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8core import BACKENDS, RECIPES, AmaxHistory, Cast, Float8Linear, Gemm
from fp8core.formats import E4M3FN
from fp8core.gemm.reference import Reference


def test_bad_parts_are_refused_when_the_recipe_is_made() -> None:
    rowwise = RECIPES["rowwise"]
    for said, make in (
        ("nearest: triton", lambda: rowwise.with_backend("tritan")),
        ("nearest: triton", lambda: replace(rowwise, backend="tritan")),
        ("None is unknown", lambda: rowwise.with_backend(None)),
        ("kernels 'on' is unknown", lambda: rowwise.with_kernels("on")),
        ("nearest: rowwise", lambda: Cast(E4M3FN, "row")),
        ("both operands or neither", lambda: Gemm(Cast(E4M3FN), None)),
        ("length 0 remembers nothing", lambda: AmaxHistory(length=0)),
        ("nearest: max", lambda: AmaxHistory(algorithm="mex")),
    ):
        with pytest.raises(ValueError, match=said):
            make()


def test_a_new_backend_is_one_class_and_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: backend "reference", whose product it doubles. A recipe takes its name, and a layer multiplies by it."""

    class Doubled(Reference):
        def matmul(self, *operands: Any) -> torch.Tensor:
            return 2 * super().matmul(*operands)

    monkeypatch.setitem(BACKENDS, "doubled", Doubled("doubled"))
    layer = Float8Linear(32, 32, bias=False, config=RECIPES["rowwise"].with_backend("doubled"))
    x = torch.randn(16, 32)
    doubled = layer(x)
    layer.recipe = RECIPES["rowwise"].emulated()
    assert torch.equal(doubled, 2 * layer(x))
