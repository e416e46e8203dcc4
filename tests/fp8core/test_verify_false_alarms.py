"""verify has nothing against correct recipes: data of many seeds, sizes, dtypes and shapes of a model.

Oracle: fp8core's own layers, which the rest of the suite holds to ml_dtypes, gfloat, torchao and float64.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from recipes import ON_CPU
from torch import nn

from fp8core import RECIPES, Proof, convert_to_float8_training, microbatches, update_scales, verify

# (batch dimensions, in, hidden, out)
SHAPES = (
    ((16,), 16, 16, 16), ((32,), 32, 64, 16), ((2, 24), 48, 80, 32), ((64,), 128, 128, 64), ((16,), 256, 32, 16),
    ((4, 4, 4), 64, 192, 128), ((128,), 144, 16, 48), ((160,), 32, 272, 16), ((48,), 16, 400, 16), ((256,), 64, 64, 64),
)  # fmt: skip
KINDS = ("gaussian", "outliers", "positive", "tiny", "constant rows")


def data(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.randn(*shape)
    if kind == "outliers":
        return torch.where(torch.rand_like(x) < 0.01, 1000 * x, x)
    if kind == "positive":
        return x.abs() + 1
    if kind == "tiny":
        return 1e-9 * x
    return x.mean(-1, keepdim=True).expand_as(x).contiguous() if kind == "constant rows" else x


def judged(name: str, seed: int, shape: int) -> Proof:
    """Proof of a step whose data, dtype, biases, kernels and microbatches follow from seed and shape."""
    torch.manual_seed(1000 * seed + shape)
    batch, K, H, N = SHAPES[shape]
    recipe = RECIPES[name].with_kernels("always" if seed % 3 == 0 else "auto")
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    model: nn.Module = nn.Sequential(nn.Linear(K, H, bias=seed % 4 < 2), nn.GELU(), nn.Linear(H, N))
    model = convert_to_float8_training(model.to(dtype), config=recipe)
    kind = KINDS[(seed + shape) % len(KINDS)]

    def step() -> None:
        with microbatches(model):
            for _ in range(1 + seed % 2):
                x = data(kind, (*batch, K)).to(dtype).requires_grad_()
                nn.functional.cross_entropy(
                    model(x).flatten(0, -2).float(), torch.arange(x[..., 0].numel()) % N
                ).backward()
        update_scales(model)

    if seed % 5 == 0:
        step()
        model.zero_grad()
    return verify(step, model, announce=False)


@pytest.mark.parametrize("name", ON_CPU)
def test_no_false_alarm(name: str) -> None:
    seed = ON_CPU.index(name)
    for shape in (seed % 10, (seed + 5) % 10):
        proof = judged(name, seed, shape)
        assert proof.ok, (shape, proof.line)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_no_false_alarm_in_the_whole_grid(name: str) -> None:
    alarms = [
        (seed, shape, proof.line)
        for seed, shape in itertools.product(range(20), range(len(SHAPES)))
        if not (proof := judged(name, seed, shape)).ok
    ]
    assert alarms == []
