"""Weights that FSDP2 gathers as FP8 codes: each rank compares the rows that it owns with an independent cast of its shard."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fp8core.dtensors import is_dtensor
from fp8core.history import ROLES
from fp8core.verify.operands import plain
from fp8core.verify.oracle import Quantized, block_amax, block_of, scales_of
from fp8core.verify.received import Operand, cast_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor import DTensor

    from fp8core.linear import Float8Linear
    from fp8core.tensor import Float8Tensor
    from fp8core.verify.records import LayerProof


def checks_of(
    layers: list[tuple[str, Float8Linear]],
) -> dict[Float8Linear, Callable[[Float8Tensor, LayerProof], None]]:
    """For each layer whose weight is sharded along its rows at this moment, what compares the gathered codes."""
    found: dict[Float8Linear, Callable[[Float8Tensor, LayerProof], None]] = {}
    for _, layer in layers:
        weight = layer.weight
        if is_dtensor(weight) and all(not p.is_shard() or p.is_shard(0) for p in weight.placements):
            found[layer] = partial(_check, layer, weight, plain(weight))
    return found


def _check(
    layer: Float8Linear, sharded: DTensor, local: torch.Tensor, gathered: Float8Tensor, proof: LayerProof
) -> None:
    """Makes the scales of the whole weight by one all-reduce a sharded dimension, which all ranks join."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    cast = layer.recipe.output.b
    assert cast is not None
    _, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    first = offset[0] if local.numel() else 0
    local = local.to(gathered.dtype)
    block = block_of(cast, 1)
    height = block[0] or sharded.shape[0]
    by_row = block_amax(local, (1, block[1]))
    blocks = -(-sharded.shape[0] // height), -(-sharded.shape[1] // (block[1] or sharded.shape[1]))
    amax = torch.zeros(blocks, dtype=torch.float64, device=local.device)
    index = (torch.arange(local.shape[0], device=local.device) + first) // height
    if local.numel():
        amax.scatter_reduce_(0, index[:, None].expand_as(by_row), by_row, "amax")
    amax = amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    for dim, placement in enumerate(sharded.placements):
        if placement.is_shard():
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=sharded.device_mesh.get_group(dim))
    amax = amax.double()
    memory = layer.amaxes
    if cast.scaling != "dynamic" and memory is not None and "weight" in memory.ready:
        in_use = memory.in_use[ROLES.index("weight")] * 2.0**memory.settings.margin
        amax = in_use.double().reshape(1, 1)
    if not local.numel():
        return
    scale, scale_inv = scales_of(amax, cast)
    wanted = Quantized(local, cast, scale, scale_inv, block, first)
    part = gathered.scale_inv
    if part.dim() and part.shape[0] not in (1, gathered.shape[0]):
        rows = torch.arange(local.shape[0], device=local.device) + first
        part = part.index_select(0, rows // 128)
    fault = cast_fault(Operand(gathered.qdata[first : first + local.shape[0]], part), wanted)
    proof.gemms["output"].operands += 1
    if fault:
        proof.fault(f"weight gathered in FP8: {fault}")
