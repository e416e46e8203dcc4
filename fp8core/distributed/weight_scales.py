"""Scales of sharded weights: one fused amax over all local shards of a model, and one all-reduce.

A weight's codes are made from its shards, each by the rank that holds it, with scales that hold for the whole weight: so
the gathered codes are those of the gathered weight, bit for bit. 128x128 blocks take part in the same all-reduce, as a
few numbers more, and may therefore lie across the border of two shards.

    amax of a weight = max over its shards         each rank of its own, then `fp8core.history.max_over_ranks`

Only ranks that hold different shards take part: with a 2-D mesh (HSDP) replicas hold equal weights and need not ask each
other.

The all-reduce happens by itself, before the first all-gather after weights have changed, for all weights of the model that
was given to `convert_to_float8_training`; or when `precompute_float8_dynamic_scale_for_fsdp` is called. All ranks must
take part, so all must come to the same decision. What counts as a change is what happens on all ranks alike:

    an optimizer has stepped             any torch.optim.Optimizer of the process; fused ones leave no other trace
    a state dict was loaded
    the version of a shard has changed   an in-place update by hand; asked at one layer only, for all shards of the model,
                                         since a single shard may be empty on some ranks and change on others

A write through `p.data` leaves no trace: call `precompute_float8_dynamic_scale_for_fsdp` after it.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8core.arguments import check_type
from fp8core.distributed.fsdp_state import refuse_partial_reshard
from fp8core.distributed.wire import note_scale_reduction
from fp8core.history import max_over_ranks
from fp8core.linear import Float8Linear
from fp8core.operands import expected_amax, serves_both
from fp8core.scaling import BLOCK, amax, compute_scale

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fp8core.recipe import Cast

_KNOWN = "_fp8core_weight_scale"  # attribute of a Float8Linear whose weight may be gathered in FP8


@dataclass
class _Steps:
    """How often optimizers of this process have stepped, since the first weight was made to be gathered in FP8."""

    count: int = 0
    hooked: bool = False

    def watch(self) -> None:
        if not self.hooked:
            register_optimizer_step_post_hook(self._stepped)
            self.hooked = True

    def _stepped(self, *_: object) -> None:
        self.count += 1


_STEPS = _Steps()


@dataclass
class Shard:
    """A rank's part of a weight.

    Attributes:
        local: plain tensor [n, k], a part of [N, K]; may be empty.
        size: (N, K).
        first: row and column of [N, K] where it begins.
        groups: of the ranks that hold the other parts.
        device: where collectives take place; local may lie on the CPU.
    """

    local: torch.Tensor
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
        steps: `_STEPS.count` when it was found.
        seen: the shard that it was found from, and the shard's version.
        leads: this layer asks whether any shard of the model has changed.
        scales: those made from it, by dtype of the weight.
    """

    root: weakref.ref[nn.Module]
    amax: torch.Tensor | None = None
    sharers: tuple[Float8Linear, ...] = ()
    steps: int = -1
    seen: tuple[weakref.ref[torch.Tensor], int] | None = None
    leads: bool = False
    scales: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightScale:
        """Of a copied model: nothing is known yet; the copy belongs to the copied root."""
        root = self.root()
        return WeightScale(weakref.ref(memo.get(id(root), root)) if root is not None else self.root)

    def forget(self, *_: object) -> None:
        """The weight was replaced."""
        self.amax = None

    def changed(self, local: torch.Tensor) -> bool:
        """Whether this very shard was written to. Another tensor in its place is FSDP2's own doing: it pads."""
        return self.seen is not None and self.seen[0]() is local and self.seen[1] != local._version


def known_of(layer: nn.Module) -> WeightScale | None:
    """What a layer knows of its weight's scale; None if its weight was not made to be gathered in FP8."""
    return getattr(layer, _KNOWN, None)


def join(root: nn.Module, layers: Iterable[Float8Linear]) -> None:
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
    """The cast that makes the weight's operand of both GEMMs that read it; None where no such cast is."""
    first, second = layer.recipe.output.b, layer.recipe.grad_input.b
    return first if serves_both(first, second) else None


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


