"""Scales of sharded weights: one fused amax over all local shards of a model, and one all-reduce.

A weight's codes are made from its shards, each by the rank that holds it, with scales that hold for the whole weight: so
the gathered codes are those of the gathered weight, bit for bit. 128x128 blocks take part in the same all-reduce, as a
few numbers more, and may therefore lie across the border of two shards.

    amax of a weight = max over its shards         each rank of its own, then `fp8core.history.max_over_ranks`

Only ranks that hold different shards take part: with a 2-D mesh (HSDP) replicas hold equal weights and need not ask each
other. Weights that tensor parallelism has cut too take one more all-reduce, over its dimension of the mesh.

The all-reduce happens by itself, before the first all-gather after weights have changed, for all weights of the model that
was given to `convert_to_float8_training`; or when `precompute_float8_dynamic_scale_for_fsdp` is called. All ranks must
take part, so all must come to the same decision. What counts as a change is what happens on all ranks alike:

    an optimizer has stepped             a torch.optim.Optimizer that holds the weight; fused ones leave no other trace
    a state dict was loaded
    the version of a parameter or of a   an in-place update by hand; of shards asked at one layer only, for all of the model,
    shard has changed                    since a single shard may be empty on some ranks and change on others

A write through `p.data` leaves no trace: call `precompute_float8_dynamic_scale_for_fsdp` after it.
"""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fp8core.arguments import check_type
from fp8core.distributed.fsdp_state import local_of, refuse_partial_reshard
from fp8core.history import max_over_ranks
from fp8core.inputs.operands import expected_amax, serves_both
from fp8core.linear import Float8Linear
from fp8core.observers import SCALE_REDUCTIONS
from fp8core.scaling import BLOCK, amax, compute_scale

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fp8core.formats import Format
    from fp8core.recipe import Cast

Scales = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_KNOWN = "_fp8core_weight_scale"  # attribute of a Float8Linear whose weight may be gathered in FP8


class _Steps:
    """How often optimizers that hold sharded weights have stepped.

    By parameter: what is stepped on one rank alone holds none of them, and one that steps in the middle of a backward pass
    leaves the others' scales as they are.

    Attributes:
        of: parameter whose scale was found -> steps.
        of_others: steps of optimizers that hold other tensors of such shards, which may be aliases of any of these.
    """

    def __init__(self) -> None:
        self.of = WeakTensorKeyDictionary()
        self.of_others = 0

    @functools.cache  # noqa: B019  # there is one, and it stays
    def watch(self) -> None:
        register_optimizer_step_post_hook(self._stepped)

    def count(self, weight: torch.Tensor) -> tuple[int, int]:
        return int(self.of.get(weight, 0)), self.of_others

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        of_shards = [p for p in held if hasattr(local_of(p), "fsdp_pre_all_gather")]
        for parameter in of_shards:
            if parameter in self.of:
                self.of[parameter] += 1
        self.of_others += any(parameter not in self.of for parameter in of_shards)


_STEPS = _Steps()


@dataclass
class WeightPart:
    """A rank's part of a weight.

    Attributes:
        local: plain tensor [n, k], a part of [N, K]; may be empty.
        wrapper: the `fp8core.distributed.fsdp.WeightShard` that holds it.
        size: (N, K).
        first: row and column of [N, K] where it begins.
        groups: of the ranks that hold the other parts.
        device: where collectives take place; local may lie on the CPU.
    """

    local: torch.Tensor
    wrapper: torch.Tensor
    size: torch.Size
    first: tuple[int, int]
    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device


@dataclass
class WeightScale:
    """What a layer knows of the scale of its weight.

    Attributes:
        root: the model that was converted, whose weights find their scales together.
        amax: float32, 0-dimensional or one for each block; None before the first.
        sharers: layers that use the same parameter.
        steps: `_Steps.count` of the weight when it was found.
        seen: the tensors that it was found from, and their versions: which of them an update changes depends on its way in.
        leads: this layer asks whether any shard of the model has changed.
        dtype: in which the weight was last gathered, or would have been in high precision; None before.
        scales: (scale, scale_inv, amax) by that dtype, where the weight is scaled by its own amax.
        in_codes: whether FSDP2's gathered weight holds codes; None before the first all-gather.
    """

    root: weakref.ref[nn.Module]
    amax: torch.Tensor | None = None
    sharers: tuple[Float8Linear, ...] = ()
    steps: tuple[int, int] = (-1, -1)
    seen: tuple[tuple[weakref.ref[torch.Tensor], int], ...] = ()
    leads: bool = False
    dtype: torch.dtype | None = None
    scales: dict[torch.dtype, Scales] = field(default_factory=dict)
    in_codes: bool | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, it is None: the layer's weight is a plain tensor then, see `WeightShard.__reduce_ex__`."""
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightScale:
        """The scale of a copied model: nothing is known yet; the copy belongs to the copied root."""
        root = self.root()
        return WeightScale(weakref.ref(memo.get(id(root), root)) if root is not None else self.root)

    def forget(self, *_: object) -> None:
        """The weight was replaced."""
        self.amax = None

    def changed(self, first: int | None = None) -> bool:
        """Whether a tensor was written to. Another one in its place is FSDP2's own doing, on ranks where it pads.

        `first`: how many of `seen` to look at; 1: the parameter itself, which changes on all ranks or on none.
        """
        found = ((ref(), version) for ref, version in self.seen[:first])
        return any(tensor is not None and tensor._version != version for tensor, version in found)


