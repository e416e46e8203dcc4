"""Hugging Face models convert, train beside bfloat16 and turn back."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers", reason="pip install -e '.[clients]'")

import tiny_models
from tiny_models import BOUND, largest_difference, losses, made, report
from torch import nn

from fp8core import (
    Float8Linear,
    audit,
    convert_experts_to_float8,
    convert_to_float8_training,
    convert_to_high_precision,
)

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

LAYERS = {"llama": 15, "gpt2": 9, "qwen_moe": 15, "bert": 14}  # by their code; eight of GPT-2's are Conv1D
STACKS = {"qwen_moe": 4}


def added(module: nn.Module, was: nn.Module) -> set[str]:
    """Attributes that the way back left on a module; why it was not converted may stay."""
    return {name for name in vars(module).keys() - vars(was).keys() if name != "_fp8core_not_converted"}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("name", LAYERS)
def test_losses_beside_bf16_and_the_way_back(name: str, recipe: str) -> None:
    """Oracle: the same model under bfloat16 autocast; then its classes, and its own strict load."""
    plain = made(name)
    fp8 = convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    if name in STACKS:
        convert_experts_to_float8(fp8)
    assert sum(isinstance(m, Float8Linear) for m in fp8.modules()) == LAYERS[name], audit(fp8)
    assert sum(stack.converted for stack in audit(fp8).experts) == STACKS.get(name, 0)
    assert fp8.state_dict().keys() == plain.state_dict().keys()
    bf16 = losses(copy.deepcopy(plain))
    found = losses(fp8)
    report(f"{name}, {recipe}", bf16, found)
    assert largest_difference(found, bf16) < BOUND
    assert largest_difference(losses(copy.deepcopy(plain), lr=1.5e-3), bf16) > BOUND
    expected = tiny_models.batch()
    back = convert_to_high_precision(fp8)
    assert [type(m) for m in back.modules()] == [type(m) for m in plain.modules()]
    assert not [
        vars(m).keys() for m, was in zip(back.modules(), plain.modules(), strict=True) if added(m, was)
    ]
    plain.load_state_dict(back.state_dict(), strict=True)
    assert plain(**expected).loss == back(**expected).loss
