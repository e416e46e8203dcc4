"""grouped_mm: the three GEMMs of stacked weights, one group of rows for each expert, in FP8.

    output      [T, N]      rows of e: input [T, K] @ weight[e].T [K, N]
    grad_input  [T, K]      rows of e: grad_output [T, N] @ weight[e] [N, K]
    grad_weight [E, N, K]   of e: grad_output[rows of e].T [N, .] @ input[rows of e] [., K]

with the casts and GEMMs of a recipe. Which elements share a scale:

    tensorwise   all tokens, of all experts; each expert's weight
    rowwise      each token, each output channel of each expert (output), each input channel (grad_input); over the
                 tokens of one expert, each channel (grad_weight)
    1x128, 1x32  as of a matrix; no block reaches from one expert to another
    128x128      squares of each expert's weight, whose N must be a multiple of 128

So rowwise and blocks give what a `Float8Linear` for each expert would, bit for bit; tensorwise does where no expert's
tokens are larger than another's. Delayed and static scaling are refused: one amax history for a changing choice of
tokens an expert is not defined.

Groups begin at multiples of `alignment(recipe)` rows: FP8 contracts multiples of 16, and blocks of tokens must not
be shared. `pad_groups` makes room with rows of zeros, without waiting for the device: a size that depends on no data.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fp8core.arguments import check_type
from fp8core.cast import cast_saturating, scaled_f32
from fp8core.config import Float8LinearConfig, as_recipe
from fp8core.gemm import backend_named, layout
from fp8core.gemm.grouped import check_offsets, grouped_mm_hp, scaled_grouped_mm
from fp8core.gemm.layout import Operand
from fp8core.inputs.operands import cast_one, serves_both
from fp8core.inputs.shared_input import after_autocast
from fp8core.recipe import RECIPES, Cast, Gemm, Recipe
from fp8core.scaling import BLOCK, MX_BLOCK, check_hp, compute_scale
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8core.observers import CallObserver

HIGH_PRECISION = replace(
    RECIPES["tensorwise"],
    name="high precision",
    doc="No GEMM in FP8.",
    output=Gemm(None, None),
    grad_input=Gemm(None, None),
    grad_weight=Gemm(None, None),
)

Half = tuple[
    torch.Tensor, torch.Tensor | None
]  # of an operand: (codes, scale_inv), or (high precision, None)


class PaddedGroups(NamedTuple):
    """Rows by group, each group filled up with zeros; made by `pad_groups`.

    Attributes:
        x: [P, K]; rows after the last group are zero too.
        offsets: int32 [E], where each group ends, padding included.
        places: int64 [T], where each row went; None if none moved.
    """

    x: torch.Tensor
    offsets: torch.Tensor
    places: torch.Tensor | None

    def restore(self, y: torch.Tensor) -> torch.Tensor:
        """[P, N] -> [T, N]: what belongs to the rows, without padding."""
        return y if self.places is None else y.index_select(0, self.places)


def pad_groups(x: torch.Tensor, offsets: torch.Tensor, multiple: int) -> PaddedGroups:
    """Fills each group of rows up to a multiple.

    >>> import torch
    >>> rows = pad_groups(torch.arange(1.0, 4.0)[:, None], torch.tensor([1, 1, 3], dtype=torch.int32), 2)
    >>> rows.x.flatten().tolist(), rows.offsets.tolist()  # one row, none and two
    ([1.0, 0.0, 2.0, 3.0, 0.0, 0.0], [2, 2, 4])
    >>> rows.restore(rows.x).flatten().tolist()
    [1.0, 2.0, 3.0]

    Args:
        x: [T, K], sorted by group; gradients flow through it.
        offsets: int32 [E], where each group ends; the last is T.
        multiple: of rows; 1 changes nothing.

    Returns:
        PaddedGroups with P = (T + min(E, T) (multiple - 1)), rounded down to the multiple: enough for any offsets.
    """
    check_groups(x, offsets)
    if multiple == 1:
        return PaddedGroups(x, offsets, None)
    total, groups = x.shape[0], offsets.shape[0]
    sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
    padded = (sizes + multiple - 1) // multiple * multiple
    ends = padded.cumsum(0).to(torch.int32)
    shift = (ends - padded) - (offsets - sizes)
    places = torch.arange(total, device=x.device) + shift[group_of_row(offsets, total)]
    room = (total + min(groups, total) * (multiple - 1)) // multiple * multiple
    return PaddedGroups(x.new_zeros(room, x.shape[1]).index_copy(0, places, x), ends, places)


def group_of_row(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 [rows]: the group of each row; rows of padding after the last count for it."""
    numbers = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.bucketize(numbers, offsets, right=True).clamp(max=offsets.shape[0] - 1)


