"""What a set-up will take, worked out on a model without weights: FLOPs, memory by part, and how to need less."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fp8core import audit, convert_to_float8_training
from fp8core.experts.moe import convert_experts_to_float8
from harness.store.errors import OUT_OF_MEMORY, Cause, UsageError, cause_of, one_line
from harness.timing.workload import Unsupported
from harness.training.models import ModelSpec, resolve
from harness.training.models.calls import form_of, tokens_of
from harness.training.models.flops import FORMULAS, counted_flops, recomputed, step_flops
from harness.training.models.fused import fuse
from harness.training.models.memory import GIB, fits, of_weights, predict
from harness.training.step import CHECKPOINTING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from harness.training.setup import Setup

Bytes = dict[str, int]


class NothingToConvertError(ValueError):
    """A recipe or a fusion that fits no part of a model, on any device; what a model's own code raises is none."""


def skeleton(setup: Setup) -> nn.Module:
    """The model on "meta", fused and converted. A peer's layers are stood in for by fp8core's.

    Raises:
        UsageError: the model can't be built so.
        NothingToConvertError: none of its layers can be converted, or no module be fused.
    """
    model = resolve(setup.model).build(
        device="meta",
        dtype=setup.weight_dtype,
        layers=setup.layers,
        vocab_size=setup.vocab_size,
        checkpointing=setup.checkpointing,
    )
    if setup.fused_modules:
        with _refusals():
            model = fuse(model)  # which keeps less for the backward pass than the formulas that run on paper
    if setup.recipe is None:
        return model
    model = convert_to_float8_training(
        model, config=setup.recipe, module_filter_fn=setup.converts, allow_no_conversion=True
    )
    report = audit(model)
    if not report.converted:
        named = f"{type(model).__name__}: no layer can be converted to recipe {setup.recipe}"
        reasons = dict.fromkeys(f"{layer.fqn or 'the model'}: {layer.reason}" for layer in report.layers)
        raise NothingToConvertError(f"{named}; {'; '.join(list(reasons)[:3]) or 'it has no nn.Linear'}")
    if setup.experts == "fp8":
        with _refusals():
            convert_experts_to_float8(model, config=setup.recipe)
    return model


@contextmanager
def _refusals() -> Iterator[None]:
    """What fp8core refuses to convert; no code of the model runs inside."""
    try:
        yield
    except ValueError as error:
        raise NothingToConvertError(str(error)) from error


@functools.lru_cache(maxsize=64)
def _of_layers(setup: Setup) -> tuple[tuple[str, ...], Bytes]:
    """Names of the layers that are converted, and the bytes of weights and their like."""
    model = skeleton(setup)
    return tuple(layer.fqn for layer in audit(model).converted), of_weights(model)


def fp8_layers(setup: Setup) -> tuple[str, ...]:
    """Names of the layers that are converted.

    Raises:
        UsageError, ValueError: as `skeleton`.
    """
    return _of_layers(_plain(setup))[0]


def unsupported(setup: Setup, device: str, free_bytes: int) -> Unsupported | None:
    """Why a set-up can't be trained: no layer can be converted, memory that is predicted not to be there, or its own code.

    Whatever the model's code raises is a fault, which makes a failed row and no skipped one.

    What weights, gradients and optimizer take is asked first: it is known without running the model, even on paper,
    and settles it for a model that is far too large.

    Args:
        setup: of the arm.
        device: "cpu" or "cuda".
        free_bytes: that it may take.

    Raises:
        UsageError: the model can't be built so.
    """
    try:
        if setup.recipe is not None or setup.fused_modules:
            fp8_layers(setup)
        too_much = fits(_of_layers(replace(_plain(setup), recipe=None))[1], free_bytes)
        too_much = too_much or fits(memory(setup, device), free_bytes)
    except UsageError:
        raise
    except NothingToConvertError as error:
        return Unsupported("shape", " ".join(str(error).split())[:300])
    except Exception as error:  # noqa: BLE001 - a user's model may raise anything
        return Unsupported("fault", f"its model fails: {one_line(error)}", cause_of(error, Cause.BUILD))
    return Unsupported("device", f"{OUT_OF_MEMORY}, predicted: {too_much}", Cause.OOM) if too_much else None


