"""FSDP2 that gathers weights as FP8 codes: one byte an element instead of two or four.

    model = convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

The conversion puts each weight into a `WeightShard`, which FSDP2 shards like any tensor and asks, before each all-gather,
what to send. What arrives is a `Float8Tensor` with the codes and the scale that the gathered weight would have been cast
to: the option changes what is sent, and no result. With a `MixedPrecisionPolicy` that holds too, as shards are rounded to
its `param_dtype` first.

Codes travel as uint8 with every backend: gloo has no FP8 type, NCCL copies bytes either way, and FSDP2 sends uint8 anyway
where parameters of several dtypes (biases, norms) share an all-gather. Shards of unequal length, down to none at all where
there are more ranks than rows, are filled up to the length that FSDP2 expects.

One set of codes must serve both GEMMs that read the weight, so tensorwise and 128x128 weights are gathered in FP8, whatever
way their scales come. Others are gathered in high precision, and `weight_gather_precision` says why: `audit` and `verify` show it.
Optimizers, state dicts and checkpoints see high-precision tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8core.distributed.fsdp_state import forget_gathered, local_of
from fp8core.distributed.weight_gather import NOTE, recipe_reason, weight_gather_precision
from fp8core.distributed.weight_scales import known_of, share_weight_scales
from fp8core.distributed.weight_shard import WeightShard
from fp8core.linear import Float8Linear
from fp8core.optimizers import replaced
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def gather_in_fp8(root: nn.Module) -> None:
    """Prepares the weights of a converted model for `fully_shard`, where a layer's recipe asks for it and allows it.

    Args:
        root: a model whose layers were just converted. Their weights become new parameters, so an optimizer must be made
            afterwards, as with `fully_shard` anyway.
    """
    layers = [m for m in root.modules() if isinstance(m, Float8Linear) and m.recipe.fp8_all_gather]
    layers = [layer for layer in layers if not layer.is_transposed]
    wanted = [layer for layer in layers if known_of(layer) is None and not recipe_reason(layer.recipe)]
    readers: dict[int, list[tuple[str, nn.Module]]] = {}
    for fqn, module in root.named_modules():
        for parameter in module.parameters(recurse=False):
            readers.setdefault(id(parameter), []).append((fqn, module))
    made: dict[int, nn.Parameter] = {}
    chosen = []
    for layer in wanted:
        weight = layer.weight
        others = [fqn for fqn, module in readers[id(weight)] if module not in wanted]
        if others:
            setattr(layer, NOTE, f"its weight is shared with {', '.join(others)}, which can't read codes")
            continue
        if id(weight) not in made:
            made[id(weight)] = nn.Parameter(WeightShard(weight.detach()), requires_grad=weight.requires_grad)
            replaced(weight, layer.fqn)
        layer.weight = made[id(weight)]
        layer.register_state_dict_post_hook(_plain_state)
        layer.register_load_state_dict_post_hook(wrapped_again)
        chosen.append(layer)
    share_weight_scales(root, chosen)


def switch_gathers(model: nn.Module, change: Callable[[], int]) -> int:
    """Changes recipes, and lets FSDP2 make anew the gathered weights whose precision that changes.

    Args:
        model: whose layers change; between a backward pass and the next forward pass.
        change: sets the recipes and returns how many.

    Returns:
        What `change` returned.
    """
    layers = [m for m in model.modules() if known_of(m) is not None]
    before = [weight_gather_precision(layer) for layer in layers]
    changed = change()
    switched = {
        layer for layer, was in zip(layers, before, strict=True) if weight_gather_precision(layer) != was
    }
    if switched:
        forget_gathered(model, switched)
    for layer in switched:
        known = known_of(layer)
        assert known is not None
        known.in_codes = None
    return changed


def _plain(weight: Any) -> torch.Tensor | None:
    """A weight without its WeightShard, sharing its memory; None if it has none."""
    if isinstance(weight, WeightShard):
        return weight.hp.detach()
    local = local_of(weight)
    return _with_local(weight, local.hp.detach()) if isinstance(local, WeightShard) else None


def _with_local(weight: Any, local: torch.Tensor) -> Any:
    """A DTensor like `weight` with another local tensor."""
    return type(weight).from_local(
        local,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


@torch.no_grad()
def _plain_state(layer: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """State dicts hold plain tensors and DTensors of plain tensors. Writing to them counts as writing to the weight."""
    plain = _plain(layer.weight)
    if plain is not None and f"{prefix}weight" in state:
        state[f"{prefix}weight"] = plain


@torch.no_grad()
def wrapped_again(layer: nn.Module, _: object = None) -> None:
    """`load_state_dict(assign=True)` puts plain tensors in place, and so does tensor parallelism."""
    weight: Any = layer.weight
    if _plain(weight) is not None or isinstance(weight, Float8Tensor):
        return
    local = local_of(weight)
    wrapped = WeightShard(weight.detach()) if local is None else _with_local(weight, WeightShard(local))
    layer.weight = nn.Parameter(wrapped, requires_grad=weight.requires_grad)
