"""Checkpoints that were written earlier still load and still compute the same. `python tests/contracts/test_checkpoints.py`
writes one of today beside the older ones, where the format was meant to grow."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8core

DATA = Path(__file__).parent / "data" / "checkpoints"
RECIPES = ("tensorwise", "rowwise", "delayed")


def model(recipe: str | None) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16, bias=False))
    return plain if recipe is None else fp8core.convert_to_float8_training(plain, config=recipe)


def trained(recipe: str, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    network = model(recipe)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        network(torch.randn(16, 32, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fp8core.update_scales(network)
    return network, optimizer


def batch() -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(99))


def saved(recipe: str) -> dict[str, object]:
    """Everything that a trainer keeps, and what the model computes."""
    network, optimizer = trained(recipe)
    return {
        "model": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amax": fp8core.amax_state_dict(network),
        "output": network(batch()).detach(),
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_old_checkpoint_loads_and_computes_the_same(recipe: str) -> None:
    """Oracle: the output that was stored with it. Float32 sums may differ in order, FP8 codes not."""
    files = sorted(DATA.glob(f"{recipe}-*.pt"))
    assert files
    for file in files:
        old = torch.load(file, weights_only=True)
        network = model(recipe)
        nn.init.zeros_(network[0].weight)
        network.load_state_dict(old["model"])
        fp8core.load_amax_state_dict(network, old["amax"])
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        optimizer.load_state_dict(old["optimizer"])
        torch.testing.assert_close(network(batch()).detach(), old["output"], rtol=1e-5, atol=1e-6)
        # A plain model takes the same weights: converting adds no key.
        plain = model(None)
        plain.load_state_dict(old["model"])
        assert torch.equal(plain[0].weight, network[0].weight)
        # And what is written today has the keys of then.
        assert list(network.state_dict()) == list(old["model"])
        assert fp8core.amax_state_dict(network).keys() == old["amax"].keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_goes_round(recipe: str) -> None:
    """Bit for bit, by way of a file that holds tensors and plain values alone."""
    content = saved(recipe)
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    network = model(recipe)
    network.load_state_dict(back["model"])
    fp8core.load_amax_state_dict(network, back["amax"])
    assert torch.equal(network(batch()).detach(), content["output"])  # type: ignore[arg-type]


if __name__ == "__main__":
    DATA.mkdir(parents=True, exist_ok=True)
    for name in RECIPES:
        torch.save(saved(name), DATA / f"{name}-{sys.argv[1]}.pt")
