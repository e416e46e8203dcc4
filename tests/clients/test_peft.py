"""LoRA on a converted model, and conversion of a model that has LoRA."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -e '.[clients]'")
peft = pytest.importorskip("peft", reason="pip install -e '.[clients]'")

from tiny_models import BOUND, batch, largest_difference, losses, made, report
from torch import nn

from fp8core import Float8Linear, audit, convert_to_float8_training, convert_to_high_precision

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
STEPS, RATE = 24, 2e-2


def with_lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], lora_dropout=0.0
    )
    return peft.get_peft_model(model, settings)


def converted(model: nn.Module) -> nn.Module:
    return convert_to_float8_training(
        model, config="rowwise", module_filter_fn=lambda _, fqn: "lora" not in fqn
    )


@pytest.mark.parametrize("order", ["lora first", "fp8 first"])
def test_lora_before_and_after(order: str) -> None:
    """Oracle: LoRA under bfloat16 autocast; the base weights, which must not move; the merged model's logits."""
    plain = made("llama")
    model = copy.deepcopy(plain)
    model = converted(with_lora(model)) if order == "lora first" else with_lora(converted(model))
    rows = audit(model)
    base = [layer for layer in rows.layers if layer.converted]
    assert len(base) == 15
    assert sum("base_layer" in layer.fqn for layer in base) == 8
    frozen = [p for n, p in model.named_parameters() if not p.requires_grad]
    before = [p.detach().clone() for p in frozen]
    found = losses(model, STEPS, RATE)
    bf16 = losses(with_lora(copy.deepcopy(plain)), STEPS, RATE)
    report(f"LoRA, {order}", bf16, found)
    assert largest_difference(found, bf16) < BOUND
    assert found[-1] < 0.98 * found[0]
    assert all(map(torch.equal, frozen, before))
    tokens = batch()["input_ids"]
    merged = convert_to_high_precision(copy.deepcopy(model)).eval()
    adapted = merged(input_ids=tokens).logits
    merged = merged.merge_and_unload()
    assert not any(isinstance(m, Float8Linear) for m in merged.modules())
    assert [type(m) for m in merged.modules()] == [type(m) for m in plain.modules()]
    torch.testing.assert_close(merged(input_ids=tokens).logits, adapted, rtol=1e-4, atol=1e-4)
    assert isinstance(model.merge_and_unload().model.layers[0].self_attn.q_proj, Float8Linear)
