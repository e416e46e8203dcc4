"""What a set-up will take, worked out on a model without weights: FLOPs, memory by part, and how to need less."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fp8core.convert import convert_to_float8_training
from harness.models import ModelSpec, resolve
from harness.models.flops import counted_flops, step_flops
from harness.models.memory import GIB, predict
from harness.training.setup import CHECKPOINTING, Setup

if TYPE_CHECKING:
    from torch import Tensor, nn

Bytes = dict[str, int]


def skeleton(setup: Setup) -> nn.Module:
    """The converted model on "meta". A peer's layers are stood in for by fp8core's.

    Raises:
        UsageError: the model can't be built so.
        ValueError: none of its layers can be converted.
    """
    model = resolve(setup.model).build(
        device="meta",
        dtype=setup.weight_dtype,
        layers=setup.layers,
        vocab_size=setup.vocab_size,
        checkpointing=setup.checkpointing,
    )
    return model if setup.recipe is None else convert_to_float8_training(model, config=setup.recipe)


def memory(setup: Setup, device: str) -> Bytes:
    """Bytes of a step by part; see `harness.models.memory`. Compiled code needs as much or less."""
    return dict(_memory(replace(setup, compiled=False, peer="", accumulation=1), device))


@functools.lru_cache(maxsize=64)
def _memory(setup: Setup, device: str) -> Bytes:
    autocast = torch.bfloat16 if setup.compute == "bf16_autocast" else None
    return predict(skeleton(setup), shapes(setup), device=device, autocast=autocast)


def total(needed: Bytes) -> int:
    """Bytes of all parts."""
    return sum(needed.values())


def flops(setup: Setup, formula: str = "palm") -> dict[str, float]:
    """FLOPs of an optimizer step by dtype, nothing recomputed; of a user's model those that FlopCounterMode counts.

    Args:
        setup: of the arm; FP8 GEMMs of a peer count as those of fp8core's recipe of that name.
        formula: "palm" or "causal"; without meaning for a user's model.
    """
    return dict(_flops(replace(setup, compiled=False, peer=""), formula))


@functools.lru_cache(maxsize=64)
def _flops(setup: Setup, formula: str) -> dict[str, float]:
    high = "fp32" if setup.compute == "fp32" else "bf16"
    model = skeleton(setup)
    if isinstance(resolve(setup.model), ModelSpec):
        once = step_flops(model, setup.batch, setup.seq, formula=formula, high_precision=high)
    else:
        once = counted_flops(model, shapes(setup), high_precision=high)
    return {dtype: amount * setup.accumulation for dtype, amount in once.items()}


def flops_formula_id(setup: Setup) -> str:
    """Name of the rule behind `flops`."""
    return "palm" if isinstance(resolve(setup.model), ModelSpec) else "counted"


def shapes(setup: Setup) -> tuple[Tensor, ...]:
    """A batch on "meta"."""
    spec = resolve(setup.model)
    if isinstance(spec, ModelSpec):
        tokens = torch.empty(setup.batch, setup.seq, dtype=torch.int64, device="meta")
        return tokens, tokens
    return tuple(part.to("meta") for part in spec.batch(0, 0, setup.batch, "cpu"))


def remedies(setup: Setup, device: str) -> Bytes:
    """The two ways to need less memory, and the bytes that each is predicted to save: a smaller batch, checkpointing.

    A way that this set-up has gone already is left out.
    """
    now = total(memory(setup, device))
    ways: dict[str, Setup] = {}
    if setup.batch > 1:
        ways[f"batch={setup.batch // 2}"] = replace(setup, batch=setup.batch // 2)
    full = CHECKPOINTING[-1]
    if setup.checkpointing != full and isinstance(resolve(setup.model), ModelSpec):
        ways[f"checkpointing={full}"] = replace(setup, checkpointing=full)
    return {way: now - total(memory(less, device)) for way, less in ways.items()}


def shortage(setup: Setup, device: str, what: str) -> tuple[str, dict[str, object]]:
    """What to say where memory ran out: one line, and the facts behind it for `resolved`."""
    needed, ways = memory(setup, device), remedies(setup, device)
    parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in needed.items() if size)
    line = f"{what}; predicted GiB by part: {parts}, {total(needed) / GIB:.2f} in all"
    if ways:
        line += "; remedies: " + " or ".join(
            f"{way} saves {size / GIB:.2f} GiB" for way, size in ways.items()
        )
    return line, {"memory": needed, "remedies": ways}
