"""A linear layer in FP8: what is cast, how, and what the three products read. Everything else attaches to this page.

A layer multiplies three times. M counts tokens (all leading dimensions of the input, flattened), K input features, N outputs:

    product        [shape]  = left operand  [shape]  @ right operand [shape]    contracts
    output         [M, N]   = input         [M, K]   @ weight.T      [K, N]     K
    grad_input     [M, K]   = grad_output   [M, N]   @ weight        [N, K]     N
    grad_weight    [N, K]   = grad_output.T [N, M]   @ input         [M, K]     M

Parameters, outputs, gradients and the bias (which `fp8core.linear` adds) stay in high precision. Operands alone are FP8, and each of
the three tensors is an operand twice, contracted along another of its dimensions each time.

Dtypes. e4m3 has 3 bits of mantissa and reaches 448, for precision; e5m2 has 2 and reaches 57,344, for range, which gradients need
where a whole tensor shares one scale. Where each row has its own, that scale brings a gradient into range, and e4m3 serves too.
The matrix units have no product of e5m2 by e5m2, and none arises: a gradient is always the left operand.

                   one scale a tensor ("tensorwise")    one scale a line ("rowwise")
    input          e4m3                                 e4m3
    weight         e4m3                                 e4m3
    grad_output    e5m2                                 e4m3

    product        left by right        dtype of the result
    output         input, weight        the input's
    grad_input     grad, weight         grad_output's
    grad_weight    grad, input          grad_output's; autograd converts it to the weight's

torch's kernels for anything but one scale a tensor write bfloat16 alone: a result of another dtype is rounded to it first.
"rowwise_with_gw_hp" is rowwise but for two products: grad_weight multiplies the tensors in high precision, and grad_input reads a
weight that the backward pass casts with a single scale.

Casts. `amax` is the largest magnitude of the elements that share a scale:

    scale     = fp8_max / amax                         float32; the rowwise recipes round it down to a power of two
    codes     = round(clamp(x * scale))                one byte an element; x * scale is computed in float32
    scale_inv = 1 / scale                              kept beside the codes: codes * scale_inv is about x

An amax below 1e-12 counts as that, so zeros stay zeros; a group that holds Inf or NaN becomes NaN.

Scales are applied after the sum, so all elements that are summed share one. "tensorwise": one for the tensor, so that the same
codes serve both products that read it. "rowwise": one for each line along the contracted dimension (a row for one product, a
column for the other), so that a tensor is cast twice. Blocks (`fp8core.recipe`) are lines cut into pieces.

Layout. Hopper's FP8 units read both operands along the contracted dimension, so here an operand is a matrix of *lines*, each of
which is contracted as a whole, and a right operand is stored turned:

    output         left [M, K], right [N, K]
    grad_input     left [M, N], right [K, N]
    grad_weight    left [N, M], right [K, M]

`product` views the right one as its transpose, which then is column-major, as the units want it. Plain casts leave codes in memory
as the tensor lies. Of row-major tensors, those that are contracted over the other dimension are copied for an FP8 backend, byte by
byte: the weight's for grad_input, and both operands of grad_weight. Kernels that cast for both products write both orientations
from one read instead.

Saved from the forward pass for the backward pass, where the gradient that reads it is needed:

                          input, for grad_weight                         weight, for grad_input
    tensorwise            codes and scale, as cast for the output        codes and scale, as cast for the output
    rowwise               codes and scales, cast along the tokens        the parameter, which lives anyway
    rowwise_with_gw_hp    the tensor itself                              the parameter

Codes are a byte an element, where nn.Linear keeps the input, two or four bytes, and nothing of the weight beside the parameter. The
input is cast for grad_weight in the forward pass already, or its high-precision copy would have to be kept. Codes of the weight
cost a byte an element until the backward pass, and spare a cast; where the parameter alone is kept, the backward pass casts it
along its other dimension. grad_output is cast in the backward pass, for both of its products at once where both are FP8.

torchao 0.18 has the same results by the same kernels, bit for bit, but for rare scales just below a power of two (see
`fp8core.scaling`). It saves input and weight in high precision and casts each operand of each FP8 product anew, six times a step (four
for rowwise_with_gw_hp). This layer casts as often, and half as often tensorwise. torchao's operands are tensor subclasses, whose every
view passes through the dispatcher; here they are plain pairs.

What attaches from outside: `fp8core.linear` holds parameters, checks a call, and remembers its plan for calls of that shape;
subclasses of `Plan` in `fp8core.inputs.attached` go other ways to the same operands: kernels, remembered amaxes, amaxes shared by
ranks, casts kept over microbatches or shared by layers, codes that FSDP2 gathered, and a look at each cast for `fp8core.watch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fp8core import cast as casts
from fp8core import four_bits
from fp8core.gemm import KNOWN, backend_named, layout, scaled_mm
from fp8core.gemm.layout import Operand, transposed

if TYPE_CHECKING:
    from fp8core.recipe import Cast, Gemm, Recipe

Lines = (
    Operand | torch.Tensor
)  # codes and scales; the tensor itself where a recipe leaves a product in high precision
Saved = tuple[
    torch.Tensor | None, ...
]  # the three of an operand; or a tensor that is no operand yet, and None twice
NOT_SAVED: Saved = (None, None, None)
Gradients = tuple[torch.Tensor | None, ...]


def cast_lines(
    x: torch.Tensor,
    cast: Cast | None,
    dim: int,
    role: str = "",
    amax: torch.Tensor | None = None,
    draws: torch.Tensor | None = None,
) -> Lines:
    """Cast a matrix for one product.

    Args:
        x: [M, K] in high precision, any layout.
        cast: its format, granularity and rounding of scales; None leaves it in high precision.
        dim: of x, which the product contracts.
        role: "input", "weight" or "grad_output"; for casts that depend on it, which attach in this one's place.
        amax: of all that shares a single scale, where x is a part of it; None: x's own.
        draws: of stochastic rounding, of x's shape.

    Returns:
        Lines along `dim`: codes [M, K] for 1 and [K, M] for 0, in memory as x is; scales in the same orientation. Of e2m1 two
        codes a byte of uint8, since Inductor has no other dtype for them on a CPU (torch 2.13).
    """
    if cast is None:
        return x if dim == 1 else x.t()
    if cast.is_four_bit:
        return four_bits.quantize_lines(x, cast, dim, draws)
    if cast.granularity == "rowwise" and not torch.compiler.is_compiling():
        return Operand(*casts.cast_rowwise(x, cast.format, (dim,), power_of_two=cast.power_of_two)[0])
    codes, scale_inv = casts.scale_and_cast(
        x,
        cast.format,
        cast.granularity,
        dim=dim,
        power_of_two=cast.power_of_two,
        mx_mode=cast.mx_mode,
        known_amax=amax if cast.granularity == "tensorwise" else None,
    )
    operand = Operand(codes, scale_inv)
    return operand if dim == 1 else transposed(operand)


def serves_both(first: Cast | None, second: Cast | None) -> bool:
    """Whether the same codes serve two products that contract a tensor over different dimensions."""
    return first is not None and (first is second or first == second) and first.axis_free


def cast_both_ways(
    x: torch.Tensor, along_1: Cast | None, along_0: Cast | None, role: str = ""
) -> tuple[Lines, Lines]:
    """Cast a matrix for its two products: (lines [M, K], lines [K, M]), each as of `cast_lines`.

    Casts that are alike share work: one that does not depend on the dimension is viewed twice, and in eager mode scales of rows
    and of columns are computed together, which takes fewer operators.
    """
    if along_1 is not None and (along_1 is along_0 or along_1 == along_0):
        if along_1.axis_free:
            lines = cast_lines(x, along_1, 1)
            assert isinstance(lines, Operand)
            return lines, transposed(lines)
        if along_1.granularity == "rowwise" and not torch.compiler.is_compiling():
            rows, columns = casts.cast_rowwise(x, along_1.format, (1, 0), power_of_two=along_1.power_of_two)
            return Operand(*rows), Operand(*columns)
    return cast_lines(x, along_1, 1), cast_lines(x, along_0, 0)


def product(left: Lines, right: Lines, gemm: Gemm, recipe: Recipe, out_dtype: torch.dtype) -> torch.Tensor:
    """left [m, k] @ right [n, k].T -> [m, n] of out_dtype, both being lines; in high precision if they are no codes.

    Only the forward product may accumulate fast, in about 14 bits on Hopper; gradients are promoted to float32. Scales are
    applied to the sum. What a backend writes in bfloat16 alone (`Backend.bf16_only`) is rounded to it, once a product.
    """
    if not isinstance(left, Operand) or not isinstance(right, Operand):
        if isinstance(left, Operand) or isinstance(right, Operand):
            raise TypeError(
                f"recipe {recipe} multiplies in high precision, but one operand consists of FP8 codes; pass .dequantize()"
            )
        return left @ right.t().to(left.dtype)
    backend = KNOWN.get(recipe.backend) or backend_named(recipe.backend)
    columns = right.qdata.shape[0]
    if backend.is_fp8 and recipe.pad_inner_dim:
        left, right = layout.padded(left, right)
    codes, scale_inv, tensor_scale_inv = right
    if scale_inv.dim():  # [n, 1].t() has strides that the rowwise kernel would have to copy away
        lines, groups = scale_inv.shape
        scale_inv = scale_inv.reshape(1, lines) if groups == 1 else scale_inv.t()
    (rows, along), (left_rows, left_along) = codes.stride(), left.qdata.stride()
    # Copies what does not lie along the contracted dimension
    if backend.is_fp8 and not (along == left_along == 1 and rows > 1 and left_rows > 1):
        codes, left = layout.row_major(codes), Operand(layout.row_major(left.qdata), *left[1:])
    right = Operand(codes.t(), scale_inv, tensor_scale_inv)
    dtype = torch.bfloat16 if gemm.granularity in backend.bf16_only else out_dtype
    result = scaled_mm(left, right, dtype, gemm.fast_accum, recipe.backend)
    if recipe.pad_inner_dim:
        result = result[:, :columns]
    return result if result.dtype == out_dtype else result.to(out_dtype)


@dataclass(eq=False)
class Plan:
    """What the products of one call need besides tensors, and how its tensors become operands; holds nothing of the call.

    Attributes:
        recipe: what is cast and how.
        trains: a backward pass can follow; if not, nothing is saved for one.
        cast, cast_twice: make a tensor the operand of one product, and of both that read it.
    """

    recipe: Recipe
    trains: bool

    cast = staticmethod(cast_lines)
    cast_twice = staticmethod(cast_both_ways)

    def of_input(
        self, x: torch.Tensor, for_gradient: bool, *given: torch.Tensor | None
    ) -> tuple[Lines, Saved]:
        """Return the left operand of the output; and what to save for grad_weight, which reads x too.

        `given`: casts of x that are there already, for subclasses; without a meaning here.
        """
        first, second = self.recipe.output.a, self.recipe.grad_weight.b
        if not for_gradient:
            return self.cast(x, first, 1, "input"), NOT_SAVED
        lines, turned = self.cast_twice(x, first, second, "input")
        return lines, turned if isinstance(turned, Operand) else (x, None, None)

    def of_weight(self, weight: torch.Tensor, for_gradient: bool) -> tuple[Lines, Saved]:
        """Return the right operand of the output; and what to save for grad_input, which reads the weight too."""
        first, second = self.recipe.output.b, self.recipe.grad_input.b
        if for_gradient and serves_both(first, second):
            lines, turned = self.cast_twice(weight, first, second, "weight")
            return lines, turned if isinstance(turned, Operand) else (weight, None, None)
        return self.cast(weight, first, 1, "weight"), (weight, None, None) if for_gradient else NOT_SAVED

    def for_output(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        needs_x: bool,
        needs_weight: bool,
        *given: torch.Tensor | None,
    ) -> tuple[Lines, Lines, Saved]:
        """Return the operands of the output, and what to save for those gradients that are needed."""
        x_lines, saved_x = self.of_input(x, needs_weight, *given)
        weight_lines, saved_weight = self.of_weight(weight, needs_x)
        return x_lines, weight_lines, (*saved_x, *saved_weight)

    def for_gradients(
        self, grad: torch.Tensor, needs_x: bool, needs_weight: bool, saved: Saved
    ) -> tuple[Lines | None, Lines | None, Lines | None, Lines | None]:
        """Return the operands of grad_input, then those of grad_weight; None for a gradient that no one needs."""
        (x, *x_scales), (weight, *weight_scales) = saved[:3], saved[3:]
        recipe = self.recipe
        grad_lines = grad_turned = x_turned = weight_turned = None
        if needs_x and needs_weight:
            grad_lines, grad_turned = self.cast_twice(
                grad, recipe.grad_input.a, recipe.grad_weight.a, "grad_output"
            )
        elif needs_x:
            grad_lines = self.cast(grad, recipe.grad_input.a, 1, "grad_output")
        else:
            grad_turned = self.cast(grad, recipe.grad_weight.a, 0, "grad_output")
        if needs_x:
            assert weight is not None
            weight_turned = (
                self.cast(weight, recipe.grad_input.b, 0, "weight")
                if weight_scales[0] is None
                else Operand(weight, weight_scales[0], weight_scales[1])
            )
        if needs_weight:
            assert x is not None
            x_turned = (
                self.cast(x, None, 0, "input")
                if x_scales[0] is None
                else Operand(x, x_scales[0], x_scales[1])
            )
        return grad_lines, weight_turned, grad_turned, x_turned


class _ScaledLinear(torch.autograd.Function):
    """The three products as one node: autograd sees a high-precision input, weight and output, and no codes.

    If codes were its inputs, autograd would convert their gradients to FP8. A cast's derivative is taken as 1.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, plan: Plan, *given: torch.Tensor | None
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2] if plan.trains else (False, False)
        x_lines, weight_lines, saved = plan.for_output(x, weight, needs_x, needs_weight, *given)
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.given = plan, len(given)
        return product(x_lines, weight_lines, plan.recipe.output, plan.recipe, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Gradients:
        # Only where a graph of this pass is recorded can anyone differentiate it again, which is refused
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _gradients_once(ctx, grad_output)
        return _ScaledLinear.gradients(ctx, grad_output)

    @staticmethod
    def gradients(ctx: Any, grad_output: torch.Tensor) -> Gradients:
        """Return the gradients of x and of the weight, where needed; autograd converts the latter to the weight's dtype."""
        plan: Plan = ctx.plan
        recipe, dtype = plan.recipe, grad_output.dtype
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        lines, weight, lines_0, x = plan.for_gradients(grad_output, needs_x, needs_weight, ctx.saved_tensors)
        grad_x = grad_weight = None
        if lines is not None and weight is not None:
            grad_x = product(lines, weight, recipe.grad_input, recipe, dtype)
        if lines_0 is not None and x is not None:
            grad_weight = product(lines_0, x, recipe.grad_weight, recipe, dtype)
        return grad_x, grad_weight, *(None,) * (1 + ctx.given)


_gradients_once = torch.autograd.function.once_differentiable(_ScaledLinear.gradients)


def multiply(x: torch.Tensor, weight: torch.Tensor, plan: Plan, *given: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] by weight [N, K] -> [..., N], as the plan says; no checks. `given` are casts of x that are there already."""
    dims = x.dim()
    # Compiled with dynamic=True, an argument of the graph that is passed to the autograd function itself gave a wrong
    # grad_weight (12 dB, torch 2.13, casts along the open dimension); a view of it does not: test_compile.py
    flat = x if dims == 2 and not torch.compiler.is_compiling() else as_matrix(x, weight.shape[1])
    output = _ScaledLinear.apply(flat, weight, plan, *given)
    if dims == 2:  # of a matrix it would be a view all the same, and FSDP2 warns of modules that return one
        return output
    return output.reshape(*x.shape[:-1], weight.shape[0])


def as_matrix(x: torch.Tensor, in_features: int) -> torch.Tensor:
    """Reshape x [..., in_features] to tokens [M, in_features]: a view where its strides allow one."""
    return x.reshape(-1 if in_features else x.shape[:-1].numel(), in_features)
