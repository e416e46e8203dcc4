"""Turns the Linear layers of a model into Float8Linear. What is left alone remembers why, for `fp8core.audit`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

import fp8core
from fp8core.arguments import is_dtensor
from fp8core.config import Float8LinearConfig, as_recipe
from fp8core.distributed.fsdp import gather_in_fp8
from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from fp8core.gemm import backend_named
from fp8core.inputs.sharded import ORDER
from fp8core.layer_rules import weight_reason
from fp8core.linear import Float8Linear
from fp8core.replace import FILTERED, NEVER_OFFERED, WHY_NOT, keep_from_fast_path, loss_reason
from fp8core.transposed import Float8Conv1D, is_transposed_linear, own_forward

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8core.recipe import Ragged, Recipe

ModuleFilter = Callable[[nn.Module, str], bool]  # (module, fully qualified name) -> convert it?

_LOG = logging.getLogger("fp8core")
_SHOWN = 3  # names beside a reason


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | Recipe | str | None = None,
    module_filter_fn: ModuleFilter | None = None,
    allow_no_conversion: bool = False,
    convert_subclasses: Iterable[type[nn.Linear]] = (),
    ragged: Ragged | None = None,
) -> nn.Module:
    """Replaces the nn.Linear layers of a model by Float8Linear ones that share their parameters.

    Converted is each nn.Linear, or subclass with nn.Linear's own forward, whose shape FP8 matmul takes and for which
    the filter answers True; so is GPT-2's Conv1D, a transposed Linear (`fp8core.transposed`). A Float8Linear of the same
    recipe is left as it is. A module or a parameter used in several places stays shared. Hooks move to the new layer,
    and their handles still remove them. What is left alone remembers why, for `audit`. `convert_to_high_precision` is
    the way back.

    Args:
        module: the model; changed in place, except when it is itself an nn.Linear.
        config: a configuration, a Recipe or the name of one; default "tensorwise".
        module_filter_fn: called with (module, fully qualified name) of each Linear; False leaves it alone.
        allow_no_conversion: True: a model in which nothing can be converted is returned as it is.
        convert_subclasses: subclasses of nn.Linear with a forward of their own that computes what nn.Linear's does, such
            as `F.linear(x, self.weight.to(x.dtype))`: converted too, and their forward is replaced.
        ragged: "refuse", "bf16" or "pad": what becomes of batches whose number of tokens is no multiple of 16, such as a last
            one (`Recipe.for_ragged_batches`); None: what config says, else they are refused in mid-training.

    Returns:
        The model; the new Float8Linear if `module` is an nn.Linear.

    Raises:
        ValueError: nothing was converted; a layer already has another recipe; a layer lies on a device
            without FP8 matmul; the model is an nn.Linear with children, which would be lost; `parallelize_module` or
            `fully_shard` was applied before.
        TypeError: config is of another type.
    """
    recipe = as_recipe(config)
    if ragged is not None:
        recipe = recipe.for_ragged_batches(ragged)
    subclasses = tuple(convert_subclasses)
    chosen: dict[Any, str] = {}
    already_sharded = is_sharded_by_fsdp(module)
    for fqn, linear in _linears(module):
        wanted = module_filter_fn is None or module_filter_fn(linear, fqn)
        if isinstance(linear, Float8Linear):
            if wanted and linear.recipe != recipe:
                raise ValueError(
                    f"{fqn or 'the model'} already runs recipe {linear.recipe}, not {recipe}; convert the original "
                    "model, or leave the layer out by module_filter_fn"
                )
            continue
        if wanted and is_dtensor(linear.weight) and not already_sharded:
            raise ValueError(
                f"{fqn or 'the model'}: parallelize_module came first, and a new layer would not have its hooks; {ORDER}"
            )
        if wanted and linear is module and linear._modules:
            raise ValueError(
                f"the model is a {type(linear).__name__} with the child {next(iter(linear._modules))!r}, which would be "
                "lost; attach it to a module that holds the layer"
            )
        reason = _reason_against(linear, recipe, subclasses) if wanted else FILTERED
        if reason:
            setattr(linear, WHY_NOT, reason)
        elif already_sharded:
            raise ValueError(
                f"{fqn or 'the model'}: fully_shard came first, and FSDP2 would not know the new layer; convert, then "
                "fully_shard"
            )
        else:
            chosen[linear] = fqn
    swapped: dict[nn.Module, Any] = {
        linear: (Float8Conv1D if is_transposed_linear(linear) else Float8Linear).from_float(linear, recipe)
        for linear in chosen
    }
    for linear, fqn in chosen.items():
        swapped[linear].fqn = fqn
        if swapped[linear].passes is not None:
            swapped[linear].passes.belongs_to(fqn)
    result = _replace(module, swapped)
    keep_from_fast_path(result)
    gather_in_fp8(result)
    layers = {fqn: linear for fqn, linear in result.named_modules() if isinstance(linear, nn.Linear)}
    converted = [fqn for fqn, linear in layers.items() if isinstance(linear, Float8Linear)]
    if not converted and not allow_no_conversion:
        raise ValueError(
            f"no layer was converted to FP8; pass allow_no_conversion=True if that is intended\n{fp8core.audit(result)}"
        )
    skipped = {
        fqn: getattr(linear, WHY_NOT, NEVER_OFFERED)
        for fqn, linear in layers.items()
        if not isinstance(linear, Float8Linear)
    }
    _log_conversion(recipe, converted, skipped)
    return result


def _linears(module: nn.Module) -> list[tuple[str, Any]]:
    return [
        (fqn, m) for fqn, m in module.named_modules() if isinstance(m, nn.Linear) or is_transposed_linear(m)
    ]


def _replace(module: nn.Module, swapped: dict[nn.Module, Any]) -> nn.Module:
    """Puts every swapped module in its place, in each place."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child in swapped:
                setattr(parent, name, swapped[child])
    result: nn.Module = swapped.get(module, module)
    return result


