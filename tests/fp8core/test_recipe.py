"""recipe: a recipe is data. That the published ones are torchao's: test_config.py and tests/contracts/test_names.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core import BACKENDS, RECIPES, Float8Linear
from fp8core.gemm.reference import Reference


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
