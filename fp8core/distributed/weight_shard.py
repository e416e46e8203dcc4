"""WeightShard: the tensor that FSDP2 asks, before each all-gather, what to send, and after it, what has arrived.

See `fp8core.distributed.fsdp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fp8core.cast import cast_saturating, scaled_f32
from fp8core.distributed.fsdp_state import local_of
from fp8core.distributed.weight_gather import high_precision_reason
from fp8core.distributed.weight_scales import known_of, scale_for_gather, shard_of, weight_cast
from fp8core.inputs.operands import why_unfused
from fp8core.kernels import ops
from fp8core.linear import Float8Linear
from fp8core.scaling import BLOCK
from fp8core.tensor import Float8Tensor, implements

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fp8core.recipe import Cast

aten = torch.ops.aten

# What FSDP2, tensor parallelism, `Module.to` and `Module.to_empty` make a parameter's new memory with: it must stay what it is. Anything
# else, an optimizer's `zeros_like` among it, gives plain tensors.
_STAYS = frozenset(
    {
        aten.clone.default, aten.detach.default, aten.alias.default, aten.split.Tensor, aten.slice.Tensor, aten.view.default,
        aten.as_strided.default, aten.new_zeros.default, aten.empty_like.default, aten._to_copy.default,
        aten._pin_memory.default,
    }
)  # fmt: skip


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

    @property
    def _tensor(self) -> torch.Tensor:
        """`hp` by the name of torchao's class, by which accelerate finds the memory of a parameter."""
        return self.hp

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
        plain = self.hp.detach()
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightShard:
        copied = WeightShard(self.hp.detach().clone())
        copied.requires_grad_(self.requires_grad)
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
        in_codes = isinstance(module, Float8Linear) and not high_precision_reason(module)
        _check_not_switched(module, in_codes)
        if not isinstance(module, Float8Linear) or not in_codes:
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
            out = out if local_of(out) is None else local_of(out)  # a DTensor: tensor parallelism's
            if isinstance(out, Float8Tensor) and metadata.scale_inv is not None:
                out.scale_inv = metadata.scale_inv
            return None
        if metadata.cast is None or metadata.scale_inv is None:
            return data, ()
        codes = data.view(-1)[: metadata.size.numel()].view(metadata.size).view(metadata.cast.format.dtype)
        return Float8Tensor(codes, metadata.scale_inv, param_dtype, metadata.cast.granularity), ()


def _check_not_switched(module: nn.Module, in_codes: bool) -> None:
    """FSDP2 would fill the memory of the gathered weight that it has with another kind of data.

    Raises:
        RuntimeError: the layer's recipe was changed in another way than by `switch_gathers`.
    """
    known = known_of(module)
    if known is None:
        return
    if known.in_codes not in (None, in_codes):
        raise RuntimeError(
            f"{module} goes from an all-gather in FP8 to one in high precision, or back; switch recipes by "
            "fp8core.PrecisionSchedule.apply, or inside of fp8core.distributed.fsdp.switch_gathers"
        )
    known.in_codes = in_codes


def _codes(
    local: torch.Tensor, layer: Float8Linear, cast: Cast, scale: torch.Tensor, amax: torch.Tensor
) -> torch.Tensor:
    """FP8 codes of a shard [n, k] with scales of the whole weight."""
    fmt = cast.format
    if cast.granularity == "tensorwise":
        if why_unfused(local, layer.recipe.kernels, cast) is None:
            return ops.cast(local, amax, fmt.dtype, cast.power_of_two)[0]
        return cast_saturating(scaled_f32(local, scale), fmt, overwrite=True)
    shard = shard_of(layer.weight)
    assert shard is not None
    row, column = shard.first
    rows = torch.arange(row, row + local.shape[0], device=scale.device) // BLOCK
    columns = torch.arange(column, column + local.shape[1], device=scale.device) // BLOCK
    return cast_saturating(scaled_f32(local, scale[rows][:, columns]), fmt, overwrite=True)


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
