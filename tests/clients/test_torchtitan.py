"""docs/examples/torchtitan in torchtitan itself. Oracle: the same model converted by `convert_to_float8_training`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("torchtitan", reason="pip install -e '.[clients]'")

from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry

import fp8core

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "docs/examples/torchtitan")
        # flex_attention has no backward pass on a CPU
        patch.setattr(FlexAttention, "forward", lambda self, q, k, v, *_, **__: attention(q, k, v))
        yield importlib.import_module("fp8core_converter")


def attention(*qkv: torch.Tensor) -> torch.Tensor:
    """Causal, of [batch, tokens, heads, size]."""
    parts = (part.transpose(1, 2) for part in qkv)
    return torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)


def built(converters: list) -> torch.nn.Module:
    """torchtitan's order: configured, built on "meta", made empty, initialised."""
    spec = model_registry("debugmodel", converters=converters)
    with torch.device("meta"):
        model = spec.model.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model


def losses(model: torch.nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 2048, (2, 65), generator=torch.Generator().manual_seed(1))
    seen = []
    for _ in range(steps):
        out = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "delayed"])
def test_a_converted_configuration_trains_as_a_converted_model(example: ModuleType, recipe: str) -> None:
    model = built([example.Fp8coreConverter.Config(recipe=recipe)])
    other = fp8core.convert_to_float8_training(
        built([]), config=recipe, module_filter_fn=lambda _, fqn: fqn != "lm_head"
    )
    layers = [name for name, m in model.named_modules() if isinstance(m, fp8core.Float8Linear)]
    assert layers == [name for name, m in other.named_modules() if isinstance(m, fp8core.Float8Linear)]
    assert layers
    assert losses(model) == losses(other) != losses(built([]))


def test_what_stays_is_said_and_nothing_converted_is_an_error(example: ModuleType) -> None:
    with pytest.raises(ValueError, match="lm_head"):
        built([example.Fp8coreConverter.Config(filter_fqns=["layers", "lm_head"])])
