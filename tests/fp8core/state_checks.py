"""What the tests of sharded checkpoints run in each rank."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import sharding
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharding import Setting, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

SETTING = Setting(sizes=(48, 50, 7, 33), bias=True)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _trained(fp8: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharding.sharded(SETTING, fp8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(sharding.batches_of(SETTING, 0, dist.get_rank())[0]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _next(model: nn.Module) -> dict[str, Any]:
    """The next loss, of data that all ranks of all runs share, and the weights."""
    loss = model(sharding.batches_of(SETTING, 1, 0)[0]).square().mean().item()
    return {"loss": loss, "weights": [whole(p).tolist() for p in model.parameters()]}


def _kinds(tensors: Any) -> list[str]:
    return sorted({type(t.to_local() if isinstance(t, DTensor) else t).__name__ for t in tensors})


def save(folder: str) -> dict[str, Any]:
    """Trains a step with FP8 all-gather, writes checkpoints in three ways and goes on."""
    warnings.simplefilter("ignore")
    model, optimizer = _trained(fp8=True)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    full = get_model_state_dict(model, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save(full, Path(folder) / "full.pt")
    pickled = io.BytesIO()
    torch.save(dict(model.named_parameters()), pickled)  # the parameters themselves, past any state_dict
    pickled.seek(0)
    moments = [t for state in optimizer.state.values() for t in state.values()]
    return {
        "kinds": _kinds(model.state_dict().values()),
        "pickled": _kinds(torch.load(pickled, weights_only=True).values()),
        "moments": _kinds(moments),
        **_next(model),
    }


def resume(folder: str, fp8: bool) -> dict[str, Any]:
    """Loads it into a model that has trained otherwise; on any number of ranks."""
    warnings.simplefilter("ignore")
    torch.manual_seed(dist.get_world_size())
    model, optimizer = _trained(fp8)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return _next(model)
