"""Training under DDP and FSDP2 that is watched; what `test_watch_ranks.py` judges."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8core
from fp8core import RECIPES, convert_to_float8_training, update_scales


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    recipe = RECIPES["delayed" if kind == "ddp" else "tensorwise"].with_fp8_all_gather(kind == "fsdp8")
    convert_to_float8_training(layers, config=recipe)
    if kind == "ddp":
        return DistributedDataParallel(layers)
    for layer in (layers[0], layers[2], layers):
        fully_shard(layer)
    return layers


def train(kind: str, rank: int, path: Path | None) -> dict[str, Any]:
    """Losses of four steps, digests of the weights, and the last records."""
    net = model(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    batches = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1 + rank))
    watcher = fp8core.watch(net, every=2, to=path, samples=1 << 20) if path is not None else nullcontext()
    losses = []
    with watcher:
        for x in batches:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            update_scales(net)
            losses.append(loss.item())
            if isinstance(watcher, fp8core.Watcher):
                watcher.step()
    records = [asdict(r) for r in watcher.latest] if isinstance(watcher, fp8core.Watcher) else []
    inputs = batches[2].abs().max().item()
    weights = [getattr(p, "_local_tensor", p).double().sum().item() for p in net.parameters()]
    return {"losses": losses, "weights": weights, "records": records, "amax": inputs}


def runs(folder: Path) -> dict[str, Any]:
    """Each kind of training without and with a watcher; and one that rank 1 alone watches: the other has nothing to wait for."""
    rank = dist.get_rank()
    warnings.simplefilter("ignore")
    found = {
        kind: [train(kind, rank, path) for path in (None, folder / f"{kind}.jsonl")]
        for kind in ("ddp", "fsdp", "fsdp8")
    }
    alone = train("ddp", rank, folder / "alone.jsonl" if rank else None)
    return {"runs": found, "alone": alone["losses"]}