def known_of(layer: nn.Module) -> WeightScale | None:
    """What a layer knows of its weight's scale; None if its weight was not made to be gathered in FP8."""
    return getattr(layer, _KNOWN, None)


def share_weight_scales(root: nn.Module, layers: Iterable[Float8Linear]) -> None:
    """Lets the layers of a model find their weights' scales together."""
    _STEPS.watch()
    for layer in layers:
        known = WeightScale(weakref.ref(root))
        setattr(layer, _KNOWN, known)
        layer.register_load_state_dict_post_hook(_loaded)


def _loaded(layer: nn.Module, _: object) -> None:
    known = known_of(layer)
    if known is not None:
        known.forget()


def weight_cast(layer: Float8Linear) -> Cast | None:
    """The cast that makes the weight's operand of both GEMMs that read it; None where no such cast is, or not from shards."""
    first, second = layer.recipe.output.b, layer.recipe.grad_input.b
    if first is None or not serves_both(first, second):
        return None
    return None if first.granularity != "tensorwise" and is_tensor_parallel(layer.weight) else first


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Finds the scales of all sharded weights that are gathered in FP8, with one all-reduce.

        optimizer.step()
        precompute_float8_dynamic_scale_for_fsdp(model)

    Optional: the next forward pass does it otherwise, see the module docstring. All ranks must call it.

    Args:
        module: after `fully_shard`; one without such weights is left alone.

    Raises:
        TypeError: no module.
    """
    check_type("module", module, nn.Module, "precompute_float8_dynamic_scale_for_fsdp(model)")
    _find(module, _members(module))


def scale_for_gather(layer: Float8Linear, dtype: torch.dtype) -> Scales:
    """Scales for the codes of a weight that is about to be gathered.

    Args:
        layer: whose weight is sharded and has a `weight_cast`.
        dtype: in which the weight would be gathered in high precision; amaxes are rounded to it as the weight would be.

    Returns:
        (scale, scale_inv, amax that the scale goes by), float32, each 0-dimensional or one for each block of the whole
        weight. NaN in `scale_inv` where the weight holds Inf or NaN.
    """
    known, cast = known_of(layer), weight_cast(layer)
    assert known is not None
    assert cast is not None
    if _stale(layer, known):
        root = known.root()
        members = [] if root is None else _members(root)
        _find(*((root, members) if layer in members else (layer, [layer])))
        known.leads = True
    assert known.amax is not None
    known.dtype = dtype
    if cast.scaling == "dynamic":
        if dtype not in known.scales:
            known.scales[dtype] = _scales(known.amax, cast, dtype)
        return known.scales[dtype]
    seen = known.amax.to(dtype).float()
    for sharer in known.sharers:
        assert sharer.amaxes is not None
        # Recorded by the pass that reads the codes, if it has gradients. A compiled block can keep buffers from its forward
        # for its backward pass, and in between its weights are gathered again, with the same amax.
        with _unsafe_preserve_version_counter(sharer.amaxes.gathered):
            sharer.amaxes.gathered.copy_(seen)
    expected = expected_amax(cast, layer.amaxes, "weight")
    if expected is None or layer.amaxes is None:
        return _scales(known.amax, cast, dtype)
    expected = expected * 2.0**layer.amaxes.settings.margin
    scale, scale_inv = compute_scale(expected, cast.format, cast.power_of_two)
    return scale, torch.where(seen.isfinite(), scale_inv, torch.nan), expected


def _scales(amaxes: torch.Tensor, cast: Cast, dtype: torch.dtype) -> Scales:
    """The scales of weights that are scaled by their own amaxes; element by element."""
    rounded = amaxes.to(dtype).float()
    return *compute_scale(rounded, cast.format, cast.power_of_two), rounded


def shard_of(weight: Any) -> WeightPart | None:
    """This rank's part of a weight that `fully_shard` has sharded and not gathered at the moment; else None."""
    local: Any = local_of(weight)
    if not hasattr(local, "fsdp_pre_all_gather"):
        return None
    mesh = weight.device_mesh
    size, first, groups = list(weight.shape), [0, 0], []
    # From the last dimension of the mesh, which tensor parallelism has cut before FSDP2 cut the parts. What FSDP2 then
    # calls `_StridedShard` is none by `is_shard`.
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(weight.placements[axis], "dim", None)
        if dim is not None:
            ranks = mesh.size(axis)
            chunk = -(-size[dim] // ranks)
            before = min(chunk * mesh.get_local_rank(axis), size[dim])
            first[dim] += before
            size[dim] = min(chunk, size[dim] - before)
            if ranks > 1:
                groups.append(mesh.get_group(axis))
    device = torch.device(mesh.device_type)
    return WeightPart(local.hp, local, weight.shape, (first[0], first[1]), tuple(groups), device)


def is_tensor_parallel(weight: Any) -> bool:
    """Whether a weight that FSDP2 has sharded is a part of a larger one: FSDP2's own dimension is then not the last."""
    return any(not placement.is_replicate() for placement in getattr(weight, "placements", ())[:-1])


def _members(root: nn.Module) -> list[Float8Linear]:
    return [m for m in root.modules() if isinstance(m, Float8Linear) and known_of(m) is not None]


def _stale(layer: Float8Linear, known: WeightScale) -> bool:
    if known.amax is None or _stepped_since(layer, known) or known.changed(1):
        return True
    if not known.leads:
        return False
    root = known.root()
    others = [(m, known_of(m)) for m in ([layer] if root is None else _members(root))]
    # Of a weight that an optimizer has stepped in the meantime, its own layer will ask
    return any(of is not None and not _stepped_since(m, of) and of.changed() for m, of in others)


def _stepped_since(layer: Float8Linear, known: WeightScale) -> bool:
    return known.steps != _STEPS.count(layer.weight)


@torch.no_grad()
def _find(root: nn.Module | None, layers: list[Float8Linear]) -> None:
    """Finds the amaxes of all weights of these layers that are sharded now and will be gathered in FP8."""
    if root is not None:
        refuse_partial_reshard(root, layers)
    sharers: dict[int, list[Float8Linear]] = {}
    for layer in layers:
        if weight_cast(layer) is not None:
            sharers.setdefault(id(layer.weight), []).append(layer)
    found: dict[tuple[dist.ProcessGroup, ...], list[tuple[list[Float8Linear], WeightPart]]] = {}
    for same in sharers.values():
        shard = shard_of(same[0].weight)
        if shard is not None:
            found.setdefault(shard.groups, []).append((same, shard))
    for groups, members in found.items():
        pieces = _local_amaxes([(weight_cast(same[0]), shard) for same, shard in members])
        together = torch.cat([piece.reshape(-1) for piece in pieces]).to(members[0][1].device)
        for group in groups:
            together = max_over_ranks(together, group)
            for observe in SCALE_REDUCTIONS:
                observe()
        made: dict[
            tuple[Format, bool, torch.dtype], Scales
        ] = {}  # of all weights at once; most models have one kind
        start = 0
        for (same, shard), piece in zip(members, pieces, strict=True):
            part = slice(start, start := start + piece.numel())
            _STEPS.of.setdefault(same[0].weight, 0)
            for layer in same:
                known, cast = known_of(layer), weight_cast(layer)
                assert known is not None
                assert cast is not None
                known.amax, known.sharers, known.steps = (
                    together[part].view(piece.shape),
                    tuple(same),
                    _STEPS.count(layer.weight),
                )
                known.seen = tuple(
                    (weakref.ref(t), t._version) for t in (layer.weight, shard.wrapper, shard.local)
                )
                known.leads = layer is members[0][0][0]
                known.scales.clear()
                if cast.scaling == "dynamic" and known.dtype is not None:
                    key = cast.format, cast.power_of_two, known.dtype
                    if key not in made:
                        made[key] = _scales(together, cast, known.dtype)
                    scale, scale_inv, seen = (all_of[part].view(piece.shape) for all_of in made[key])
                    known.scales[known.dtype] = scale, scale_inv, seen


def _local_amaxes(wanted: list[tuple[Cast | None, WeightPart]]) -> list[torch.Tensor]:
    """float32 amax of each local shard: 0-dimensional, or one for each block of the whole weight, 0 where it has no part."""
    tensorwise = [
        shard.local
        for cast, shard in wanted
        if cast is not None and cast.granularity == "tensorwise" and shard.local.numel()
    ]
    # The largest magnitude is the infinity norm; for all shards at once that is one kernel instead of one for each
    norms = iter(torch._foreach_norm(tensorwise, math.inf) if tensorwise else [])
    pieces = []
    for cast, shard in wanted:
        if cast is not None and cast.granularity == "128x128":
            pieces.append(_block_amaxes(shard))
        elif shard.local.numel():
            pieces.append(next(norms).float())
        else:
            pieces.append(torch.zeros((), device=shard.local.device))
    return pieces


def _block_amaxes(shard: WeightPart) -> torch.Tensor:
    """[ceil(N/128), ceil(K/128)]; blocks count from the whole weight's first row and column."""
    whole = torch.zeros(-(-shard.size[0] // BLOCK), -(-shard.size[1] // BLOCK), device=shard.local.device)
    if shard.local.numel():
        row, column = shard.first
        padded = nn.functional.pad(shard.local, (column % BLOCK, 0, row % BLOCK, 0))
        blocks = amax(padded, "128x128")
        whole[row // BLOCK :, column // BLOCK :][: blocks.shape[0], : blocks.shape[1]] = blocks
    return whole