def check_groups(x: torch.Tensor, offsets: torch.Tensor, *, exact: bool = True, multiple: int = 1) -> None:
    """Refuses rows and offsets that don't fit. Values are looked at where that costs no wait: on a CPU, in eager mode; else
    the device refuses rows behind the last offset.

    Raises:
        ValueError, TypeError: names the value and what is expected.
    """
    check_type("x", x, torch.Tensor)
    check_type("offsets", offsets, torch.Tensor)
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; expected [T, K], flatten leading dimensions first")
    if offsets.dtype != torch.int32:
        raise TypeError(f"offsets have dtype {offsets.dtype}; expected int32, call .to(torch.int32)")
    if offsets.dim() != 1 or not offsets.shape[0]:
        raise ValueError(f"offsets have shape {list(offsets.shape)}; expected [E], one end for each expert")
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling() and type(offsets) is torch.Tensor:
        check_offsets(offsets, x.shape[0], exact=exact, multiple=multiple)
    elif exact:
        torch._assert_async(offsets[-1] == x.shape[0], "the last offset must be the number of rows")


def grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    config: Float8LinearConfig | Recipe | str | None = None,
) -> torch.Tensor:
    """x[rows of e] @ weight[e].T for each expert e, with its gradients, in FP8; groups of any size.

    Args:
        x: float32, bfloat16 or float16 [T, K], rows sorted by expert. Under autocast it is first converted.
        weight: [E, N, K], of any of these dtypes; any layout.
        offsets: int32 [E], where each expert's rows end; the last is T.
        config: a configuration, a recipe or its name; default "rowwise", the one that the grouped kernel runs.

    Returns:
        [T, N] in the dtype of the (converted) x.

    Raises:
        ValueError: shapes that don't fit, offsets that are no rising sequence up to T, or a recipe that is not
            offered for groups, see `recipe_reason`.
        TypeError: dtypes.
    """
    recipe = RECIPES["rowwise"] if config is None else as_recipe(config)
    rows = pad_groups(x, offsets, alignment(recipe))
    return rows.restore(aligned_grouped_mm(rows.x, weight, rows.offsets, recipe))


def aligned_grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    recipe: Recipe,
    stats: CallObserver | None = None,
) -> torch.Tensor:
    """`grouped_mm` of groups that end at multiples of `alignment(recipe)`, such as `pad_groups` makes.

    Rows of x after the last offset must be zero; those of the result are. `stats` is shown the casts, in a watched step.

    Raises:
        ValueError, TypeError: as `grouped_mm`, and an offset that is no such multiple.
    """
    check_groups(x, offsets, exact=False, multiple=alignment(recipe))
    x = after_autocast(x)
    check_hp(x, "x")
    check_hp(weight, "weight")
    if weight.dim() != 3 or weight.shape[0] != offsets.shape[0] or weight.shape[2] != x.shape[1]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; expected [E, N, K] = [{offsets.shape[0]}, N, {x.shape[1]}], as "
            "offsets and x are"
        )
    reason = recipe_reason(recipe, weight.shape[1], weight.shape[2], x.device)
    if reason is not None:
        raise ValueError(f"recipe {recipe}: {reason}")
    return _GroupedMatmul.apply(x, weight, offsets, recipe, torch.is_grad_enabled(), stats)


def alignment(recipe: Recipe) -> int:
    """The multiple of rows at which groups must end: 16, more for blocks of tokens; 1 without FP8."""
    if not recipe.fp8_gemms:
        return 1
    along = {cast.granularity for cast in (recipe.grad_weight.a, recipe.grad_weight.b) if cast is not None}
    squares = {cast.granularity for cast in (recipe.output.a, recipe.grad_input.a) if cast is not None}
    if along & {"1x128", "128x128"} or "128x128" in squares:
        return BLOCK
    return MX_BLOCK if "1x32" in along else layout.MULTIPLE


