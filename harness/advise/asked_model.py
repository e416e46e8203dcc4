"""The model that a question is about: of this project, of a Hugging Face `config.json`, or of the user's own.

With `model.batch`, or as a language model that reads random tokens, a user's model is traced; any other has its layers alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8core.recipe import RECIPES
from harness.advise.model import Linear, Model, Outside, mark_head
from harness.advise.trace import barred_layers, layers_alone, trace
from harness.store.errors import UsageError
from harness.training.models import MODELS, ModelSpec, UserModel, resolve
from harness.training.models.hugging_face import EXPERTS, ROUTER, is_config, read
from harness.training.models.user import BATCH, TARGET, canonical

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.training.models.hugging_face import HfModel

TOKENS, SEQ = 16384, 4096  # of a pass; of a sequence
_LONGEST = 2**20
_BATCH = 8  # of a user's model
_ROUTER = dict.fromkeys(RECIPES.own, "a router, which picks experts in high precision")


def model_of(
    asked: str | dict[str, Any], tokens: int | None, batch: int | None, seq: int | None, tp: int
) -> tuple[Model, str]:
    """One pass of the model; and a remark on batches that nobody named and parts that are left out, "" without either.

    Args:
        asked: a name, a path, or what builds a model of the user's own and its arguments.
        tokens: of the pass; None: not named, here and below.
        batch: sequences.
        seq: tokens of each.
        tp: GPUs that split each layer.

    Raises:
        UsageError: an unknown model, one that cannot be traced, sizes that it cannot have.
    """
    made_up = ""
    if isinstance(asked, dict):
        if BATCH not in asked:
            reader = _token_reader(asked)
            if reader is None:
                return _without_batch(asked, tokens or TOKENS), ""
            made_up = f"model.batch is not named: {reader.tokens.sentence}"
        asked = canonical(asked)
    elif asked not in MODELS and is_config(asked):
        described = read(asked)
        if tp > 1 and described.top_k:
            raise UsageError(f"tp={tp}: how {asked} splits its experts is not known; leave tp out")
        batch, seq = sizes(asked, described.max_seq or _LONGEST, tokens, batch, seq)
        left_out = f"left out: {', '.join(described.left_out)}; only the part for text is judged"
        return _of_config(described, batch, seq), left_out if described.left_out else ""
    spec = resolve(asked)
    if isinstance(spec, ModelSpec):
        found = trace(spec, *sizes(asked, spec.max_seq, tokens, batch, seq))
        return replace(found, example=True), ""
    if seq:
        raise UsageError(f"seq={seq}: a model of your own brings its lengths with model.batch; leave seq out")
    return _traced(spec, tokens, batch), made_up


def sizes(name: str, max_seq: int, tokens: int | None, batch: int | None, seq: int | None) -> tuple[int, int]:
    """Sequences and tokens of each.

    Raises:
        UsageError: longer than the model, tokens that are no whole number of sequences or that FP8 can't take.
    """
    length = seq or min(max_seq, SEQ, tokens or SEQ)
    if length > max_seq:
        raise UsageError(f"seq={length}: {name} reads at most {max_seq} tokens")
    if batch and tokens and batch * length != tokens:
        raise UsageError(f"tokens={tokens} is not batch={batch} times seq={length}; leave one of them out")
    tokens = tokens or (batch or max(1, TOKENS // length)) * length
    if tokens % length:
        near = max(1, round(tokens / length)) * length
        raise UsageError(f"tokens={tokens} is no multiple of seq={length}; the nearest is {near}")
    return _divisible(tokens) // length, length


def _token_reader(own: Mapping[str, Any]) -> UserModel | None:
    """A model without `model.batch` that is a language model and can be called with random tokens; None: it can't."""
    if not isinstance(own.get(TARGET), str):
        return None
    spec = resolve(canonical(own))
    try:
        return spec if isinstance(spec, UserModel) and spec.tokens.seq > 0 else None
    except UsageError:
        return None


def _traced(spec: UserModel, tokens: int | None, asked: int | None) -> Model:
    """A user's model at the batch asked for, or at the one that gives its layers the tokens asked for."""
    one = trace(spec, 1 if tokens else asked or _BATCH, 0)
    if not one.layers:
        raise UsageError(f"{spec.target} calls no nn.Linear, and FP8 converts nothing else")
    if tokens is None:
        return one
    batch = tokens // one.tokens
    if tokens % one.tokens:
        raise UsageError(
            f"tokens={tokens} is no multiple of {one.tokens}, the rows that the layers see of model.batch with "
            "batch_size 1"
        )
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


def _without_batch(own: Mapping[str, Any], tokens: int) -> Model:
    """A module without `model.batch`, which cannot be called: its layers alone."""
    target = own.get(TARGET)
    if not isinstance(target, str) or "." not in target:
        raise UsageError(f"model.{TARGET}={target!r}: expected the dotted name of what builds the model")
    arguments = canonical({key: value for key, value in own.items() if key != TARGET})
    module = UserModel(arguments, target, "", arguments).build(device="meta", dtype=torch.bfloat16)
    return layers_alone(module, _divisible(tokens), target)


def _of_config(described: HfModel, batch: int, seq: int) -> Model:
    """Facts of a model: each Linear on all tokens; experts, of which a token uses `top_k`, as products in high precision.

    Attention and what runs between the products are those of our Llama of the same sizes; of other blocks they are not known,
    and are left out. Weights of blocks have a number in their names; those of norms are left to the rest.
    """
    tokens = batch * seq
    parts = [part for part in described.parts if part.kind != EXPERTS]
    experts = [part for part in described.parts if part.kind == EXPERTS]
    shapes = sorted({(part.K, part.N) for part in parts})
    with torch.device("meta"):
        module = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)
    barred = barred_layers(module)
    reasons = {shape: barred.get(str(i), {}) for i, shape in enumerate(shapes)}
    inputs: dict[str, int] = {}
    unmarked = [
        Linear(
            part.name,
            part.K,
            part.N,
            tokens,
            inputs.setdefault(part.reads, len(inputs)),
            _ROUTER if part.kind == ROUTER else reasons[part.K, part.N],
        )
        for part in parts
    ]
    layers = mark_head(unmarked, [described.vocabulary])
    inside = sum(p.elements for p in described.parts if any(w.isdigit() for w in p.name.split(".")))
    if described.like is not None:
        traced = trace(ModelSpec(described.name, "", "", described.like), batch, seq)
        return replace(traced, layers=layers, whole=not described.left_out)
    return Model(
        described.name,
        layers,
        tokens,
        other=2.0 * tokens * described.top_k * sum(part.K * part.N for part in experts),
        parameters=described.parameters,
        blocks=described.blocks,
        experts=bool(experts),
        whole=False,
        active=described.parameters
        - sum(part.K * part.N * max(0, part.count - described.top_k) for part in experts),
        outside=Outside(described.parameters - inside),
    )


def _divisible(tokens: int) -> int:
    if tokens % 16:
        near = max(16, round(tokens / 16) * 16)
        raise UsageError(
            f"{tokens} tokens: FP8 needs a multiple of 16 for the weight's gradient; the nearest is {near}"
        )
    return tokens
