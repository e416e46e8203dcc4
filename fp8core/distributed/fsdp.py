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
way their scales come. Others are gathered in high precision, and `gathered_as` says why: `audit` and `verify` show it.
Optimizers, state dicts and checkpoints see high-precision tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fp8core.cast import cast_saturating, times
from fp8core.distributed.fsdp_state import forget_gathered
from fp8core.distributed.weight_scales import join, known_of, scale_for_gather, shard_of, weight_cast
from fp8core.kernels import ops
from fp8core.linear import Float8Linear
from fp8core.operands import plain_reason
from fp8core.scaling import BLOCK, spread
from fp8core.tensor import Float8Tensor, implements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fp8core.recipe import Cast, Recipe

aten = torch.ops.aten

# What FSDP2, `Module.to` and `Module.to_empty` make a parameter's new memory with: it must stay what it is. Anything
# else, an optimizer's `zeros_like` among it, gives plain tensors.
_STAYS = frozenset(
    {
        aten.detach.default, aten.alias.default, aten.split.Tensor, aten.slice.Tensor, aten.view.default,
        aten.as_strided.default, aten.new_zeros.default, aten.empty_like.default, aten._to_copy.default,
        aten._pin_memory.default,
    }
)  # fmt: skip
NOT_ASKED = "high precision: enable_fsdp_float8_all_gather is off"
NOT_CONVERTED = "high precision: the layer is not converted"
_SHARED = "_fp8core_weight_shared_with"  # attribute of a Float8Linear: who else reads its weight, and can't read codes


class _Travel(NamedTuple):
    """What the sender knows of a gathered weight and the receiver needs; cast None: it comes in high precision."""

    cast: Cast | None
    size: torch.Size
    scale_inv: torch.Tensor | None