def recipe_reason(recipe: Recipe, N: int, K: int, device: torch.device) -> str | None:
    """Why the recipe is not offered for groups with weights [E, N, K]; None if it is."""
    if recipe.is_four_bit:
        return "four bits are not offered for groups; take recipe 'rowwise' for the experts"
    if recipe.scaling != "dynamic":
        near = f"; take {recipe.nearest!r}" if recipe.nearest else ""
        return (
            f"{recipe.scaling} scaling is not defined for groups, whose tokens change from step to step{near}"
        )
    if recipe.pad_inner_dim:
        return "pad_inner_dim is not offered for groups; make the experts' sizes multiples of 16"
    weights = [cast for cast in (recipe.output.b, recipe.grad_input.b) if cast is not None]
    if N % BLOCK and any(cast.granularity == "128x128" for cast in weights):
        return f"N={N} is not a multiple of {BLOCK}, so that a 128x128 block would lie in two experts; take 'rowwise'"
    some = alignment(recipe)
    sizes = {"output": (some, K, N), "grad_input": (some, N, K), "grad_weight": (N, some, K)}
    for name, gemm in recipe.gemms.items():
        if gemm.a is None or gemm.b is None:
            continue
        formats = gemm.a.format, gemm.b.format
        rules = backend_named(recipe.backend)
        where = "cpu" if device.type == "meta" else device
        reason = rules.unsupported(
            *sizes[name], *formats, gemm.granularity, device=where, nearest=recipe.nearest
        )
        if reason is not None:
            return f"GEMM {name}: {reason}"
    return None


