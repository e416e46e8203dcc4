"""fp8core's norm and activation inside of a Llama. Oracle: the same Llama with PyTorch's.

In float32 on a CPU both forms of the forward pass are the same formula, so the first losses are equal bit for bit; the
backward passes sum in another order. In bfloat16 PyTorch rounds between its operators where the fused form does not,
so that only closeness to float32 can be asked.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp8core import RECIPES, CastInput, Float8Linear, PrecisionSchedule
from harness.training import meta_estimate
from harness.training.models import build
from harness.training.models.fused import fuse
from harness.training.setup import Setup, prepare

SMALL = Setup("llama_tiny", batch=2, seq=32, compute="fp32", layers=2, vocab_size=256)


def test_norms_and_activations_hand_casts_to_the_layers_that_read_them() -> None:
    """What each Float8Linear of a block gets as input: of a fused model always casts, made once a tensor."""
    model = prepare(replace(SMALL, recipe=RECIPES["tensorwise"], fused_modules=True), "cpu").model
    got: dict[str, object] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Float8Linear):
            layer.register_forward_pre_hook(lambda _, args, name=name: got.__setitem__(name, args[0]))
    model(torch.zeros(1, 32, dtype=torch.int64), torch.zeros(1, 32, dtype=torch.int64))
    first = {name.removeprefix("layers.0."): x for name, x in got.items() if name.startswith("layers.0.")}
    assert isinstance(first["ffn.down"], CastInput)
    assert isinstance(first["attention.q"], CastInput)
    assert isinstance(first["ffn.gate"], CastInput)
    assert first["attention.q"] is first["attention.k"] is first["attention.v"]
    assert first["ffn.gate"] is first["ffn.up"]
    assert not isinstance(first["attention.o"], CastInput)  # attention's result has no producer of ours


def test_layers_that_a_schedule_holds_back_read_plain_tensors() -> None:
    """Bit for bit the fused model without FP8."""
    trainee = prepare(replace(SMALL, recipe=RECIPES["delayed"], fused_modules=True), "cpu")
    schedule = PrecisionSchedule.parse("warmup_bf16:5")
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(1))
    schedule.apply(trainee.model, 0, 10)
    plain = prepare(replace(SMALL, fused_modules=True), "cpu")
    assert torch.equal(
        trainee.model(tokens[:, :-1], tokens[:, 1:]), plain.model(tokens[:, :-1], tokens[:, 1:])
    )


def test_a_model_that_has_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="has no RMSNorm and no SwiGLU"):
        fuse(build("nano", device="meta"))
    why = meta_estimate.unsupported(replace(SMALL, model="nano", fused_modules=True, seq=16), "cpu", 1 << 40)
    assert why is not None
    assert why.kind == "shape"
    assert "take a Llama" in why.reason
