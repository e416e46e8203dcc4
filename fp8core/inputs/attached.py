"""What attaches to the plain layer of `fp8core.plain_linear`: other ways to its operands, for the same three products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8core.arguments import PLAIN_TENSORS
from fp8core.gemm.layout import Operand
from fp8core.history import AmaxMemory
from fp8core.inputs.operands import (
    cast_operand,
    cast_operand_pair,
    fused_for_both,
    resolve_kernels,
    serves_both,
)
from fp8core.inputs.sharded import AmaxRequest, shared_amaxes
from fp8core.plain_linear import NOT_SAVED, Lines, Plan, Saved, cast_lines
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    import torch

    from fp8core.history import Amaxes, Draws
    from fp8core.inputs.microbatch import WeightCache
    from fp8core.inputs.sharded import TPLayout
    from fp8core.observers import CallObserver
    from fp8core.recipe import Cast, Kernels, Recipe


@dataclass(eq=False)
class CastingPlan(Plan):
    """A plan whose casts may be made by kernels, by remembered amaxes, or by FSDP2 before it gathered.

    Attributes:
        kernels: who casts each role; "auto" is left only where each cast must ask, "never" where none is named.
        amaxes: what delayed and static casts go by; None for dynamic recipes.
        of_whole: amaxes in this pass of roles that tensor parallelism has cut.
        draws: of stochastic rounding.
    """

    kernels: dict[str, Kernels]
    amaxes: Amaxes | None = None
    of_whole: dict[str, torch.Tensor | None] | None = None
    draws: Draws | None = None

    def cast(  # type: ignore[override]  # of a plan, since it depends on more
        self, x: torch.Tensor, cast: Cast | None, dim: int, role: str
    ) -> Lines:
        """Make a tensor the operand of one product."""
        if cast is not None and cast.is_four_bit:
            draws = self.draws.of(x, role, dim) if self.draws and cast.rounding == "stochastic" else None
            return cast_lines(x, cast, dim, role, draws=draws)
        kernels = self.kernels.get(role, "never") if type(x) in PLAIN_TENSORS else self.recipe.kernels
        amax = self.of_whole.get(role) if self.of_whole else None
        return cast_operand(x, cast, dim, self.amaxes, role, kernels=kernels, amax=amax)

    def cast_twice(  # type: ignore[override]
        self, x: torch.Tensor, along_1: Cast | None, along_0: Cast | None, role: str
    ) -> tuple[Lines, Lines]:
        """Make a tensor the operand of both products that read it."""
        if (along_1 is not None and along_1.is_four_bit) or (along_0 is not None and along_0.is_four_bit):
            return self.cast(x, along_1, 1, role), self.cast(x, along_0, 0, role)
        kernels = self.kernels.get(role, "never") if type(x) in PLAIN_TENSORS else self.recipe.kernels
        amax = self.of_whole.get(role) if self.of_whole else None
        return cast_operand_pair(x, along_1, along_0, self.amaxes, role, kernels=kernels, amax=amax)

    def of_weight(self, weight: torch.Tensor, for_gradient: bool) -> tuple[Lines, Saved]:
        """The plain layer's, but a kernel may cast both ways in one read, and gathered codes are not cast.

        They are saved as they came: FSDP2 frees and gathers the memory of the tensor that it knows.
        """
        first, second = self.recipe.output.b, self.recipe.grad_input.b
        if isinstance(weight, Float8Tensor):
            if isinstance(self.amaxes, AmaxMemory):
                self.amaxes.record_gathered()
        elif for_gradient and fused_for_both(weight, first, second, self.kernels.get("weight", "never")):
            lines, turned = self.cast_twice(weight, first, second, "weight")
            return lines, turned if isinstance(turned, Operand) else (weight, None, None)
        return self.cast(weight, first, 1, "weight"), (weight, None, None) if for_gradient else NOT_SAVED


@dataclass(eq=False)
class AttachedPlan(CastingPlan):
    """The plan of a call with casts that are there already, of a layer that ranks have cut, or that someone watches.

    Attributes:
        cache: casts of the weight that a `microbatches` block keeps.
        tp: how tensor parallelism has cut the layer; None if it has not.
        stats: what a watched step wants to see of this call's casts; None in any other step.
        codes_only: the input's values are not there, as in `CastInput`; known in a watched step alone.
    """

    cache: WeightCache | None = None
    tp: TPLayout | None = None
    stats: CallObserver | None = None
    codes_only: bool = False

    def of_input(
        self, x: torch.Tensor, for_gradient: bool, *given: torch.Tensor | None
    ) -> tuple[Lines, Saved]:
        """The casts that are there already, if they are given: for the output, and for grad_weight if it is another."""
        for_output, for_grad_weight = given or (None, None)
        if for_output is None:
            return Plan.of_input(self, x, for_gradient)
        first, second = self.recipe.output.a, self.recipe.grad_weight.b
        lines = self.cast(for_output, first, 1, "input")
        if (
            for_gradient and for_grad_weight is None and not serves_both(first, second)
        ):  # made where nothing trained
            turned = self.cast(x, second, 0, "input")
            return lines, turned if isinstance(turned, Operand) else (x, None, None)
        return lines, (
            for_output if for_grad_weight is None else for_grad_weight,
            None,
            None,
        ) if for_gradient else NOT_SAVED

    def of_weight(self, weight: torch.Tensor, for_gradient: bool) -> tuple[Lines, Saved]:
        """The weight's casts of an earlier microbatch, if there is one."""
        if self.cache is None or isinstance(weight, Float8Tensor):
            return CastingPlan.of_weight(self, weight, for_gradient)
        casts = self.recipe.output.b, self.recipe.grad_input.b
        lines, turned = self.cache.operands(weight, lambda: self.cast_twice(weight, *casts, "weight"))
        return lines, (
            turned if isinstance(turned, Operand) else (weight, None, None)
        ) if for_gradient else NOT_SAVED

    def for_output(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        needs_x: bool,
        needs_weight: bool,
        *given: torch.Tensor | None,
    ) -> tuple[Lines, Lines, Saved]:
        """The plain layer's; saves the amax of a weight that is cut, too."""
        recipe, here, weight_amax = self.recipe, self, None
        if self.tp is not None:
            to_cast = None if given and given[0] is not None else x
            amax, weight_amax = shared_amaxes(
                self.tp,
                recipe,
                self.amaxes,
                AmaxRequest(to_cast, "input", (recipe.output.a, recipe.grad_weight.b)),
                AmaxRequest(weight, "weight", (recipe.output.b, recipe.grad_input.b)),
            )
            here = self._going_by(input=amax, weight=weight_amax)
        lines, weight_lines, saved = Plan.for_output(here, x, weight, needs_x, needs_weight, *given)
        if self.stats is not None:
            _show(self.stats, "input", "grad_weight", None if self.codes_only else x, lines, saved[:3])
            _show(self.stats, "weight", "grad_input", weight, weight_lines, saved[3:])
        return lines, weight_lines, (*saved, weight_amax)

    def for_gradients(
        self, grad: torch.Tensor, needs_x: bool, needs_weight: bool, saved: Saved
    ) -> tuple[Lines | None, Lines | None, Lines | None, Lines | None]:
        """The plain layer's, by shared amaxes, and seen by who watches."""
        recipe, here, stats = self.recipe, self, self.stats
        if self.tp is not None:
            casts = recipe.grad_input.a, recipe.grad_weight.a
            request = AmaxRequest(grad, "grad_output", casts)
            (amax,) = shared_amaxes(self.tp, recipe, self.amaxes, request)
            here = self._going_by(grad_output=amax, weight=saved[6])
        operands = Plan.for_gradients(here, grad, needs_x, needs_weight, saved[:6])
        if stats is not None:
            lines, weight, lines_0, _ = operands
            if lines is not None and weight is not None:
                stats.saw("grad_output", "grad_input", grad, lines)
                if saved[4] is None:
                    stats.saw("weight", "grad_input", saved[3], weight, turned=True)
            if lines_0 is not None:
                stats.saw("grad_output", "grad_weight", grad, lines_0, turned=True)
            stats.commit()
        return operands

    def _going_by(self, **of_whole: torch.Tensor | None) -> AttachedPlan:
        return AttachedPlan(self.recipe, self.trains, self.kernels, self.amaxes, of_whole)


