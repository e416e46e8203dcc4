"""What torchao's own float8 suite asserts of its training API, asserted of fp8core.

Source: pytorch/ao `test/float8/test_auto_filter.py`, `test_float8_utils.py` and `test_base.py` (2026), their values in words of
our own. docs/migrate-from-torchao.md says which of its assertions fp8core does not take, and why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from recipes import TORCHAO
from torch import nn

from fp8core import E4M3FN, E5M2, Float8Linear, Float8LinearConfig, convert_to_float8_training, quantize
from fp8core.auto_filter import _auto_filter_for_recipe
from fp8core.formats import E4M3FNUZ, E5M2FNUZ
from fp8core.scaling import compute_scale

LARGE = 8192, 4096  # K, N
HIGH = (torch.float32, torch.float16, torch.bfloat16)
EMULATED = Float8LinearConfig(emulate=True)


@pytest.mark.parametrize(
    ("recipe", "size", "fqn", "left_out", "taken"),
    [
        ("tensorwise", (8192, 2048), "valid.layer", [], True),
        ("tensorwise", (8192, 2048), "skip_layer.linear", ["skip_layer"], False),
        ("tensorwise", (4096, 1024), "valid.layer", [], False),
        ("rowwise", (4096, 8192), "valid.layer", [], True),
        ("rowwise", (4096, 8192), "skip_layer.linear", ["skip_layer"], False),
        ("rowwise", (2048, 4096), "valid.layer", [], False),
        ("rowwise", (4096, 2048), "layer", [], False),
        ("rowwise", (1024, 4112), "layer", [], False),
        *(
            (recipe, LARGE, fqn, ["embed", "norm"], fqn == "model.transformer.layer")
            for recipe in ("tensorwise", "rowwise")
            for fqn in (
                "model.embeddings.linear", "layer.norm.weight", "model.transformer.layer", "embedding_layer",
            )
        ),
    ],
)  # fmt: skip
def test_filters(recipe: str, size: tuple[int, int], fqn: str, left_out: list[str], taken: bool) -> None:
    layer = nn.Linear(*size, device="meta")
    assert _auto_filter_for_recipe(recipe, left_out)(layer, fqn) is taken


@pytest.mark.parametrize(
    ("scale", "rounded"), [(1.0, 1.0), (2.0**-100, 2.0**-100), (1 + 2.0**-22, 1.0), (1 - 2.0**-22, 0.5)]
)
def test_scales_are_rounded_down_to_powers_of_two(scale: float, rounded: float) -> None:
    found, _ = compute_scale(torch.tensor(448.0 / scale), E4M3FN, power_of_two=True)
    assert found == rounded


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ], ids=lambda fmt: fmt.name)
def test_casts(fmt: object) -> None:
    for dtype in HIGH:
        x = torch.randn(4, 4, dtype=dtype)
        assert quantize(x, fmt).dequantize().dtype == dtype
    smallest = torch.tensor([fmt.max / torch.finfo(torch.float16).max], dtype=torch.float16)
    assert torch.isfinite(quantize(smallest, fmt).scale_inv.reciprocal())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 16), (2, 16, 16), (3, 2, 16, 16)])
@pytest.mark.parametrize("recipe", [*TORCHAO, "delayed"])
def test_linear(
    recipe: str, shape: tuple[int, ...], dtype: torch.dtype, bias: bool, sqnr_db: Callable[..., float]
) -> None:
    plain = nn.Linear(16, 32, bias=bias, dtype=dtype)
    layer = Float8Linear.from_float(copy.deepcopy(plain), recipe)
    x = torch.randn(shape, dtype=dtype)
    for module in (plain, layer):
        module(x).sum().backward()
    assert sqnr_db(plain(x).detach(), layer(x).detach()) >= 18
    assert sqnr_db(plain.weight.grad, layer.weight.grad) >= 17
    if bias:
        torch.testing.assert_close(layer.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_dtypes_of_results(recipe: str, dtype: torch.dtype) -> None:
    layer = Float8Linear.from_float(nn.Linear(32, 16), recipe).to(dtype)
    x = torch.randn(16, 32, dtype=dtype)
    assert layer(x).dtype == dtype
    for low in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=low):
            assert layer(x).dtype == low
    with torch.inference_mode():
        assert layer(x).dtype == dtype


class Mlp(nn.Module):
    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, out)


def converted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def test_conversion() -> None:
    assert isinstance(convert_to_float8_training(nn.Linear(3, 3), config=EMULATED), Float8Linear)
    root = nn.Linear(3, 3)
    root.child = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="child"):
        convert_to_float8_training(root, config=EMULATED)

    def is_large(layer: nn.Linear, fqn: str) -> bool:
        return all(size >= 32 and size % 16 == 0 for size in (layer.in_features, layer.out_features))

    for chosen, model, expected in (
        (None, nn.Sequential(Mlp(3, 3), nn.Linear(3, 3)), {"0.lin1", "0.lin2", "1"}),
        (is_large, nn.Sequential(Mlp(8, 32), nn.Linear(32, 32), Mlp(40, 160)), {"0.lin2", "1", "2.lin2"}),
        (
            lambda layer, fqn: fqn not in {"0.lin2", "2.lin1"},
            nn.Sequential(Mlp(3, 3), nn.Linear(3, 3), Mlp(3, 3)),
            {"0.lin1", "1", "2.lin2"},
        ),
    ):
        convert_to_float8_training(model, config=EMULATED, module_filter_fn=chosen)
        assert converted(model) == expected
