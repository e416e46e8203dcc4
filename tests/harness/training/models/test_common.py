"""The loss in pieces, checkpointing, and weights that depend on nothing but seed and name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from harness.training.models import build
from harness.training.models.common import (
    INIT_STD,
    LOSS_CHUNK,
    materialise,
    mean_cross_entropy,
)


@pytest.mark.parametrize("tokens", [1, LOSS_CHUNK, LOSS_CHUNK + 1, 2 * LOSS_CHUNK + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss(tokens: int, dtype: torch.dtype) -> None:
    """Oracle: torch's cross_entropy in float64 of the same logits; the gradient is rounded once to their dtype."""
    logits = (8 * torch.randn(tokens, 33)).to(dtype).requires_grad_()
    targets = torch.randint(0, 33, (tokens,))
    loss = mean_cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    want = functional.cross_entropy(logits.double(), targets)
    # |l| < 44, so logsumexp errs by 44 x 2^-24; where the target's logit is the largest, their difference cancels
    torch.testing.assert_close(loss.double(), want, rtol=4e-7, atol=44 * 2**-24)
    (grad,) = torch.autograd.grad(3 * loss, logits)
    (wanted,) = torch.autograd.grad(3 * want, logits)
    eps = torch.finfo(dtype).eps
    # l - logsumexp errs by 44 x 2^-24 for logsumexp and by 88 more: p by 133 x 2^-24 of itself, p - 1 by that
    error = 133 * 2**-24
    torch.testing.assert_close(grad, wanted.to(dtype), rtol=eps + error, atol=3 * error / tokens)


def test_loss_keeps_no_float32_logits() -> None:
    """Oracle: what autograd saves: the logits themselves, the targets, one float32 a token."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    logits = torch.randn(64, 33, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        mean_cross_entropy(logits, torch.zeros(64, dtype=torch.int64))
    large = {t.untyped_storage().data_ptr() for t in saved if t.numel() > 64}
    assert large == {logits.untyped_storage().data_ptr()}


def test_weights_depend_on_seed_and_name_only() -> None:
    """Oracle: the contract of `materialise`, with threads, dtype and other blocks changed."""
    nano = build("nano", seed=3).layers[0].mlp.up.weight  # in another process with another hash(), too
    assert nano.double().sum().item() == pytest.approx(-1.1037189727, rel=1e-6)
    whole = dict(build("llama_tiny", seed=5).named_parameters())
    again = dict(build("llama_tiny", seed=5).named_parameters())
    cut = dict(build("llama_tiny", seed=5, layers=1).named_parameters())
    low = dict(build("llama_tiny", seed=5, dtype=torch.bfloat16).named_parameters())
    other = dict(build("llama_tiny", seed=6).named_parameters())
    for name, value in whole.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value.bfloat16(), low[name])
        assert torch.equal(value, other[name]) == (value.dim() == 1)
    for name, value in cut.items():
        # matrices that write into the residual stream are scaled by the number of blocks
        scale = 2**0.5 if name.endswith(("o.weight", "down.weight")) else 1.0
        torch.testing.assert_close(value, whole[name] * scale, rtol=1e-6, atol=0)


def test_spread_of_initial_weights() -> None:
    """Oracle: GPT-2 paper, 2.3: sd 0.02, residual projections over sqrt(2 layers); sample sd of n values within
    4 / sqrt(2 n) of it. Gains 1, biases 0."""
    model = build("gpt2", layers=2, vocab_size=512)
    for name, value in model.named_parameters():
        if value.dim() == 1:
            assert torch.all(value == (0.0 if name.endswith("bias") else 1.0))
            continue
        std = INIT_STD / 2 if name.endswith(("proj.weight", "down.weight")) else INIT_STD
        assert abs(value.std().item() / std - 1) < 4 / (2 * value.numel()) ** 0.5, name
        assert abs(value.mean().item()) < 4 * std / value.numel() ** 0.5, name


def test_shared_parameters_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

    with torch.device("meta"):
        model = Tied()
    materialise(model, "cpu", 0, lambda name: 1.0)
    assert model.second.weight is model.first.weight
    assert not model.first.weight.is_meta