def memory(setup: Setup, device: str) -> Bytes:
    """Bytes of a step by part; see `harness.training.models.memory`. Compiled code needs as much or less."""
    return dict(_run_on_paper(_plain(setup), device)[0])


def _plain(setup: Setup) -> Setup:
    """Without what changes neither layers nor memory, so that one answer serves many arms."""
    return replace(
        setup, compiled=False, graph=False, peer="", accumulation=1, seed=0, lr=0.0, grad_clip=None
    )


def facts_of_calls(setup: Setup, device: str) -> dict[str, object]:
    """How a user's model is called, for `resolved`: its batches, and where its loss was found; {} for a named model."""
    spec = resolve(setup.model)
    if isinstance(spec, ModelSpec):
        return {}
    keys = form_of(spec.name).keys
    return {
        "data": "batches of the model's own" if spec.batch_target else spec.tokens.sentence,
        "batch_handed_over": f"by name: {', '.join(keys)}" if keys else "in order",
        "loss_from": _run_on_paper(_plain(setup), device)[1],
    }


@functools.lru_cache(maxsize=64)
def _run_on_paper(setup: Setup, device: str) -> tuple[Bytes, str]:
    """Bytes of a step by part, and where the loss was in what a user's model returned."""
    autocast = torch.bfloat16 if setup.compute == "bf16_autocast" else None
    needed = predict(skeleton(setup), shapes(setup), device=device, autocast=autocast)
    spec = resolve(setup.model)
    return needed, "" if isinstance(spec, ModelSpec) else form_of(spec.name).loss


def total(needed: Bytes) -> int:
    """Bytes of all parts."""
    return sum(needed.values())


def flops(setup: Setup, formula: str = "palm") -> dict[str, float]:
    """FLOPs of an optimizer step by dtype, nothing recomputed; of a user's model those that FlopCounterMode counts.

    Args:
        setup: of the arm; FP8 GEMMs of a peer count as those of fp8core's recipe of that name.
        formula: "palm" or "causal"; without meaning for a user's model.
    """
    return dict(_flops(replace(setup, compiled=False, peer=""), formula, step_flops))


@functools.lru_cache(maxsize=64)
def _flops(setup: Setup, formula: str, count: Callable[..., dict[str, float]]) -> dict[str, float]:
    high = "fp32" if setup.compute == "fp32" else "bf16"
    model = skeleton(setup)
    if isinstance(resolve(setup.model), ModelSpec):
        once = count(model, setup.batch, setup.seq, formula=formula, high_precision=high)
    else:
        once = counted_flops(model, shapes(setup), high_precision=high)
    return {dtype: amount * setup.accumulation for dtype, amount in once.items()}


def recomputed_flops(setup: Setup) -> dict[str, dict[str, float]]:
    """FLOPs that activation checkpointing adds to an optimizer step, by rule and dtype; {} for a user's model.

    What is counted of a user's model (`flops`) has them in it.
    """
    if not isinstance(resolve(setup.model), ModelSpec):
        return {}
    plain = replace(setup, compiled=False, peer="")
    return {formula: dict(_flops(plain, formula, recomputed)) for formula in FORMULAS}


def tokens(setup: Setup) -> int:
    """Tokens of an optimizer step; of a user's model the rows that its Linear layers see, 0 where that is not known."""
    once = _tokens(replace(_plain(setup), recipe=None, fused_modules=False))
    return once * setup.accumulation


@functools.lru_cache(maxsize=64)
def _tokens(setup: Setup) -> int:
    if isinstance(resolve(setup.model), ModelSpec):
        return setup.batch * setup.seq
    try:
        return tokens_of(skeleton(setup), shapes(setup))
    except UsageError:
        raise
    except Exception:  # noqa: BLE001 - a user's model may look at values, which are not here
        return 0


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
