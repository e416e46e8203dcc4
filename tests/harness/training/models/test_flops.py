"""FLOPs by formula against FlopCounterMode, and against the formulas of the literature."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fp8core import RECIPES, convert_experts_to_float8, convert_to_float8_training
from harness.training.models import CHECKPOINTING, MODELS, build
from harness.training.models.flops import counted_flops, recomputed, register_flop_formulas, step_flops

BATCH, SEQ = 2, 16


def reduced(name: str, checkpointing: str = "none") -> nn.Module:
    """A model of the table with its own proportions of heads, widths and experts, small enough for a CPU."""
    spec = MODELS[name]
    config = spec.config
    shrink = max(1, config.width // 128)
    per_head = config.width // config.heads
    changes = {"width": config.heads * max(2, per_head // shrink // 2 * 2)}
    if hasattr(config, "ffn"):
        changes["ffn"] = max(16, config.ffn // shrink)
    small = dataclasses.replace(spec, config=dataclasses.replace(config, **changes))
    return small.build(layers=2, vocab_size=64, checkpointing=checkpointing)


def batch(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def counted(model: nn.Module) -> int:
    register_flop_formulas()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*batch(model)).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_every_model(name: str) -> None:
    """Oracle: FlopCounterMode over forward and backward with plain attention. The promise is 1 %; it is exact."""
    model = reduced(name)
    assert sum(step_flops(model, BATCH, SEQ).values()) == counted(model)


NAMES = ("nano", "llama_tiny", "llama_moe_tiny")


@pytest.mark.parametrize(
    ("name", "recipe", "mode"),
    [  # each pair of two of the three, plain models and tensorwise whole
        (name, recipe, mode)
        for i, recipe in enumerate([None, "tensorwise", *sorted({*RECIPES} - {"tensorwise", "mxfp4"})])
        for j, name in enumerate(NAMES)
        for k, mode in enumerate(CHECKPOINTING)
        if i < 2 or (i + j + k) % 3 == 0
    ],
)
def test_recipes_and_checkpointing(name: str, recipe: str | None, mode: str) -> None:
    """Oracle: FlopCounterMode, which sees what is run again; and the dtypes of the operands that reach the matmul.

    Recipes in blocks run emulated on a CPU, that is as float32 products of the same sizes. mxfp4 takes no sizes of 48."""
    model = build(name, checkpointing=mode)
    emulated = recipe in ("blockwise", "mxfp8")
    if recipe is not None:
        chosen = RECIPES[recipe].emulated() if emulated else RECIPES[recipe]
        convert_to_float8_training(model, config=chosen)
    step, again = (f(model, BATCH, SEQ, high_precision="fp32") for f in (step_flops, recomputed))
    both = {dtype: step.get(dtype, 0) + again.get(dtype, 0) for dtype in {*step, *again}}
    assert sum(both.values()) == counted(model)
    assert counted_flops(model, batch(model), high_precision="fp32") == both
    assert all(parameter.grad is not None for parameter in model.parameters())  # of `counted` alone


def test_palm_and_causal() -> None:
    """Oracle: 6 N + 12 L H Q T a token (PaLM, appendix B) with N = matmul weights; causal halves the second term."""
    model = build("llama3_8b", device="meta")
    n = 8_030_261_248 - 128256 * 4096 - (2 * 32 + 1) * 4096  # without embedding and gains
    attention = 12 * 32 * 4096 * 8192
    assert step_flops(model, 1, 8192) == {"bf16": 8192 * (6 * n + attention)}
    assert step_flops(model, 1, 8192, formula="causal") == {"bf16": 8192 * (6 * n + attention / 2)}


@pytest.mark.parametrize("mode", CHECKPOINTING)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_experts_in_fp8_as_counted(recipe: str, mode: str) -> None:
    """Oracle: the formula, on a batch whose tokens all fill whole groups of 16: every token to every expert. Rows of
    padding after the last group, which no expert multiplies, don't count."""
    config = dataclasses.replace(MODELS["llama_moe_tiny"].config, top_k=4)
    spec = dataclasses.replace(MODELS["llama_moe_tiny"], config=config)
    model = convert_experts_to_float8(spec.build(checkpointing=mode), config=recipe)
    step, again = (f(model, BATCH, SEQ, high_precision="fp32") for f in (step_flops, recomputed))
    got = counted_flops(model, batch(model), high_precision="fp32")
    for dtype in {"e4m3", "e5m2"} & {*step}:
        assert got[dtype] == step[dtype] + again.get(dtype, 0)
    assert ("e5m2" in step) == (recipe == "tensorwise")
