"""fp8core.watch on two gloo processes. Oracle: the same training without it, bitwise; each rank's own batch."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8core
from fp8core import RECIPES, CastRecord, convert_to_float8_training, update_scales


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


def batches() -> torch.Tensor:
    """This rank's."""
    return torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1 + dist.get_rank()))


def train(kind: str, path: Path | None) -> tuple[list[float], list[CastRecord]]:
    """Losses of four steps with sums of the weights after them, and the last records."""
    net = model(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    watcher = None if path is None else fp8core.watch(net, every=2, to=path, samples=1 << 20)
    trace = []
    with watcher or nullcontext():
        for x in batches():
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            update_scales(net)
            trace.append(loss.item())
            if watcher is not None:
                watcher.step()
    trace += [getattr(p, "_local_tensor", p).double().sum().item() for p in net.parameters()]
    return trace, [] if watcher is None else list(watcher.latest)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp8"])
@on_ranks(2)
def test_each_rank_trains_the_same_and_reports_its_own_part_under_its_number(
    kind: str, tmp_path: Path
) -> None:
    rank = dist.get_rank()
    plain, _ = train(kind, None)
    watched, records = train(kind, tmp_path / "casts.jsonl")
    assert watched == plain
    assert {r.rank for r in records} == {rank}
    prefix = "module." if kind == "ddp" else ""
    (first,) = (r for r in records if (r.layer, r.operand) == (f"{prefix}0", "input"))
    assert (first.status, first.amax) == ("cast", batches()[2].abs().max().item())
    lines = (tmp_path / f"casts.rank{rank}.jsonl").read_text().splitlines()[-len(records) :]
    assert [json.loads(line) for line in lines] == json.loads(json.dumps([asdict(r) for r in records]))
    if kind == "ddp":  # delayed scaling takes the largest amax of all ranks
        scales: list[list[float | None]] = [[], []]
        dist.all_gather_object(scales, [r.scale for r in records])
        assert scales[0] == scales[1]


@on_ranks(2)
def test_one_rank_alone_may_watch(tmp_path: Path) -> None:
    """It would hang if anything were asked of the other."""
    alone, _ = train("ddp", tmp_path / "alone.jsonl" if dist.get_rank() else None)
    assert alone == train("ddp", None)[0]


@on_ranks(2)
def test_a_weight_that_was_gathered_in_codes_says_so(tmp_path: Path) -> None:
    """And has the scale of the one that was gathered in high precision."""
    found = (train(kind, tmp_path / f"{kind}.jsonl")[1] for kind in ("fsdp", "fsdp8"))
    pairs = zip(*([r for r in records if r.operand == "weight"] for records in found), strict=True)
    layers = []
    for plain, codes in pairs:
        assert (plain.status, codes.status) == ("cast", "codes only")
        assert codes.amax is codes.sqnr_db is codes.saturated_share is None
        assert (plain.layer, plain.scale) == (codes.layer, codes.scale)
        assert plain.elements == 32 * 64
        layers.append(plain.layer)
    assert set(layers) == {"0", "2"}
