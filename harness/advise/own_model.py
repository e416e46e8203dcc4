"""A model of the user's own in the advice: its keys, its batches, and its pass.

With `model.batch`, or as a language model that reads random tokens, it is traced; any other has its layers alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.advise.trace import layers_alone, trace
from harness.store.errors import UsageError
from harness.training.models import ModelSpec, UserModel, resolve
from harness.training.models.user import BATCH, TARGET, canonical

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.advise.model import Model


def put(into: dict[str, Any], names: Sequence[str], value: Any) -> None:
    """Sets `a.b.c=value` in nested mappings.

    Raises:
        UsageError: a or b has a value of its own.
    """
    for name in names[:-1]:
        into = into.setdefault(name, {})
        if not isinstance(into, dict):
            raise UsageError(f"model.{'.'.join(names)}={value}: model.{name} has a value already")
    into[names[-1]] = value


def reads_tokens(own: Mapping[str, Any]) -> bool:
    """Whether a model without `model.batch` is a language model that can be called with random tokens."""
    if not isinstance(own.get(TARGET), str):
        return False
    spec = resolve(canonical(own))
    if isinstance(spec, ModelSpec):
        return False
    try:
        return spec.tokens.seq > 0
    except UsageError:
        return False


def made_up(own: object) -> str:
    """What is to be said of batches that nobody named; "" where the model has its own, or is not called."""
    if not isinstance(own, dict) or BATCH in own or not reads_tokens(own):
        return ""
    spec = resolve(canonical(own))
    assert isinstance(spec, UserModel)
    return f"model.batch is not named: {spec.tokens.said}"


def own_model(spec: UserModel, tokens: int | None, asked: int | None) -> Model:
    """A user's model at the batch asked for, or at the one that gives its layers the tokens asked for.

    Raises:
        UsageError: no layer is called, the two do not agree, or rows are in no proportion to the batch.
    """
    one = trace(spec, 1 if tokens else asked or 8, 0)
    if not one.layers:
        raise UsageError(f"{spec.target} calls no nn.Linear, and FP8 converts nothing else")
    if tokens is None:
        return one
    if tokens % one.tokens:
        raise UsageError(
            f"tokens={tokens} is no multiple of {one.tokens}, the rows that the layers see of model.batch with "
            "batch_size 1"
        )
    batch = tokens // one.tokens
    if asked not in (None, batch):
        raise UsageError(
            f"tokens={tokens} is not batch={asked} times the {one.tokens} rows that the layers see of "
            "one; leave one of them out"
        )
    model = trace(spec, batch, 0)
    if model.tokens != tokens:
        raise UsageError(
            f"tokens={tokens}: with batch_size {batch} the layers see {model.tokens} rows, with 1 {one.tokens}: no "
            "proportion; name the batch_size by batch="
        )
    return model


def without_batch(own: dict[str, Any], tokens: int) -> Model:
    """A module without `model.batch`, which cannot be called: its layers alone.

    Raises:
        UsageError: no name of what builds it, or a number of tokens that FP8 cannot take.
    """
    target = own.pop(TARGET, None)
    if not isinstance(target, str) or "." not in target:
        raise UsageError(f"model.{TARGET}={target!r}: expected the dotted name of what builds the model")
    module = UserModel(canonical(own), target, "", canonical(own)).build(device="meta", dtype=torch.bfloat16)
    return layers_alone(module, divisible(tokens), target)


def divisible(tokens: int) -> int:
    """The number of tokens.

    Raises:
        UsageError: FP8 cannot take it.
    """
    if tokens % 16:
        raise UsageError(
            f"{tokens} tokens: FP8 needs a multiple of 16 for the weight's gradient; the nearest is {max(16, round(tokens / 16) * 16)}"
        )
    return tokens