def scale_for_gather(
    layer: Float8Linear, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
        _find(layer if layer not in members else root, members if layer in members else [layer])
        known.leads = True
    assert known.amax is not None
    seen = known.amax.to(dtype).float()
    expected = expected_amax(cast, layer.amaxes, "weight")
    if cast.scaling != "dynamic":
        for sharer in known.sharers:
            assert sharer.amaxes is not None
            sharer.amaxes.record("weight", seen)
    if expected is not None and layer.amaxes is not None:
        expected = expected * 2.0**layer.amaxes.settings.margin
        scale, scale_inv = compute_scale(expected, cast.format, cast.power_of_two)
        return scale, torch.where(seen.isfinite(), scale_inv, torch.nan), expected
    if dtype not in known.scales:
        known.scales[dtype] = compute_scale(seen, cast.format, cast.power_of_two)
    return *known.scales[dtype], seen


def shard_of(weight: Any) -> Shard | None:
    """This rank's part of a weight that `fully_shard` has sharded and not gathered at the moment; else None."""
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return None
    local = weight.to_local()
    if not hasattr(local, "fsdp_pre_all_gather"):
        return None
    first, groups = [0, 0], []
    for axis, placement in enumerate(weight.placements):
        if placement.is_shard():
            ranks = mesh.size(axis)
            chunk = -(-weight.shape[placement.dim] // ranks)
            first[placement.dim] = min(chunk * mesh.get_local_rank(axis), weight.shape[placement.dim])
            if ranks > 1:
                groups.append(mesh.get_group(axis))
    device = torch.device(mesh.device_type)
    return Shard(local.hp, weight.shape, (first[0], first[1]), tuple(groups), device)


def _members(root: nn.Module) -> list[Float8Linear]:
    return [m for m in root.modules() if isinstance(m, Float8Linear) and known_of(m) is not None]


def _stale(layer: Float8Linear, known: WeightScale) -> bool:
    if known.amax is None or known.steps != _STEPS.count:
        return True
    if not known.leads:
        return False
    root = known.root()
    for member in [layer] if root is None else _members(root):
        of_member, shard = known_of(member), shard_of(member.weight)
        if of_member is not None and shard is not None and of_member.changed(shard.local):
            return True
    return False


@torch.no_grad()
def _find(root: nn.Module | None, layers: list[Float8Linear]) -> None:
    """Finds the amaxes of all weights of these layers that are sharded now and will be gathered in FP8."""
    if root is not None:
        refuse_partial_reshard(root, layers)
    sharers: dict[int, list[Float8Linear]] = {}
    for layer in layers:
        if weight_cast(layer) is not None:
            sharers.setdefault(id(layer.weight), []).append(layer)
    found: dict[tuple[dist.ProcessGroup, ...], list[tuple[list[Float8Linear], Shard]]] = {}
    for same in sharers.values():
        shard = shard_of(same[0].weight)
        if shard is not None:
            found.setdefault(shard.groups, []).append((same, shard))
    for groups, members in found.items():
        pieces = _local_amaxes([(weight_cast(same[0]), shard) for same, shard in members])
        together = torch.cat([piece.reshape(-1) for piece in pieces]).to(members[0][1].device)
        for group in groups:
            together = max_over_ranks(together, group)
            note_scale_reduction()
        for (same, shard), piece, values in zip(
            members, pieces, together.split([piece.numel() for piece in pieces]), strict=True
        ):
            for layer in same:
                known = known_of(layer)
                assert known is not None
                known.amax, known.sharers, known.steps = values.view(piece.shape), tuple(same), _STEPS.count
                known.seen = weakref.ref(shard.local), shard.local._version
                known.leads = False
                known.scales.clear()


def _local_amaxes(wanted: list[tuple[Cast | None, Shard]]) -> list[torch.Tensor]:
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


def _block_amaxes(shard: Shard) -> torch.Tensor:
    """[ceil(N/128), ceil(K/128)]; blocks count from the whole weight's first row and column."""
    whole = torch.zeros(-(-shard.size[0] // BLOCK), -(-shard.size[1] // BLOCK), device=shard.local.device)
    if shard.local.numel():
        row, column = shard.first
        padded = nn.functional.pad(shard.local, (column % BLOCK, 0, row % BLOCK, 0))
        blocks = amax(padded, "128x128")
        whole[row // BLOCK :, column // BLOCK :][: blocks.shape[0], : blocks.shape[1]] = blocks
    return whole
