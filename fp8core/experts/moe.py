"""Experts of a mixture: the product that a module of stacked weights calls, and its conversion to FP8.

    class Experts(nn.Module):
        def __init__(self, ...):
            self.gate, self.up, self.down = ...                   # parameters [E, K, N] or [E, N, K]
            self.multiply = GroupedMatmul(experts_per_token=2)

        def forward(self, x, offsets):                            # x [T, K] sorted by expert
            rows = self.multiply.pad(x, offsets)                  # once for all three; nothing in high precision
            hidden = silu(self.multiply(rows.x, self.gate, rows.offsets)) * ...
            return rows.restore(self.multiply(hidden, self.down, rows.offsets))

    convert_experts_to_float8(model, config="rowwise")

Experts stay in high precision unless that is called: `convert_to_float8_training` turns nn.Linear layers, as torchao's
does, and experts are none. A router is never converted by either: it must have a forward of its own (such a
subclass of nn.Linear is left alone), or be left out by `dense_layers_only`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8core.config import Float8LinearConfig, as_recipe
from fp8core.experts.grouped import (
    HIGH_PRECISION,
    PaddedGroups,
    aligned_grouped_mm,
    alignment,
    pad_groups,
    recipe_reason,
)
from fp8core.experts.interface import experts_per_token, is_experts_interface, let_multiply, take_back
from fp8core.gemm import backend_named
from fp8core.observers import WATCHED
from fp8core.recipe import RECIPES
from fp8core.replace import FILTERED, WHY_NOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fp8core.recipe import Recipe

EXPERTS_BY_DEFAULT = "experts stay in high precision unless convert_experts_to_float8 is called"
_MOE_NAMES = frozenset({"experts", "shared_expert", "shared_experts", "router"})


class GroupedMatmul(nn.Module):
    """x[rows of e] @ weight[e].T for each expert e; without parameters.

    Attributes:
        experts_per_token: experts that a token goes to, for the FLOPs in `fp8core.audit`.
        recipe: None multiplies in high precision.
    """

    recipe: Recipe | None

    def __init__(
        self, experts_per_token: int = 1, config: Float8LinearConfig | Recipe | str | None = None
    ) -> None:
        """`config` is a configuration, a recipe or its name; None is high precision."""
        super().__init__()
        if experts_per_token < 1:
            raise ValueError(f"experts_per_token is {experts_per_token}; a token goes to at least 1")
        self.experts_per_token = experts_per_token
        self.recipe = None if config is None else as_recipe(config)

    def pad(self, x: torch.Tensor, offsets: torch.Tensor) -> PaddedGroups:
        """x [T, K] and offsets int32 [E] as `forward` takes them: see `fp8core.pad_groups`."""
        return pad_groups(x, offsets, alignment(self.recipe or HIGH_PRECISION))

    def forward(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """x [P, K], weight [E, N, K] and offsets int32 [E] -> [P, N]; x and offsets as `pad` makes them."""
        recipe = self.recipe or HIGH_PRECISION
        watched = (
            not torch.compiler.is_compiling() and WATCHED and torch.is_grad_enabled() and self in WATCHED
        )
        return aligned_grouped_mm(
            x, weight, offsets, recipe, WATCHED[self](weight, recipe) if watched else None
        )

    def fp8_calls(self, name: str, offsets: torch.Tensor) -> int:
        """FP8 GEMMs that one of `fp8core.recipe.GEMMS` takes for these offsets: 0, 1, or one for each group with rows."""
        recipe = self.recipe
        if recipe is None or not recipe.gemms[name].is_fp8 or not backend_named(recipe.backend).is_fp8:
            return 0
        if loop_reason(recipe, name, offsets.device) is None:
            return 1
        return int((torch.diff(offsets, prepend=offsets.new_zeros(1)) > 0).sum())

    def extra_repr(self) -> str:
        """The recipe and the number of experts a token goes to."""
        return f"recipe={self.recipe or HIGH_PRECISION}, experts_per_token={self.experts_per_token}"


def convert_experts_to_float8(
    model: nn.Module,
    *,
    config: Float8LinearConfig | Recipe | str | None = None,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    allow_no_conversion: bool = False,
) -> nn.Module:
    """Lets the experts of a model multiply in FP8. Their parameters stay as they are, and nothing else is changed.

    Args:
        model: changed in place. Experts are modules that hold a `GroupedMatmul` and parameters of three dimensions; those
            of Hugging Face transformers 5 get one, see `fp8core.experts.interface`.
        config: a configuration, a Recipe or the name of one; default "rowwise".
        module_filter_fn: called with (module, fully qualified name) of each module of experts; False leaves it alone.
        allow_no_conversion: True: a model in which nothing can be converted is returned as it is.

    Returns:
        The model.

    Raises:
        ValueError: nothing was converted, experts already have another recipe, or the device has no FP8 matmul.
        TypeError: config is of another type.
    """
    recipe = RECIPES["rowwise"] if config is None else as_recipe(config)
    converted, reasons = 0, []
    _let_experts_multiply(model)
    try:
        for fqn, module, product in list(products_of_experts(model)):
            if module_filter_fn is not None and not module_filter_fn(module, fqn):
                _leave(module, product, FILTERED)
                continue
            if product.recipe not in (None, recipe):
                raise ValueError(
                    f"{fqn or 'the model'} already runs recipe {product.recipe}, not {recipe}; convert the original model"
                )
            reason = _reason_against(module, recipe)
            if reason:
                _leave(module, product, reason)
                reasons.append(f"{fqn}: {reason}")
            else:
                product.recipe = recipe
                converted += 1
    finally:
        for _, module, product in list(products_of_experts(model)):
            if product.recipe is None:
                take_back(module)
    if not converted and not allow_no_conversion:
        found = (
            "; ".join(reasons)
            or "it has no module with a GroupedMatmul and stacked weights that the filter takes, nor experts of transformers 5"
        )
        raise ValueError(f"no experts were converted to FP8: {found}")
    return model


def _let_experts_multiply(model: nn.Module) -> None:
    """Gives each module of transformers' experts its product."""
    for module in list(model.modules()):
        if is_experts_interface(module) and not any(isinstance(m, GroupedMatmul) for m in module.children()):
            experts = next(weight for _, weight in stacked_weights(module)).shape[0]
            let_multiply(module, GroupedMatmul(experts_per_token(module, experts) or 1))


