"""Float8Linear: nn.Linear whose three GEMMs run in FP8.

    output      [M, N] = input         [M, K] @ weight.T [K, N] (+ bias)
    grad_input  [M, K] = grad_output   [M, N] @ weight   [N, K]
    grad_weight [N, K] = grad_output.T [N, M] @ input    [M, K]

M counts tokens: all leading dimensions of the input, flattened. Each operand is cast as the recipe says, right
before the GEMM that needs it; parameters, gradients and state_dict stay in high precision. One
`autograd.Function` holds all three GEMMs, since an FP8 operand that crossed autograd into `torch.mm` would
meet a high-precision gradient in the backward pass.

What is kept for the backward pass: the weight as it is (no copy), and the input either in FP8, where the
same cast serves grad_weight (tensorwise: one byte an element instead of two or four), or as it is.

The result has the dtype of the (autocast) input, whatever the weight's. Rowwise GEMMs yield bfloat16 on
hardware, so a float32 or float16 rowwise layer is rounded to bfloat16 once for each GEMM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8core.config import Float8LinearConfig, as_recipe
from fp8core.gemm import backend_named, layout, scaled_mm
from fp8core.scaling import check_hp
from fp8core.tensor import Float8Tensor, quantize

if TYPE_CHECKING:
    from fp8core.recipe import Cast, Gemm, Recipe


class Float8Linear(nn.Linear):
    """Drop-in nn.Linear in FP8.

    Attributes:
        recipe: what is cast and how.
    """

    recipe: Recipe

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
        return new.train(mod.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input @ weight.T + bias`.

        Args:
            input: float32, bfloat16 or float16, [..., in_features]; any number of leading dimensions, none
                and sizes of 0 included. Under autocast it is first converted to the autocast dtype.

        Returns:
            [..., out_features] of the (converted) input's dtype.

        Raises:
            ValueError: last dimension is not in_features, or a GEMM that this call leads to would break a
                rule of the hardware (see `fp8core.gemm.layout`); tokens must be a multiple of 16 to train
                with an FP8 grad_weight.
            TypeError: dtype.
        """
        device = input.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        check_hp(input, "input")
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(f"input has shape {list(input.shape)}; expected [..., {self.in_features}]")
        flat = input.reshape(-1, self.in_features)
        self._check_shapes(flat)
        output = _ScaledLinear.apply(flat, self.weight, self.recipe)
        output = output.reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _check_shapes(self, flat: torch.Tensor) -> None:
        """Refuses, before anything runs, the GEMMs that this call leads to and the hardware can't do."""
        recipe = self.recipe
        if recipe.pad_inner_dim or not backend_named(recipe.backend).is_fp8:
            return
        M, K, N = flat.shape[0], self.in_features, self.out_features
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


class _ScaledLinear(torch.autograd.Function):
    """The three GEMMs; input [M, K], weight [N, K]."""

    @staticmethod
    def forward(ctx: Any, input_hp: torch.Tensor, weight_hp: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        gemm = recipe.output
        input_lp = _cast(input_hp, gemm.a, dim=1)
        weight_lp = _cast(weight_hp.t(), gemm.b, dim=0)
        kept = input_lp if _serves_both(gemm.a, recipe.grad_weight.b) else input_hp
        ctx.save_for_backward(kept, weight_hp)
        ctx.recipe = recipe
        return _matmul(input_lp, weight_lp, gemm, recipe, input_hp.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        kept, weight_hp = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        grad_input = grad_weight = None
        grad: torch.Tensor = grad_output
        if ctx.needs_input_grad[0]:
            gemm = recipe.grad_input
            grad_lp = _cast(grad_output, gemm.a, dim=1)
            grad_input = _matmul(grad_lp, _cast(weight_hp, gemm.b, dim=0), gemm, recipe, grad_output.dtype)
            if _serves_both(gemm.a, recipe.grad_weight.a):
                grad = grad_lp
        if ctx.needs_input_grad[1]:
            gemm = recipe.grad_weight
            grad_lp, input_lp = _cast(grad.t(), gemm.a, dim=1), _cast(kept, gemm.b, dim=0)
            grad_weight = _matmul(grad_lp, input_lp, gemm, recipe, grad_output.dtype)
        return grad_input, grad_weight, None


def _cast(x: torch.Tensor, cast: Cast | None, dim: int) -> torch.Tensor:
    """One operand as its GEMM wants it: in FP8 scaled along `dim`, or as it is (None, or cast before)."""
    if cast is None or isinstance(x, Float8Tensor):
        return x
    return quantize(x, cast.format, cast.granularity, dim=dim, power_of_two=cast.power_of_two)


def _serves_both(first: Cast | None, second: Cast | None) -> bool:
    """Whether one cast of a tensor can serve two GEMMs that contract it over different axes."""
    return first is not None and first == second and first.axis_free


def _matmul(
    a: torch.Tensor, b: torch.Tensor, gemm: Gemm, recipe: Recipe, out_dtype: torch.dtype
) -> torch.Tensor:
    """a [M, K] @ b [K, N] in FP8 if the operands are, else in high precision."""
    if not isinstance(a, Float8Tensor) or not isinstance(b, Float8Tensor):
        return a @ b.to(a.dtype)
    if not backend_named(recipe.backend).is_fp8:
        return scaled_mm(a, b, out_dtype, gemm.fast_accum, recipe.backend)
    columns = b.shape[1]
    left, right = layout.arrange(a, b, pad=recipe.pad_inner_dim)
    product = scaled_mm(left, right, _result_dtype(gemm, out_dtype), gemm.fast_accum, recipe.backend)
    return product[:, :columns].to(out_dtype)


def _result_dtype(gemm: Gemm, out_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the hardware can yield a result that is then converted to `out_dtype`."""
    return torch.bfloat16 if gemm.granularity == "rowwise" else out_dtype