def plan_for(recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, trains: bool) -> Plan:
    """The plan of a layer to which nothing else attaches, for an input [M, K] and a weight [N, K] like these.

    A gradient has the input's dtype and device and M rows, so the input answers for it.
    """
    output, grad_input, grad_weight = recipe.output, recipe.grad_input, recipe.grad_weight
    kernels: dict[str, Kernels] = {
        "input": resolve_kernels(x, recipe.kernels, output.a, grad_weight.b),
        "weight": resolve_kernels(weight, recipe.kernels, output.b, grad_input.b),
        "grad_output": resolve_kernels(x, recipe.kernels, grad_input.a, grad_weight.a)
        if weight.shape[0]
        else recipe.kernels,
    }
    if recipe.is_four_bit:  # no kernel casts to four bits
        return CastingPlan(recipe, trains, dict.fromkeys(kernels, recipe.kernels))
    plain = type(x) in PLAIN_TENSORS and type(weight) in PLAIN_TENSORS
    if plain and set(kernels.values()) == {"never"}:
        return Plan(recipe, trains)
    return CastingPlan(recipe, trains, kernels)


def _show(
    stats: CallObserver, role: str, later: str, x: torch.Tensor | None, lines: Lines, saved: Saved
) -> None:
    """The casts that a forward pass makes of a tensor, that for a product of the backward pass included."""
    stats.saw(role, "output", x, lines)
    codes, scale_inv, tensor_scale_inv = saved
    if codes is not None and scale_inv is not None:
        stats.saw(role, later, x, Operand(codes, scale_inv, tensor_scale_inv), turned=True)
    elif codes is not None and role == "input":  # a weight is cast later, and seen then
        stats.saw(role, later, x, codes)