def _leave(module: nn.Module, product: GroupedMatmul, reason: str) -> None:
    """Notes why experts stay in high precision; on the module too, since transformers' lose their product again."""
    setattr(product, WHY_NOT, reason)
    setattr(module, WHY_NOT, reason)


def dense_layers_only(module: nn.Module, fqn: str) -> bool:
    """A `module_filter_fn` for `convert_to_float8_training`: False for what lies in experts, shared ones too, or a router.

    By whole parts of the name, so that "decoder.router_free.q" is taken.
    """
    return not _MOE_NAMES.intersection(fqn.split("."))


def products_of_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, GroupedMatmul]]:
    """(name, module of experts, its product), each product once."""
    seen: set[GroupedMatmul] = set()
    for fqn, module in model.named_modules():
        for child in module.children():
            if isinstance(child, GroupedMatmul) and child not in seen and stacked_weights(module):
                seen.add(child)
                yield fqn, module, child


def stacked_weights(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, weight) of each weight that holds one matrix for each expert."""
    return [(name, p) for name, p in module.named_parameters(recurse=False) if p.dim() == 3]


def _reason_against(module: nn.Module, recipe: Recipe) -> str:
    """Why these experts can't run the recipe, whichever way their weights lie; "" if they can.

    Raises:
        ValueError: their device has no FP8 matmul, which is then true of all.
    """
    for _, weight in stacked_weights(module):
        for gemm in recipe.gemms.values():
            if gemm.a is not None and gemm.b is not None and weight.device.type != "meta":
                rules = backend_named(recipe.backend)
                reason = rules.device_reason(weight.device, gemm.a.format, gemm.b.format)
                if reason:
                    raise ValueError(f"recipe {recipe}: {reason}")
        one, other = weight.shape[1:]
        for sizes in ((one, other), (other, one)):
            reason = recipe_reason(recipe, *sizes, weight.device)
            if reason:
                return reason
    return ""


def loop_reason(recipe: Recipe, name: str, device: torch.device) -> str | None:
    """Why an FP8 GEMM runs group by group; None if one call does it."""
    gemm = recipe.gemms[name]
    assert gemm.a is not None
    assert gemm.b is not None
    formats = gemm.a.format.dtype, gemm.b.format.dtype
    return backend_named(recipe.backend).grouped_reason(device, gemm.granularity, *formats)