class WeightShard(torch.Tensor):
    """A weight, or a shard of one, that FSDP2 gathers in FP8. Otherwise it is the tensor that it holds.

    Attributes:
        hp: that tensor; float32, bfloat16 or float16.
    """

    hp: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own idiom

    @staticmethod
    def __new__(cls: type, hp: torch.Tensor) -> WeightShard:
        """Wraps without copying."""
        self: WeightShard = torch.Tensor._make_wrapper_subclass(
            cls,
            hp.shape,
            strides=hp.stride(),
            storage_offset=hp.storage_offset(),
            dtype=hp.dtype,
            device=hp.device,
            requires_grad=hp.requires_grad,
        )
        self.hp = hp
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["hp"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> WeightShard:
        return WeightShard(parts["hp"])

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes contents to print
        return f"WeightShard({self.hp})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, it is the plain tensor: a checkpoint needs no fp8core to be read, `weights_only=True` included."""
        return self.hp.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightShard:
        copied = WeightShard(self.hp.detach().clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the operator
        cls, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        held: dict[int, WeightShard] = {}

        def inside(shard: WeightShard) -> torch.Tensor:
            held[id(shard.hp)] = shard
            return shard.hp

        args, kwargs = tree_map_only(WeightShard, inside, (args, kwargs or {}))
        result = op(*args, **kwargs)
        if op in _STAYS:
            return tree_map_only(torch.Tensor, WeightShard, result)
        return held.get(id(result), result)  # an in-place operator returns what it was given

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor], _Travel]:
        """What this rank sends, of the length that all ranks send; called by FSDP2."""
        dtype = mp_policy.param_dtype or self.dtype
        local = self.hp.to(dtype)
        if not isinstance(module, Float8Linear) or high_precision_reason(module):
            return (_filled(local, outer_size, mesh),), _Travel(None, outer_size, None)
        cast = weight_cast(module)
        assert cast is not None
        scale, scale_inv, amax = scale_for_gather(module, dtype)
        codes = _codes(local, module, cast, scale, amax)
        return (_filled(codes.view(torch.uint8), outer_size, mesh),), _Travel(cast, outer_size, scale_inv)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor],
        metadata: _Travel,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The gathered weight; `out`, if it is there already and only its memory was filled anew; called by FSDP2."""
        (data,) = all_gather_outputs
        if out is not None:
            if isinstance(out, Float8Tensor) != (metadata.cast is not None):
                raise RuntimeError(
                    "a weight goes from an all-gather in FP8 to one in high precision, or back; switch recipes by "
                    "fp8core.PrecisionSchedule.apply, or call fp8core.distributed.fsdp.switch_gathers after it"
                )
            if isinstance(out, Float8Tensor) and metadata.scale_inv is not None:
                out.scale_inv = metadata.scale_inv
            return None
        if metadata.cast is None or metadata.scale_inv is None:
            return data, ()
        codes = data.view(-1)[: metadata.size.numel()].view(metadata.size).view(metadata.cast.format.dtype)
        return Float8Tensor(codes, metadata.scale_inv, param_dtype, metadata.cast.granularity), ()


def gather_in_fp8(root: nn.Module) -> None:
    """Prepares the weights of a converted model for `fully_shard`, where a layer's recipe asks for it and allows it.

    Args:
        root: a model whose layers were just converted. Their weights become new parameters, so an optimizer must be made
            afterwards, as with `fully_shard` anyway.
    """
    layers = [m for m in root.modules() if isinstance(m, Float8Linear) and m.recipe.fp8_all_gather]
    wanted = [layer for layer in layers if known_of(layer) is None and not recipe_reason(layer.recipe)]
    readers: dict[int, list[tuple[str, nn.Module]]] = {}
    for fqn, module in root.named_modules():
        for parameter in module.parameters(recurse=False):
            readers.setdefault(id(parameter), []).append((fqn, module))
    made: dict[int, nn.Parameter] = {}
    chosen = []
    for layer in wanted:
        weight = layer.weight
        others = [fqn for fqn, module in readers.get(id(weight), []) if module not in wanted]
        if others and id(weight) not in made:
            setattr(layer, _SHARED, ", ".join(others))
            continue
        if id(weight) not in made:
            made[id(weight)] = nn.Parameter(WeightShard(weight.detach()), requires_grad=weight.requires_grad)
        layer.weight = made[id(weight)]
        layer.register_state_dict_post_hook(_plain_state)
        layer.register_load_state_dict_post_hook(_wrapped_again)
        chosen.append(layer)
    join(root, chosen)


def recipe_reason(recipe: Recipe) -> str:
    """Why a recipe's weights can't be gathered as FP8 codes; "" if they can."""
    first, second = recipe.output.b, recipe.grad_input.b
    if first is None or second is None:
        held = [name for name in ("output", "grad_input") if not recipe.gemms[name].is_fp8]
        return f"GEMM {' and '.join(held)} reads the weight in high precision"
    if first != second:
        return f"the output GEMM reads the weight as {first}, the grad_input GEMM as {second}"
    if not first.axis_free:
        return f"{first.granularity} codes differ along the two axes over which the weight is contracted"
    return ""


def high_precision_reason(layer: Float8Linear) -> str:
    """Why FSDP2 gathers a layer's weight in high precision; "" if it gathers codes."""
    if not layer.recipe.fp8_all_gather:
        return NOT_ASKED
    if reason := recipe_reason(layer.recipe):
        return reason
    if shared := getattr(layer, _SHARED, ""):
        return f"its weight is shared with {shared}, which can't read codes"
    if known_of(layer) is None:
        return "it was not made by convert_to_float8_training"
    weight: Any = layer.weight
    placements = getattr(weight, "placements", ())
    if any(placement.is_shard() for placement in placements[:-1]):
        return "its weight is tensor-parallel"
    if placements and shard_of(weight) is None and not isinstance(weight.to_local(), Float8Tensor):
        return "its weight was replaced after conversion"
    return ""


def gathered_as(layer: nn.Module) -> str:
    """ "fp8", or "high precision: " and why: how FSDP2 gathers the weight of a Linear where it shards it."""
    if not isinstance(layer, Float8Linear):
        return NOT_CONVERTED
    if not layer.recipe.fp8_all_gather:
        return NOT_ASKED
    reason = high_precision_reason(layer)
    return f"high precision: {reason}" if reason else "fp8"


