"""One of two processes that watch a model under DDP and FSDP2 over gloo; prints what `test_watch_ranks.py` judges, as JSON.

Run as `python watch_worker.py RANK STORE FOLDER`.
"""

from __future__ import annotations

import json
import sys
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


def main() -> None:
    rank, store, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    runs = {}
    for kind in ("ddp", "fsdp", "fsdp8"):
        runs[kind] = [train(kind, rank, path) for path in (None, folder / f"{kind}.jsonl")]
    # Rank 1 alone watches: without collectives the other one has nothing to wait for
    alone = train("ddp", rank, folder / "alone.jsonl" if rank else None)
    print(json.dumps({"runs": runs, "alone": alone["losses"]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
