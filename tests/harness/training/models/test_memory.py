"""Predicted bytes against what autograd really saves and what the allocator really hands out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fp8core import convert_to_float8_training
from fp8core.formats import E4M3FNUZ
from fp8core.recipe import RECIPES, Cast, Gemm
from harness.training.models import CHECKPOINTING, build
from harness.training.models.memory import GIB, PARTS, fits, of_weights, predict

BATCH, SEQ = 4, 32


def made(name: str, recipe: str | None, mode: str, device: str, **more: Any) -> nn.Module:
    model = build(name, device=device, checkpointing=mode, **more)
    return model if recipe is None else convert_to_float8_training(model, config=recipe)


class Summed(nn.Module):
    """The sum of what a model makes, as a loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.inner(x).sum()
        return total


def tokens(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(BATCH, SEQ, dtype=torch.int64, device=device)
    return x, x.clone()


def allocated_peak(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> int:
    """The most bytes that the CPU allocator had out during a real pass, by its own events."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    model(*batch).backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(*batch).backward()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("dtype", "mode"), [*((torch.float32, mode) for mode in CHECKPOINTING), (torch.bfloat16, "none")]
)
@pytest.mark.parametrize("name", ["nano", "llama_tiny", "llama_moe_tiny"])
def test_peak(name: str, mode: str, dtype: torch.dtype) -> None:
    """Oracle: the CPU allocator's events of a real pass, exactly. Checkpointing also keeps the state of the random
    numbers for each block, which no operator makes. (bfloat16 products have scratch memory of their own on a CPU,
    which shows where they run at the peak: under checkpointing, 2 % of this model's.)"""
    predicted = predict(made(name, None, mode, "meta", dtype=dtype), tokens("meta"))
    pass_only = sum(predicted[part] for part in ("fp8_weights", "logits", "activations", "workspace"))
    model = made(name, None, mode, "cpu", dtype=dtype)
    random_state = 0 if mode == "none" else torch.get_rng_state().numel() * len(model.layers)
    assert pass_only + random_state == allocated_peak(model, tokens("cpu"))


def test_casts_on_a_gpu_take_no_temporaries() -> None:
    """Oracle: by hand; one layer 1024 -> 1024 on 4096 rows: plain casts hold wider copies, the kernels only codes."""
    layer = convert_to_float8_training(nn.Sequential(nn.Linear(1024, 1024, bias=False)).bfloat16().to("meta"))
    rows = torch.empty(4096, 1024, device="meta", dtype=torch.bfloat16)
    plain, fused = (predict(Summed(layer), (rows,), device=device) for device in ("cpu", "cuda"))
    assert {part: plain[part] - fused[part] for part in PARTS if part != "workspace"} == dict.fromkeys(
        (part for part in PARTS if part != "workspace"), 0
    )
    assert plain["workspace"] - fused["workspace"] > rows.numel()


@pytest.mark.parametrize("where", ["ROCm", "fnuz", "never"])
def test_casts_without_a_kernel_take_temporaries_on_a_gpu_too(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the plain casts of a CPU, byte for byte; a GPU's are less (the test above)."""
    recipe = RECIPES["tensorwise"].emulated()
    if where == "ROCm":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    elif where == "fnuz":
        each = Cast(E4M3FNUZ, "tensorwise")
        recipe = replace(recipe, **dict.fromkeys(recipe.gemms, Gemm(each, each)))
    else:
        recipe = recipe.with_kernels("never")
    linear = nn.Sequential(nn.Linear(1024, 1024, bias=False)).bfloat16().to("meta")
    layer = Summed(convert_to_float8_training(linear, config=recipe))
    rows = torch.empty(4096, 1024, device="meta", dtype=torch.bfloat16)
    assert predict(layer, (rows,), device="cuda") == predict(layer, (rows,))


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_what_weights_take_is_known_without_a_pass(recipe: str | None) -> None:
    """Oracle: the whole prediction."""
    model = made("llama_tiny", recipe, "none", "meta")
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    whole = predict(model, tokens("meta"))
    assert of_weights(model) == {part: whole[part] for part in ("weights", "gradients", "optimizer")}
    assert whole["gradients"] < whole["weights"]


def test_fits() -> None:
    """Oracle: the sum; the message names the parts, and how much smaller a batch must be where one can help."""
    weights = {"weights": 2 * GIB, "gradients": 2 * GIB, "optimizer": 4 * GIB}
    parts = dict.fromkeys(PARTS, 0) | weights | {"activations": 10 * GIB}
    assert fits(parts, 18 * GIB) is None
    short, bound, hopeless = fits(parts, 12 * GIB), fits(weights, 6 * GIB), fits(parts, 6 * GIB)
    assert short is not None
    assert "18.00 GiB" in short
    assert "activations 10.00, optimizer 4.00" in short
    assert "2.5 times smaller" in short
    assert bound is not None
    assert "at least 8.00 GiB" in bound
    assert hopeless is not None
    assert "times smaller" not in hopeless  # no batch makes the weights fit
