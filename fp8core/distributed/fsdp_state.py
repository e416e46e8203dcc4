"""The few things of FSDP2's, DDP's and DTensor's that are not in their public interface; nothing else in fp8core touches them.

FSDP2 makes a gathered parameter once and fills it anew at each all-gather. Where a layer goes from gathering in high
precision to gathering codes, or back, the parameter must be made anew: `forget_gathered`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch
    from torch import nn


def local_of(weight: Any) -> torch.Tensor | None:
    """A DTensor's part on this rank, the object itself: `to_local` makes a new one of a parameter. None of other tensors."""
    return weight._local_tensor if hasattr(weight, "device_mesh") else None


def is_sharded_by_fsdp(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model or a part of it."""
    return any(hasattr(module, "_get_fsdp_state") for module in model.modules())


def forget_gathered(model: nn.Module, layers: Collection[nn.Module]) -> None:
    """Makes FSDP2 build the gathered weights of these layers anew at their next all-gather.

    Args:
        model: holds the layers; between a backward pass and the next forward pass.
        layers: those whose weights will be gathered in another precision than before.
    """
    for module, group in _groups(model):
        params = [p for p in group.fsdp_params if p._module_info.module in layers]
        if params:
            module.reshard()  # a parameter that is gathered at the moment can't be made anew
        for param in params:
            if hasattr(param, "_unsharded_param"):
                del param._unsharded_param
            param.all_gather_outputs = []


def refuse_partial_reshard(model: nn.Module, layers: Collection[nn.Module]) -> None:
    """FSDP2 can't shard codes anew over a part of the ranks, and would fail in the backward pass without a word.

    Raises:
        ValueError: a layer is sharded with `reshard_after_forward` as a number below that of the ranks.
    """
    for _, group in _groups(model):
        after = group.post_forward_mesh_info
        if after is None or after is group.mesh_info or after.mesh == group.mesh_info.mesh:
            continue
        if any(p._module_info.module in layers for p in group.fsdp_params):
            raise ValueError(
                f"reshard_after_forward={after.shard_mesh_size} of {group.mesh_info.shard_mesh_size} ranks: FSDP2 does not "
                "reshard an FP8 all-gather to a part of the ranks; use True or False, or leave out "
                "enable_fsdp_float8_all_gather"
            )


def _groups(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Each sharded module with the parameters that it gathers together; torch 2.11 has at most one such group a module."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "_get_fsdp_state"):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            groups = [state._fsdp_param_group] if groups is None else groups
            yield from ((module, group) for group in groups if group is not None)


def gathered_parts(model: nn.Module) -> dict[nn.Module, tuple[int, int, int, tuple[int, ...]]]:
    """Where a rank's part lies in the weight that FSDP2 gathers for a module: (dimension, index, parts, ranks that share it)."""
    found = {}
    for _, group in _groups(model):
        mesh = group.mesh_info
        where = getattr(mesh, "shard_mesh_rank", 0), getattr(mesh, "shard_mesh_size", 1)
        for param in group.fsdp_params:
            info = param._module_info
            names = zip(
                (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True
            )
            for module in [module for module, name in names if name == "weight"]:
                found[module] = param.fsdp_placement.dim, *where, tuple(mesh.mesh.mesh.flatten().tolist())
    return found


def replicas(layer: nn.Module) -> tuple[int, ...]:
    """The ranks on which DDP, whose forward pass runs, keeps the weight of a layer the same; () outside of any."""
    return next((ranks for ranks, p in replicated().values() if p is layer.weight), ())


def replicated() -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    """The parameters that DDP, whose forward pass runs, keeps the same: name -> (ranks, parameter); none outside of any."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None:
        return {}
    ranks = tuple(dist.get_process_group_ranks(ddp.process_group))
    named = ddp.module.named_parameters()
    return {name: (ranks, p) for name, p in named if name not in ddp.parameters_to_ignore}


def end_pass(model: nn.Module) -> None:
    """Puts FSDP2 back to where it is between two steps, after a step that raised half-way: parameters are shards again.

    Without it the model shows the gathered parameters, not those that its optimizer holds, and gradients of the pass that
    was broken off would be added to those of the next one. All ranks must have raised at the same place: one that waits in
    a collective stays there.
    """
    for module, group in _groups(model):
        pending, group._all_gather_result = group._all_gather_result, None
        if pending is not None and pending.all_gather_work is not None:
            pending.all_gather_work.wait()
        state = module._get_fsdp_state()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        getattr(state, "_modules_to_run_forward", set()).clear()  # of torch 2.13
        idle = type(group._training_state).IDLE
        state._training_state = group._training_state = idle
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
        module.reshard()
