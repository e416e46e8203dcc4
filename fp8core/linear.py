"""Float8Linear: nn.Linear whose three GEMMs run in FP8.

    output      [M, N] = input         [M, K] @ weight.T [K, N] (+ bias)
    grad_input  [M, K] = grad_output   [M, N] @ weight   [N, K]
    grad_weight [N, K] = grad_output.T [N, M] @ input    [M, K]

M counts tokens: all leading dimensions of the input, flattened. Each tensor is cast as the recipe says, once where
the codes don't depend on the axis (tensorwise, 128x128), else once for each axis; parameters and gradients stay in
high precision. One `autograd.Function` holds all three GEMMs, since an FP8 operand that crossed autograd into
`torch.mm` would meet a high-precision gradient in the backward pass.

What is kept for the backward pass: the input as FP8 operand of grad_weight, one byte an element instead of two or
four, unless that GEMM is in high precision; the weight in FP8 where the forward pass's cast serves again (one byte
an element more than no copy; saves the second cast), else as it is.

Layers that read the same tensor (q, k, v; gate, up) can share its casts, see `cast_input`. Casts of weights can
be kept across microbatches, see `fp8core.microbatches`.

The result has the dtype of the (autocast) input, whatever the weight's. Rowwise and blockwise GEMMs yield bfloat16
on hardware, so a float32 or float16 layer is rounded to bfloat16 once for each such GEMM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fp8core.config import Float8LinearConfig, as_recipe
from fp8core.gemm import backend_named, layout, scaled_mm
from fp8core.history import AmaxMemory
from fp8core.operands import cast_both, cast_one, serves_both
from fp8core.scaling import check_hp
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from fp8core.microbatch import WeightCache
    from fp8core.recipe import Cast, Gemm, Recipe


class CastInput(NamedTuple):
    """A tensor and its casts, to be given to several Float8Linear in its place; made by `cast_input`.

    Attributes:
        hp: the tensor itself, [..., K], after autocast; gradients flow through it.
        for_output: its tokens [M, K] as operand of the output GEMM.
        for_grad_weight: as operand of grad_weight; None if no layer needs it.
        casts: what the two were cast with.
    """

    hp: torch.Tensor
    for_output: torch.Tensor
    for_grad_weight: torch.Tensor | None
    casts: tuple[Cast | None, Cast | None]


def cast_input(x: torch.Tensor, *layers: Float8Linear) -> CastInput:
    """Casts a tensor once for all layers that read it.

        shared = cast_input(x, attention.q, attention.k, attention.v)
        q, k, v = attention.q(shared), attention.k(shared), attention.v(shared)

    Results and gradients equal those of calling each layer on x, bit for bit.

    Args:
        x: float32, bfloat16 or float16, [..., K]; converted first under autocast.
        layers: at least one; their recipes must cast the input alike. Delayed scaling takes the first one's
            amaxes and records what it saw in all.

    Raises:
        ValueError: no layer, or layers whose recipes cast the input differently.
    """
    if not layers:
        raise ValueError("cast_input takes the layers that will read the tensor; got none")
    casts = _input_casts(layers[0].recipe)
    if not any(layer.recipe.fp8_gemms for layer in layers):
        return CastInput(x, x, None, casts)  # nn.Linear's own way, autocast included
    for layer in layers[1:]:
        if _input_casts(layer.recipe) != casts:
            raise ValueError(
                f"recipes {layers[0].recipe} and {layer.recipe} cast their input differently; cast it for each"
            )
    x = _after_autocast(x)
    check_hp(x, "input")
    flat = x.detach().reshape(-1, layers[0].in_features)
    trains = torch.is_grad_enabled() and any(layer.weight.requires_grad for layer in layers)
    with torch.no_grad():
        memory = layers[0].amaxes
        if trains:
            lp, lp_gw = cast_both(flat, *casts, memory, "input")
        else:
            lp, lp_gw = cast_one(flat, casts[0], 1, memory, "input"), None
        if memory is not None:
            for layer in layers[1:]:
                assert layer.amaxes is not None
                layer.amaxes.record("input", memory.pending[0])
    return CastInput(x, lp, lp_gw, casts)


class Float8Linear(nn.Linear):
    """Drop-in nn.Linear in FP8.

    Attributes:
        recipe: what is cast and how.
        amaxes: what delayed or static scaling remembers; None for dynamic recipes.
        weight_cache: casts of the weight while a `fp8core.microbatches` block runs, else None.
    """

    recipe: Recipe
    amaxes: AmaxMemory | None
    weight_cache: WeightCache | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: Float8LinearConfig | Recipe | str | None = None,
    ) -> None:
        """As nn.Linear; `config` is a configuration, a recipe or its name (default "tensorwise")."""
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = as_recipe(config)
        backend_named(self.recipe.backend)
        self.amaxes = None if self.recipe.scaling == "dynamic" else AmaxMemory(self.recipe, device)
        self.weight_cache = None

    def reset_parameters(self) -> None:
        """As nn.Linear, for a layer that was made on "meta" too; amaxes start afresh."""
        super().reset_parameters()
        amaxes = self._modules.get("amaxes")
        if isinstance(amaxes, AmaxMemory):
            amaxes.reset()

    @classmethod
    def from_float(
        cls, mod: nn.Linear, config: Float8LinearConfig | Recipe | str | None = None
    ) -> Float8Linear:
        """A Float8Linear that shares mod's parameters; nothing is copied or initialised.

        Raises:
            TypeError: mod is no nn.Linear.
            ValueError: mod has hooks, which would be lost.
        """
        if not isinstance(mod, nn.Linear):
            raise TypeError(f"from_float takes an nn.Linear, got {type(mod).__name__}")
        hooks = [n for n in vars(mod) if n.endswith("_hooks") and getattr(mod, n)]
        if hooks:
            raise ValueError(
                f"{mod} has {', '.join(hooks)} that a new module would lose; register them after conversion"
            )
        new = cls(mod.in_features, mod.out_features, bias=False, device="meta", config=config)
        new.weight, new.bias = mod.weight, mod.bias
        if new.amaxes is not None:
            new.amaxes = AmaxMemory(new.recipe, mod.weight.device)
        return new.train(mod.training)

    def forward(self, input: torch.Tensor | CastInput) -> torch.Tensor:
        """`input @ weight.T + bias`.

        Args:
            input: float32, bfloat16 or float16, [..., in_features]; any number of leading dimensions, none
                and sizes of 0 included. Under autocast it is first converted to the autocast dtype. Or its
                casts by `cast_input`; or a Float8Tensor that was cast as the recipe casts it.

        Returns:
            [..., out_features] of the (converted) input's dtype.

        Raises:
            ValueError: last dimension is not in_features; a cast that is not the recipe's; or a GEMM that this
                call leads to would break a rule of the hardware (see `fp8core.gemm.layout`): tokens must be a
                multiple of 16 to train with an FP8 grad_weight.
            TypeError: dtype.
        """
        if not self.recipe.fp8_gemms:  # all held back, see `fp8core.schedule`: nn.Linear, bit for bit
            return super().forward(input.hp if isinstance(input, CastInput) else input)
        given: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if isinstance(input, CastInput):
            shared = input.for_grad_weight is input.for_output  # given once: Dynamo takes no tensor twice
            given = (input.for_output, None if shared else input.for_grad_weight)
            if input.casts != _input_casts(self.recipe):
                raise ValueError(
                    f"input was cast for another recipe than {self.recipe}; cast it for this layer"
                )
            input = input.hp
        else:
            input = _after_autocast(input)
        check_hp(input, "input")
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(f"input has shape {list(input.shape)}; expected [..., {self.in_features}]")
        flat = input.reshape(-1, self.in_features)
        self._check_shapes(flat)
        if isinstance(flat, Float8Tensor):
            self._check_cast(flat)
        cache = None if torch.compiler.is_compiling() else self.weight_cache
        plan = _Plan(self.recipe, self.amaxes, cache, torch.is_grad_enabled())
        output = _ScaledLinear.apply(flat, self.weight, *given, plan)
        output = output.reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _check_cast(self, flat: Float8Tensor) -> None:
        """A Float8Tensor as input must be what the recipe would have made, for each GEMM that will read it."""
        for_output, for_grad_weight = _input_casts(self.recipe)
        found = f"{flat.format.short}_{flat.granularity}"
        if for_output is None or (flat.format, flat.granularity) != (
            for_output.format,
            for_output.granularity,
        ):
            raise ValueError(f"input is a Float8Tensor {found}; recipe {self.recipe} wants {for_output}")
        trains = torch.is_grad_enabled() and self.weight.requires_grad
        if trains and not serves_both(for_output, for_grad_weight):
            raise ValueError(
                f"input is a Float8Tensor {found}, but grad_weight wants {for_grad_weight} along the tokens, which "
                "codes can't give; pass the tensor itself, or fp8core.cast_input(x, layer)"
            )

    def _check_shapes(self, flat: torch.Tensor) -> None:
        """Refuses, before anything runs, the GEMMs that this call leads to and the hardware can't do."""
        recipe = self.recipe
        if recipe.pad_inner_dim or not backend_named(recipe.backend).is_fp8:
            return
        M, K, N = flat.shape[0], self.in_features, self.out_features
        device = self.weight.device
        trains = torch.is_grad_enabled()
        for name, will_run, size in (
            ("output", True, (M, K, N)),
            ("grad_input", trains and flat.requires_grad, (M, N, K)),
            ("grad_weight", trains and self.weight.requires_grad, (N, M, K)),
        ):
            gemm = recipe.gemms[name]
            if not will_run or gemm.a is None or gemm.b is None:
                continue
            reason = layout.shape_reason(
                *size, gemm.a.format, gemm.b.format, gemm.granularity, _result_dtype(gemm, flat.dtype)
            )
            reason = layout.granularity_reason(device, gemm.granularity, recipe.nearest) or reason
            if reason is not None:
                tokens = f" with {M} tokens" if name == "grad_weight" else ""
                raise ValueError(f"GEMM {name} of Float8Linear({K}, {N}){tokens}: {reason}")

    def extra_repr(self) -> str:
        """nn.Linear's, and the recipe; a custom one operand by operand."""
        recipe = self.recipe
        detail = ""
        if recipe.name == "custom":
            detail = " (" + "; ".join(f"{name}: {gemm}" for name, gemm in recipe.gemms.items()) + ")"
        return f"{super().extra_repr()}, recipe={recipe}{detail}"


