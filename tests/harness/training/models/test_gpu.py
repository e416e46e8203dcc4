"""What only a GPU can show: the same weights and losses there, and the memory that was predicted."""

from __future__ import annotations

import pytest
import torch

from fp8core import convert_to_float8_training
from harness.training.models import build
from harness.training.models.memory import predict

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["nano", "llama_tiny", "llama_moe_tiny"])
def test_weights_and_losses_are_those_of_the_cpu(name: str) -> None:
    """Oracle: the CPU: weights bitwise, the bfloat16 loss to a rounding of bfloat16."""
    here, there = build(name, dtype=torch.bfloat16), build(name, dtype=torch.bfloat16, device="cuda")
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(one, other.cpu())
    tokens = torch.randint(0, 256, (4, 65))
    x, y = tokens[:, :-1], tokens[:, 1:]
    loss = there(x.cuda(), y.cuda())
    loss.backward()
    assert abs(loss.item() / here(x, y).item() - 1) < 2**-8


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_predicted_peak(recipe: str | None, mode: str) -> None:
    """Oracle: torch.cuda.max_memory_allocated of a real pass, within a tenth: operators have scratch memory."""
    meta = build("llama_125m", device="meta", dtype=torch.bfloat16, layers=4, checkpointing=mode)
    model = build("llama_125m", device="cuda", dtype=torch.bfloat16, layers=4, checkpointing=mode)
    if recipe is not None:
        meta, model = (convert_to_float8_training(m, config=recipe) for m in (meta, model))
    tokens = torch.randint(0, 32000, (8, 1024), device="cuda")
    predicted = predict(meta, (tokens, tokens), device="cuda")
    for _ in range(2):  # the second pass finds the gradients of the first, as accumulation does
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(tokens, tokens).backward()
    peak = torch.cuda.max_memory_allocated() - before
    total = sum(predicted[part] for part in ("fp8_weights", "logits", "activations", "workspace"))
    assert 0.9 * peak <= total <= 1.1 * peak
