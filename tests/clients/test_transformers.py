"""Hugging Face models convert, train beside bfloat16 and turn back."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers", reason="pip install 'fp8-harness[clients]'")

import tiny_models
from tiny_models import BOUND, MODELS, largest_difference, losses, made, report

from fp8core import Float8Linear, audit, convert_to_float8_training, convert_to_high_precision

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

LINEAR = {"llama": 15, "gpt2": 1, "qwen_moe": 15, "bert": 14}  # by their code; GPT-2's others are Conv1D


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_beside_bf16_and_the_way_back(name: str, recipe: str) -> None:
    """Oracle: the same model under bfloat16 autocast; then its classes, and its own strict load."""
    plain = made(name)
    fp8 = convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    assert sum(type(m) is Float8Linear for m in fp8.modules()) == LINEAR[name], audit(fp8)
    assert fp8.state_dict().keys() == plain.state_dict().keys()
    bf16 = losses(copy.deepcopy(plain))
    found = losses(fp8)
    report(f"{name}, {recipe}", bf16, found)
    assert largest_difference(found, bf16) < BOUND
    assert largest_difference(losses(copy.deepcopy(plain), lr=1.5e-3), bf16) > BOUND
    expected = tiny_models.batch()
    back = convert_to_high_precision(fp8)
    assert [type(m) for m in back.modules()] == [type(m) for m in plain.modules()]
    plain.load_state_dict(back.state_dict(), strict=True)
    assert plain(**expected).loss == back(**expected).loss