class _Plan(NamedTuple):
    """What the three GEMMs need besides tensors. `trains`: a backward pass can follow."""

    recipe: Recipe
    amaxes: AmaxMemory | None
    cache: WeightCache | None
    trains: bool


class _ScaledLinear(torch.autograd.Function):
    """The three GEMMs; input [M, K] with its casts if they are there already, weight [N, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        input_hp: torch.Tensor,
        weight_hp: torch.Tensor,
        given: torch.Tensor | None,
        given_for_grad_weight: torch.Tensor | None,
        plan: _Plan,
    ) -> torch.Tensor:
        recipe, amaxes = plan.recipe, plan.amaxes
        casts = _input_casts(recipe)
        input_lp, kept = given, given_for_grad_weight
        needs_kept = plan.trains and ctx.needs_input_grad[1]
        if input_lp is None and needs_kept:
            input_lp, kept = cast_both(input_hp, *casts, amaxes, "input")
        elif input_lp is None:
            input_lp = cast_one(input_hp, casts[0], 1, amaxes, "input")
        elif (
            kept is None and needs_kept
        ):  # one cast serves both, or the shared ones were made where nothing trained
            kept = input_lp if serves_both(*casts) else cast_one(input_hp, casts[1], 0, amaxes, "input")
        weight_lp, weight_kept = _weight_operands(weight_hp, plan, ctx.needs_input_grad[0])
        ctx.save_for_backward(kept if needs_kept else None, weight_kept)
        ctx.plan = plan
        return _matmul(input_lp, weight_lp.t(), recipe.output, recipe, input_hp.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        kept, weight_kept = ctx.saved_tensors
        recipe, amaxes = ctx.plan.recipe, ctx.plan.amaxes
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        for_input, for_weight = recipe.grad_input.a, recipe.grad_weight.a
        grad_input = grad_weight = None
        if needs_input and needs_weight:
            grad, grad_gw = cast_both(grad_output, for_input, for_weight, amaxes, "grad_output")
        elif needs_input:
            grad = cast_one(grad_output, for_input, 1, amaxes, "grad_output")
        else:
            grad_gw = cast_one(grad_output, for_weight, 0, amaxes, "grad_output")
        if needs_input:
            weight = cast_one(weight_kept, recipe.grad_input.b, 0, amaxes, "weight")
            grad_input = _matmul(grad, weight, recipe.grad_input, recipe, grad_output.dtype)
        if needs_weight:
            grad_weight = _matmul(grad_gw.t(), kept, recipe.grad_weight, recipe, grad_output.dtype)
        return grad_input, grad_weight, None, None, None


def _weight_operands(
    weight: torch.Tensor, plan: _Plan, needed_again: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """weight [N, K] for the output GEMM, and what grad_input's operand will be made from.

    That is the same cast where it serves both; else the weight itself, cast in the backward pass, or within
    `microbatches` its second cast, made here so that it is made once.
    """
    recipe, amaxes = plan.recipe, plan.amaxes
    first, second = recipe.output.b, recipe.grad_input.b
    again = plan.trains and needed_again
    if plan.cache is not None and not isinstance(weight, Float8Tensor):
        lp, lp_again = plan.cache.operands(weight, lambda: cast_both(weight, first, second, amaxes, "weight"))
        return lp, lp_again if again else None
    lp = cast_one(weight, first, 1, amaxes, "weight")
    return lp, (lp if serves_both(first, second) else weight) if again else None


def _input_casts(recipe: Recipe) -> tuple[Cast | None, Cast | None]:
    """Of the input, in the output and in the grad_weight GEMM."""
    return recipe.output.a, recipe.grad_weight.b


def _after_autocast(x: torch.Tensor) -> torch.Tensor:
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def _matmul(
    a: torch.Tensor, b: torch.Tensor, gemm: Gemm, recipe: Recipe, out_dtype: torch.dtype
) -> torch.Tensor:
    """a [M, K] @ b [K, N] in FP8 if the operands are, else in high precision."""
    if not isinstance(a, Float8Tensor) or not isinstance(b, Float8Tensor):
        return a @ b.to(a.dtype)
    result_dtype = _result_dtype(gemm, out_dtype)  # emulated too: the same roundings
    if not backend_named(recipe.backend).is_fp8:
        return scaled_mm(a, b, result_dtype, gemm.fast_accum, recipe.backend).to(out_dtype)
    columns = b.shape[1]
    left, right = layout.arrange(a, b, pad=recipe.pad_inner_dim)
    product = scaled_mm(left, right, result_dtype, gemm.fast_accum, recipe.backend)
    return product[:, :columns].to(out_dtype)


def _result_dtype(gemm: Gemm, out_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the hardware can yield a result that is then converted to `out_dtype`."""
    return out_dtype if gemm.granularity == "tensorwise" else torch.bfloat16
