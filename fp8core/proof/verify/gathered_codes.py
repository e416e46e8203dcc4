"""Codes that a layer gets from a collective: checked where they are made, and recognised where they are read.

Sequence parallelism in FP8 and FSDP2's weights: each rank checks the codes of its own part, and of sequence parallelism that
those of all ranks arrive as they were sent.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fp8core.arguments import is_dtensor
from fp8core.observers import GATHERS
from fp8core.proof.verify.operands import held_amax, matrix, max_over, plain, quietly
from fp8core.proof.verify.oracle import BLOCKS, Digest, TiledOperand, block_amax, scales_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from fp8core.linear import Float8Linear
    from fp8core.observers import Gathered
    from fp8core.proof.verify.records import LayerProof
    from fp8core.tensor import Float8Tensor


class GatheredCodes:
    """Codes that were found right, by their memory, for as long as that lives; `faults` of those that no layer owns."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.layers = tuple(layers)
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.faults: list[str] = []
        self.shards: dict[nn.Module, tuple[Any, torch.Tensor]] = {}

    def __contains__(self, codes: Float8Tensor) -> bool:
        return codes.qdata.untyped_storage() in self.known

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Sees gathers while the block runs; weights that are sharded along their rows as it begins."""
        for layer in self.layers:
            weight = getattr(layer, "weight", None)
            if is_dtensor(weight) and all(not p.is_shard() or p.is_shard(0) for p in weight.placements):
                self.shards[layer] = weight, plain(weight)
        GATHERS.append(self._gathered)
        try:
            yield
        finally:
            GATHERS.remove(self._gathered)

    def _gathered(self, gather: Gathered) -> None:
        with quietly():
            group = gather.like.device_mesh.get_group()
            cast, what = gather.cast, f"gathered {gather.role}"
            part = gather.part.t() if gather.dim == 0 else gather.part
            held, amax = held_amax(cast, gather.memory, gather.role), None
            if held is None and (cast.granularity == "tensorwise" or gather.dim == 0):
                amax = max_over(block_amax(part, BLOCKS[cast.granularity]), group)
            local = TiledOperand.given(gather.local.qdata, gather.local.scale_inv)
            wanted = Digest.of(TiledOperand.of(part, cast, amax, held))
            if fault := wanted.fault(local.t() if gather.dim == 0 else local):
                self.faults.append(f"{what}: {fault}")
            self._exchange(gather, group, what)
            self.known.add(gather.whole.qdata.untyped_storage())

    def _exchange(self, gather: Gathered, group: dist.ProcessGroup, what: str) -> None:
        """Whether codes and scales of all ranks arrived as they were sent: an all-gather of two int64 a feature."""
        placement: Any = gather.like.placements[0]
        shape, scale = gather.like.shape, gather.whole.scale_inv
        sent = self._sums(gather.local.qdata, gather.local.scale_inv)
        of_ranks = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
        dist.all_gather(of_ranks, sent, group=group)

        def parts(whole: torch.Tensor) -> list[torch.Tensor]:
            found = whole.chunk(len(of_ranks), placement.dim)
            return [*found, *[found[0][:0]] * (len(of_ranks) - len(found))]  # the last ranks may have none

        codes, scales = parts(gather.whole.qdata.reshape(shape)), [scale] * len(of_ranks)
        if scale.dim() > 1 and scale.shape[-1] == 1:  # one a token
            scales = [matrix(each) for each in parts(scale.reshape(*shape[:-1], 1))]
        for rank, (part, own, want) in enumerate(zip(codes, scales, of_ranks, strict=True)):
            for name, came, right in zip(("codes", "scales"), self._sums(part, own), want, strict=True):
                if not torch.equal(came, right):
                    self.faults.append(f"{what}: {name} of rank {rank} did not arrive as they were sent")

    @staticmethod
    def _sums(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        raw = matrix(codes).view(torch.uint8)  # a zero's sign too must arrive
        return torch.stack(Digest.of(TiledOperand.given(raw, scale).t())[2:])

    def check_weight(self, layer: Float8Linear, whole: Float8Tensor, proof: LayerProof) -> None:
        """A weight that FSDP2 gathered as FP8 codes: the rows that this rank owns.

        Makes the scales of the whole weight by one all-reduce a sharded dimension, which all ranks join.
        """
        cast = layer.recipe.output.b
        if layer not in self.shards or cast is None:
            proof.unchecked("cast of the weight: it came in codes")
            return
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sharded, local = self.shards[layer]
        mesh, placements = sharded.device_mesh, sharded.placements
        _, offset = compute_local_shape_and_global_offset(sharded.shape, mesh, placements)
        rows = torch.arange(len(local), device=local.device) + offset[0]
        local = local.to(whole.dtype)
        height, width = BLOCKS[cast.granularity]
        block = rows // (height or len(whole.qdata))
        by_row = block_amax(local, (1, width))
        amax = by_row.new_zeros(-(-len(whole.qdata) // (height or len(whole.qdata))), by_row.shape[1])
        amax.scatter_reduce_(0, block[:, None].expand_as(by_row), by_row, "amax")
        groups = [mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_shard()]
        amax = max_over(amax, *groups)
        held = held_amax(cast, layer.amaxes, "weight")
        if len(local):
            scale, scale_inv = scales_of((amax if held is None else held.expand_as(amax))[block], cast)
            got = TiledOperand.given(whole.qdata, whole.scale_inv).part(
                slice(offset[0], offset[0] + len(local))
            )
            proof.gemms["output"].operands += 1
            fault = Digest.of(TiledOperand(local, cast, scale, scale_inv)).fault(got)
            if fault:
                proof.fault(f"weight gathered in FP8: {fault}")
