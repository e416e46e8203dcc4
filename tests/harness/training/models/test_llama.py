"""The Llama against a plain float64 implementation whose rotary positions are complex multiplications."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from harness.training.models import build
from harness.training.models.common import materialise
from harness.training.models.llama import Llama, LlamaConfig, RopeScaling, rotate, rotations

Weights = dict[str, np.ndarray[Any, Any]]
SMALL = LlamaConfig(31, 4096, 2, 32, 4, 2, 48)


def made(config: LlamaConfig) -> Llama:
    """In float64, with gains that are not 1."""
    with torch.device("meta"):
        model = Llama(config)
    materialise(model, "cpu", 0, model.init_std)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.double()


def frequency(config: LlamaConfig, i: int) -> float:
    """Frequency of pair i by wavelength, as written in meta-llama/llama-models."""
    f = config.theta ** (-2 * i / config.head_dim)
    s = config.rope_scaling
    if s is None:
        return f
    wavelength = 2 * math.pi / f
    if wavelength < s.original_seq / s.high_freq_factor:
        return f
    if wavelength > s.original_seq / s.low_freq_factor:
        return f / s.factor
    smooth = (s.original_seq / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1 - smooth) * f / s.factor + smooth * f


def turned(config: LlamaConfig, x: np.ndarray) -> np.ndarray:
    """One head [T, head_dim]: pairs as complex numbers, times e^(i position frequency)."""
    half = config.head_dim // 2
    f = np.array([frequency(config, i) for i in range(half)])
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.arange(len(x))[:, None] * f)
    return np.concatenate([z.real, z.imag], axis=1)


def rms_norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain


def reference(config: LlamaConfig, w: Weights, tokens: np.ndarray) -> np.ndarray:
    """Logits of one sequence, head by head."""
    x = w["embedding.weight"][tokens]
    size, group = config.head_dim, config.heads // config.kv_heads
    mask = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for i in range(config.layers):
        at = f"layers.{i}."
        n = rms_norm(x, w[at + "attention_norm.weight"])
        q, k, v = (n @ w[f"{at}attention.{name}.weight"].T for name in "qkv")
        mixed = []
        for h in range(config.heads):
            own, read = slice(h * size, (h + 1) * size), slice(h // group * size, (h // group + 1) * size)
            scores = turned(config, q[:, own]) @ turned(config, k[:, read]).T / np.sqrt(size) + mask
            weights = np.exp(scores - scores.max(1, keepdims=True))
            mixed.append(weights / weights.sum(1, keepdims=True) @ v[:, read])
        x = x + np.concatenate(mixed, 1) @ w[at + "attention.o.weight"].T
        n = rms_norm(x, w[at + "ffn_norm.weight"])
        gate, up = (n @ w[f"{at}ffn.{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "ffn.down.weight"].T
    head = w.get("head.weight", w["embedding.weight"])
    return rms_norm(x, w["norm.weight"]) @ head.T


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        dataclasses.replace(SMALL, tied=True, kv_heads=4, theta=10000.0),
        dataclasses.replace(SMALL, kv_heads=1, rope_scaling=RopeScaling(32.0)),
    ],
    ids=["grouped", "tied, as many keys as queries", "one key head, stretched"],
)
def test_logits(config: LlamaConfig) -> None:
    """Oracle: `reference`. Rotations are float32 in the model: angle and sine each within 2^-24 of themselves and a
    position below 20, so a relative error of some 20 x 2^-23 at most; the rest is float64."""
    model = made(config)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    tokens = torch.randint(0, 31, (2, 20))
    want = np.stack([reference(config, weights, row.numpy()) for row in tokens])
    got = model(tokens).detach().numpy()
    assert np.abs(got - want).max() < 20 * 2**-23 * np.abs(want).max()


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_1b", "llama2_7b"])
def test_rotations_of_published_models(name: str) -> None:
    """Oracle: complex multiplication in float64, frequencies by wavelength. A float32 angle of up to 4095 rad has an
    error of 4095 x 2^-23 from frequency and product, and a turn of a unit vector errs by no more."""
    config = published(name)
    x = torch.randn(4096, 1, config.head_dim)
    got = rotate(x[None], *rotations(config, 4096, torch.device("cpu")))[0, :, 0].double().numpy()
    want = turned(config, x[:, 0].double().numpy())
    assert np.abs(got - want).max() < 4095 * 2**-23 * np.abs(want).max()


def published(name: str) -> LlamaConfig:
    config = build(name, device="meta", layers=1).config
    assert isinstance(config, LlamaConfig)
    return config