def _reason_against(linear: Any, recipe: Recipe, convert_subclasses: tuple[type[nn.Linear], ...]) -> str:
    """Why this layer cannot run the recipe; "" if it can.

    Raises:
        ValueError: its device has no FP8 matmul, which is then true of all layers.
    """
    lost = own_forward(linear) if is_transposed_linear(linear) else loss_reason(linear, convert_subclasses)
    if lost:
        return lost
    backend = backend_named(recipe.backend)
    device = linear.weight.device
    for gemm in (recipe.output, recipe.grad_input):
        if gemm.a is not None and gemm.b is not None and device.type != "meta":
            reason = backend.device_reason(device, gemm.a.format, gemm.b.format)
            reason = reason or backend.granularity_reason(device, gemm.granularity, recipe.nearest)
            if reason:
                raise ValueError(f"recipe {recipe}: {reason}")
    K, N = linear.weight.shape if is_transposed_linear(linear) else (linear.in_features, linear.out_features)
    return weight_reason(recipe, K, N)


def _log_conversion(recipe: Recipe, converted: list[str], skipped: Mapping[str, str]) -> None:
    """Logs at level INFO, once in each process that converts.

    Args:
        recipe: that was asked for.
        converted: names of the layers that run it.
        skipped: name -> reason, of those that don't.
    """
    if not _LOG.isEnabledFor(logging.INFO):
        return
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in skipped.items():
        by_reason[reason].append(name or "the model")
    parts = [
        f"{len(names)} skipped ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}): {reason}"
        for reason, names in by_reason.items()
    ]
    rank = f"rank {dist.get_rank()}: " if dist.is_available() and dist.is_initialized() else ""
    total = len(converted) + len(skipped)
    refused = recipe.grad_weight.is_fp8 and recipe.min_tokens == "refuse" and not recipe.pad_inner_dim
    if refused and backend_named(recipe.backend).is_fp8:
        parts.append(
            "training refuses batches whose number of tokens is no multiple of 16: ragged='bf16' or 'pad' takes them"
        )
    _LOG.info(
        "%s%d of %d Linear layers converted to FP8, recipe %s%s; not yet proven: call verify",
        rank,
        len(converted),
        total,
        recipe,
        "".join(f"; {part}" for part in parts),
    )
