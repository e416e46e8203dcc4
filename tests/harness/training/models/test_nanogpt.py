"""The GPT against a plain float64 implementation in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import erf

from harness.training.models.common import materialise
from harness.training.models.nanogpt import Gpt, GptConfig

Weights = dict[str, np.ndarray[Any, Any]]


def made(config: GptConfig) -> Gpt:
    """In float64, with gains and biases that are not 1 and 0, so that a forgotten one shows."""
    with torch.device("meta"):
        model = Gpt(config)
    materialise(model, "cpu", 0, model.init_std)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.double().eval()


def layer_norm(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return normed * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


def linear(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def reference(config: GptConfig, w: Weights, tokens: np.ndarray) -> np.ndarray:
    """Logits of one sequence, written from the formulas of the GPT-2 paper; a loop over heads and positions."""
    x = w["embedding.weight"][tokens] + w["positions.weight"][: len(tokens)]
    size = config.width // config.heads
    for i in range(config.layers):
        at = f"layers.{i}."
        q, k, v = np.split(
            linear(layer_norm(x, w, at + "attention_norm"), w, at + "attention.qkv"), 3, axis=1
        )
        mixed = np.zeros_like(x)
        for h in range(config.heads):
            part = slice(h * size, (h + 1) * size)
            for t in range(len(tokens)):
                scores = k[: t + 1, part] @ q[t, part] / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                mixed[t, part] = weights / weights.sum() @ v[: t + 1, part]
        x = x + linear(mixed, w, at + "attention.proj")
        hidden = linear(layer_norm(x, w, at + "mlp_norm"), w, at + "mlp.up")
        x = x + linear(hidden * (1 + erf(hidden / np.sqrt(2))) / 2, w, at + "mlp.down")
    return layer_norm(x, w, "norm") @ w["embedding.weight"].T


def test_logits_and_loss() -> None:
    """Oracle: `reference` in numpy float64, with and without biases; both in float64, so 1e-12 of the largest."""
    for bias in (False, True):
        config = GptConfig(31, 12, 2, 3, 24, bias=bias)
        model = made(config)
        weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
        assert any(name.endswith("bias") for name in weights) == bias
        tokens = torch.randint(0, 31, (2, 12))
        targets = torch.randint(0, 31, (2, 12))
        want = np.stack([reference(config, weights, row.numpy()) for row in tokens])
        got = model(tokens).detach().numpy()
        assert np.abs(got - want).max() < 1e-12 * np.abs(want).max()
        log_sums = np.log(np.exp(want).sum(-1))
        picked = np.take_along_axis(want, targets.numpy()[..., None], -1)[..., 0]
        loss = model(tokens, targets)
        assert loss.dtype == torch.float32
        assert loss.shape == ()
        assert abs(loss.item() / (log_sums - picked).mean() - 1) < 1e-6  # the loss itself is float32
