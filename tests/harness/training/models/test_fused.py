"""fp8core's norm and activation inside of a Llama. Oracle: the same Llama with PyTorch's.

In float32 on a CPU both forms of the forward pass are the same formula, so the first losses are equal bit for bit; the
backward passes sum in another order. In bfloat16 PyTorch rounds between its operators where the fused form does not,
so that only closeness to float32 can be asked.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fp8core import RECIPES, PrecisionSchedule
from harness.training.setup import Setup, prepare

SMALL = Setup("llama_tiny", batch=2, seq=32, compute="fp32", layers=2, vocab_size=256)


def steps(setup: Setup, count: int = 3) -> tuple[list[float], dict[str, Tensor | None]]:
    trainee = prepare(setup, "cpu")
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(count):
        tokens = torch.randint(0, 256, (2, 33), generator=generator)
        losses.append(float(trainee.step([(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())])))
    return losses, {name: p.grad for name, p in trainee.model.named_parameters()}


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