class _GroupedMatmul(torch.autograd.Function):
    """The three GEMMs; x [T, K], weight [E, N, K], offsets [E]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        offsets: torch.Tensor,
        recipe: Recipe,
        trains: bool,
        stats: CallObserver | None,
    ) -> torch.Tensor:
        for_output = _cast(x, recipe.output.a, 1, recipe)
        kept: Half = (x, None)
        if trains and ctx.needs_input_grad[1]:
            same = serves_both(recipe.output.a, recipe.grad_weight.b)
            kept = for_output if same else _over_tokens(x, recipe.grad_weight.b, offsets, recipe)
        weight_lp = _weight(weight, recipe.output.b, 2, recipe)
        same = serves_both(recipe.output.b, recipe.grad_input.b)
        again: Half = weight_lp if same else (weight, None)
        ctx.save_for_backward(
            offsets,
            *(kept if trains and ctx.needs_input_grad[1] else (None, None)),
            *(again if trains and ctx.needs_input_grad[0] else (None, None)),
        )
        ctx.recipe, ctx.stats = recipe, stats
        if stats is not None:
            _show(stats, "input", "output", x, for_output)
            if trains and ctx.needs_input_grad[1]:
                _show(stats, "input", "grad_weight", x, kept, group_of_row(offsets, x.shape[0]))
            _show(stats, "weight", "output", weight, weight_lp)
        return _product(for_output, _turned(weight_lp), offsets, recipe.output, recipe, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        offsets, *saved = ctx.saved_tensors
        kept, again = saved[:2], saved[2:]
        recipe: Recipe = ctx.recipe
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_output = grad_output.contiguous()
        dtype = grad_output.dtype
        grad_x = grad_weight = None
        grad: Half | None = None
        if needs_x:
            grad = _cast(grad_output, recipe.grad_input.a, 1, recipe)
            weight = again if again[1] is not None else _weight(again[0], recipe.grad_input.b, 1, recipe)
            if ctx.stats is not None:
                _show(ctx.stats, "grad_output", "grad_input", grad_output, grad)
                if again[1] is None:
                    _show(ctx.stats, "weight", "grad_input", again[0], weight)
            grad_x = _product(grad, weight, offsets, recipe.grad_input, recipe, dtype)
        if needs_weight:
            if grad is None or not serves_both(recipe.grad_input.a, recipe.grad_weight.a):
                grad = _over_tokens(grad_output, recipe.grad_weight.a, offsets, recipe)
            if ctx.stats is not None:
                group = group_of_row(offsets, grad_output.shape[0])
                _show(ctx.stats, "grad_output", "grad_weight", grad_output, grad, group)
            grad_weight = _product(_turned(grad), kept, offsets, recipe.grad_weight, recipe, dtype)
        if ctx.stats is not None:
            ctx.stats.commit()
        return grad_x, grad_weight, None, None, None, None


def _show(
    stats: CallObserver,
    role: str,
    gemm: str,
    x: torch.Tensor,
    half: Sequence[torch.Tensor | None],
    group: torch.Tensor | None = None,
) -> None:
    """A cast for a watched step."""
    codes, scale_inv = half
    assert codes is not None
    stats.saw(role, gemm, x, codes if scale_inv is None else Operand(codes, scale_inv), group=group)


def _cast(x: torch.Tensor, cast: Cast | None, dim: int, recipe: Recipe) -> Half:
    """A matrix for a contraction of `dim`."""
    operand = cast_one(x, cast, dim, kernels=recipe.kernels)
    return (operand.qdata, operand.scale_inv) if isinstance(operand, Float8Tensor) else (operand, None)


def _over_tokens(x: torch.Tensor, cast: Cast | None, offsets: torch.Tensor, recipe: Recipe) -> Half:
    """x [T, K] for a contraction of the tokens of each group; rowwise scales [E, 1, K]."""
    if cast is None or cast.granularity != "rowwise":
        return _cast(x, cast, 0, recipe)
    group = group_of_row(offsets, x.shape[0])
    magnitude = x.detach().abs().float()
    amax = magnitude.new_zeros(offsets.shape[0], x.shape[1])
    amax = amax.scatter_reduce(0, group[:, None].expand_as(x), magnitude, "amax")
    scale, scale_inv = compute_scale(amax, cast.format, cast.power_of_two)
    codes = cast_saturating(scaled_f32(x, scale[group]), cast.format, overwrite=True)
    return codes, scale_inv[:, None]


def _weight(weight: torch.Tensor, cast: Cast | None, dim: int, recipe: Recipe) -> Half:
    """weight [E, N, K] for a contraction of `dim`: as a matrix whose rows or blocks lie within one expert each."""
    if cast is None:
        return weight, None
    E, N, K = weight.shape
    if cast.granularity == "tensorwise":
        per_expert = replace(cast, granularity="rowwise")
        codes, scale_inv = _cast(weight.reshape(E, N * K), per_expert, 1, recipe)
        assert scale_inv is not None
        return codes.view(E, N, K), scale_inv.view(E)
    turn = dim == 1 and not cast.axis_free
    stacked = weight.transpose(1, 2) if turn else weight
    codes, scale_inv = _cast(stacked.reshape(-1, stacked.shape[2]), cast, 1, recipe)
    assert scale_inv is not None
    half = codes.view(stacked.shape), scale_inv.view(E, -1, scale_inv.shape[1])
    return _turned(half) if turn else half


def _turned(half: Half) -> Half:
    """The last two dimensions exchanged, of the scales too where there are several."""
    codes, scale_inv = half
    if scale_inv is not None and scale_inv.dim() > 1:
        scale_inv = scale_inv.transpose(-2, -1)
    return codes.transpose(-2, -1), scale_inv


def _product(
    a: Sequence[torch.Tensor | None],
    b: Sequence[torch.Tensor | None],
    offsets: torch.Tensor,
    gemm: Gemm,
    recipe: Recipe,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One of the three, in FP8 if the operands are, else in high precision."""
    (left, scale_a), (right, scale_b) = a, b
    assert left is not None
    assert right is not None
    if scale_a is None or scale_b is None:
        return grouped_mm_hp(left, right, offsets)
    backend = backend_named(recipe.backend)
    out_dtype = torch.bfloat16 if gemm.granularity in backend.bf16_only else dtype
    operands = Operand(left, scale_a), Operand(right, scale_b)
    product = scaled_grouped_mm(
        *operands, offsets, gemm.granularity, out_dtype, gemm.fast_accum, recipe.backend
    )
    return product.to(dtype)