def switch_gathers(model: nn.Module, change: Callable[[], int]) -> int:
    """Changes recipes, and lets FSDP2 make anew the gathered weights whose precision that changes.

    Args:
        model: whose layers change; between a backward pass and the next forward pass.
        change: sets the recipes and returns how many.

    Returns:
        What `change` returned.
    """
    layers = [m for m in model.modules() if known_of(m) is not None]
    before = [gathered_as(layer) for layer in layers]
    changed = change()
    switched = {layer for layer, was in zip(layers, before, strict=True) if gathered_as(layer) != was}
    if switched:
        forget_gathered(model, switched)
    return changed


def _codes(
    local: torch.Tensor, layer: Float8Linear, cast: Cast, scale: torch.Tensor, amax: torch.Tensor
) -> torch.Tensor:
    """FP8 codes of a shard [n, k] with scales of the whole weight."""
    fmt = cast.format
    if cast.granularity == "tensorwise":
        if plain_reason(local, layer.recipe.kernels, cast) is None:
            return ops.cast(local, amax, fmt.dtype, cast.power_of_two)[0]
        return cast_saturating(times(local, scale), fmt, overwrite=True)
    shard = shard_of(layer.weight)
    assert shard is not None
    row, column = shard.first
    rows = torch.arange(row, row + local.shape[0], device=scale.device) // BLOCK
    columns = torch.arange(column, column + local.shape[1], device=scale.device) // BLOCK
    return cast_saturating(times(local, scale[rows][:, columns]), fmt, overwrite=True)


def _filled(local: torch.Tensor, size: torch.Size, mesh: Any) -> torch.Tensor:
    """A shard with rows of zeros behind it up to the length of the longest one."""
    if local.shape[1:] != size[1:]:
        return local  # sharded along another dimension, where FSDP2 wants equal shards
    rows = -(-size[0] // mesh.size())
    if local.shape[0] == rows:
        return local
    filled = local.new_zeros((rows, *size[1:]))
    filled[: local.shape[0]] = local
    return filled


def _plain(weight: Any) -> torch.Tensor | None:
    """A weight without its WeightShard, sharing its memory; None if it has none."""
    if isinstance(weight, WeightShard):
        return weight.hp.detach()
    local = weight.to_local() if hasattr(weight, "device_mesh") else None
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
    """State dicts hold plain tensors and DTensors of plain tensors."""
    weight = state.get(f"{prefix}weight")
    plain = None if weight is None else _plain(weight)
    if plain is not None:
        state[f"{prefix}weight"] = plain


@torch.no_grad()
def _wrapped_again(layer: nn.Module, _: object) -> None:
    """`load_state_dict(assign=True)` puts plain tensors in place."""
    weight: Any = layer.weight
    if _plain(weight) is not None or isinstance(weight, Float8Tensor):
        return
    if hasattr(weight, "device_mesh"):
        wrapped = _with_local(weight, WeightShard(weight.to_local()))
    else:
        wrapped = WeightShard(weight.detach())
    layer.weight = nn.Parameter(wrapped, requires_grad=weight.requires_grad)


@implements(aten.as_strided.default)
def _as_strided(
    op: Any, x: Float8Tensor, size: Iterable[int], stride: Iterable[int], storage_offset: int | None = None
) -> Float8Tensor:
    """FSDP2 asks each gathered parameter for the view that it already is."""
    if tuple(size) != tuple(x.shape) or tuple(stride) != x.stride() or storage_offset != x.storage_offset():
        raise NotImplementedError(
            "as_strided of a Float8Tensor is defined for its own shape and strides only"
        )
    return Float8Tensor(x.qdata, x.scale_inv, x.dtype, x.granularity)


@implements(aten.zeros_like.default)
def _zeros_like(op: Any, x: Float8Tensor, **kwargs: Any) -> torch.Tensor:
    """The gradient of a gathered weight that took no part: plain, in high precision."""
    return torch.zeros(x.shape, dtype=kwargs.get("dtype") or x.dtype, device=x.device)
