"""FP8 under DDP."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import sharding
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from sharding import Setting
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp8core import Float8Linear, convert_to_float8_training, update_scales
from fp8core.history import AmaxMemory
from fp8core.proof.wire import count_collectives


def trained(
    setting: Setting, of_ranks: list[int], wrapped: Callable[[nn.Module], nn.Module] = lambda m: m
) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    """Losses and averaged gradients of three steps, and the amaxes in use at the end; one process takes the ranks' batches in turn."""
    model = wrapped(sharding.built(setting, fp8=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for step in range(3):
        for rank in of_ranks:
            (x,) = sharding.batches_of(setting, step, rank)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        gradients += [p.grad.div_(len(of_ranks)).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
    return losses, gradients, [m.in_use for m in model.modules() if isinstance(m, AmaxMemory)]


@on_ranks(2)
def test_ddp_equals_one_process_that_averages() -> None:
    """Bitwise on two ranks, where a sum has no order. Delayed scaling: the same amaxes on both ranks, those of all data."""
    rank = dist.get_rank()
    for recipe in ("tensorwise", "rowwise", "delayed"):
        setting = Setting(recipe, sizes=(32, 64, 32), bias=True)
        losses, *found = trained(setting, [rank], DistributedDataParallel)
        expected, *wanted = trained(setting, [0, 1])
        assert losses == expected[rank::2]
        for got, want in zip(found, wanted, strict=True):
            assert len(got) == len(want)
            assert all(map(torch.equal, got, want))
        assert bool(found[1]) == (recipe == "delayed")


@on_ranks(2)
def test_amaxes_of_all_microbatches_survive_the_broadcast_of_buffers() -> None:
    """Oracle: the largest input, by hand; where DDP broadcasts `pending`, the last rank's first microbatch is lost. The model
    lies in a wrapper that was made after its conversion, as a LightningModule is."""
    inner = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config="delayed")
    model = DistributedDataParallel(nn.Sequential(inner))
    for number in range(3):
        x = torch.full((16, 32), 64.0 if (number, dist.get_rank()) == (0, 1) else 1.0)
        model(x).square().mean().backward()
    update_scales(model)
    (layer,) = (m for m in inner.modules() if isinstance(m, Float8Linear))
    assert float(layer.amaxes.in_use[0]) == 64.0


def fsdp(library: str, precompute: bool) -> tuple[list[float], list[dict[str, int]], list[int]]:
    """Losses, bytes gathered and all-reduces of each step, with FP8 all-gather by fp8core or torchao; emulated GEMMs.

    With biases: torchao's all-gather of FP8 alone fails on gloo, and shared with float32 it is sent as uint8.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    their = importlib.import_module(library)
    config = their.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    their.convert_to_float8_training(model, config=config)
    for layer in [*model, model]:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses, gathered, all_reduces = [], [], []
    for _ in range(3):
        with count_collectives() as counts:
            loss = model(torch.randn(16, 64, generator=data)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if precompute:
                their.precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
        gathered.append(counts.of("all_gather"))
        all_reduces.append(sum(sent.collective == "all_reduce" for sent in counts.sent))
    return losses, gathered, all_reduces


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@on_ranks(2)
def test_torchao_beside_fp8core() -> None:
    """The same losses and bytes. torchao makes an all-reduce for each weight and gather (2 x 2), or one if it is told to, after
    a first step that makes both; fp8core one in any case."""
    sizes = 2 * (64 * 128 * 2 // 2 + (128 + 64) // 2 * 4)
    first, *_ = fsdp("fp8core", False)
    for library, precompute, reduced in (
        ("fp8core", False, [1, 1, 1]), ("fp8core", True, [2, 1, 1]),  # the first step, and for the second one
        ("torchao.float8", False, [4, 4, 4]), ("torchao.float8", True, [5, 1, 1]),
    ):  # fmt: skip
        losses, gathered, all_reduces = fsdp(library, precompute)
        assert losses == pytest.approx(first, rel=1e-5)
        assert gathered == [{"uint8": sizes}] * 3
        assert all_reduces == reduced, (library, precompute)
