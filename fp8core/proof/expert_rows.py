"""The stacked weights of experts as rows of `fp8core.audit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8core.experts.moe import (
    EXPERTS_BY_DEFAULT,
    GroupedMatmul,
    loop_reason,
    products_of_experts,
    stacked_weights,
)
from fp8core.gemm import backend_named
from fp8core.recipe import GEMMS
from fp8core.replace import WHY_NOT

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fp8core.recipe import Recipe


@dataclass(frozen=True, slots=True)
class ExpertsAudit:
    """The stacked weight of the experts of one module.

    Attributes:
        fqn: fully qualified name of the parameter.
        experts: how many.
        sizes: the two sizes of one expert's weight, as they lie.
        experts_per_token: that a token goes to.
        recipe: what they run, as text; "" in high precision.
        reason: why they were not converted; "" if they were.
        gemms: of one forward and backward pass, each over all experts.
        fp8_gemms: how many of them reach FP8 matrix units (0 if emulated).
        route: "one call", or "a loop: " and why; "" if not converted.
    """

    fqn: str
    experts: int
    sizes: tuple[int, int]
    experts_per_token: int
    recipe: str
    reason: str
    gemms: int
    fp8_gemms: int
    route: str

    @property
    def converted(self) -> bool:
        """Whether these experts run a recipe."""
        return bool(self.recipe)

    @property
    def flops_of_a_gemm(self) -> int:
        """FLOPs of one of the GEMMs, divided by tokens."""
        return 2 * self.sizes[0] * self.sizes[1] * self.experts_per_token

    @property
    def size(self) -> tuple[int, ...]:
        """Number of experts and the sizes of one, as they lie."""
        return self.experts, *self.sizes

    @property
    def words(self) -> str:
        """The recipe and its route, or why there is none."""
        return f"{self.recipe}, {self.route}" if self.converted else self.reason


def audit_experts(model: nn.Module) -> tuple[ExpertsAudit, ...]:
    """Each stacked weight of each module of experts, with its state; `fp8core.audit` lists them too."""
    return tuple(
        _audit_weight(f"{fqn}.{name}" if fqn else name, weight, product)
        for fqn, module, product in products_of_experts(model)
        for name, weight in stacked_weights(module)
    )


def _audit_weight(fqn: str, weight: nn.Parameter, product: GroupedMatmul) -> ExpertsAudit:
    recipe = product.recipe
    gemms, fp8_gemms = gemms_of(recipe, weight)
    return ExpertsAudit(
        fqn=fqn,
        experts=weight.shape[0],
        sizes=(weight.shape[1], weight.shape[2]),
        experts_per_token=product.experts_per_token,
        recipe="" if recipe is None else str(recipe),
        reason="" if recipe is not None else getattr(product, WHY_NOT, EXPERTS_BY_DEFAULT),
        gemms=gemms,
        fp8_gemms=fp8_gemms,
        route="" if recipe is None else _route(recipe, weight),
    )


def gemms_of(recipe: Recipe | None, weight: torch.Tensor) -> tuple[int, int]:
    """GEMMs of a forward and backward pass, if the input needs a gradient, and how many of them reach FP8 matrix units."""
    names = GEMMS[: 2 + weight.requires_grad]
    runs = recipe is not None and backend_named(recipe.backend).is_fp8
    if recipe is None or not runs:
        return len(names), 0
    gemms = [recipe.gemms[name] for name in names]
    return len(names), sum(gemm.is_fp8 and not gemm.is_four_bit for gemm in gemms)


def _route(recipe: Recipe, weight: torch.Tensor) -> str:
    reasons = [loop_reason(recipe, name, weight.device) for name in GEMMS if recipe.gemms[name].is_fp8]
    reason = next((reason for reason in reasons if reason is not None), None)
    return "one call" if reason is None else f"a loop: {reason}"
