"""What the ranks of `test_printed_code.py` run: printed code on a model of each rank, sharded where the code says so."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8core import verify

FSDP = "# FSDP: fully_shard each block and the model here, then make the optimizer"
SHARD = "shard(model)"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256, bias=False)
        self.down = nn.Linear(256, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


class Tiny(nn.Module):
    """Two blocks and a head; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(128, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()


def shard(model: nn.Module) -> None:
    """FSDP2 over all ranks, as a reader does it in the place of the comment."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert isinstance(model, Tiny)
    for block in (*model.layers, model):
        fully_shard(block, mesh=mesh)


def trained(code: str, *claims: bool) -> list[dict[str, Any]]:
    """Executes the code, trains two steps, and lets `verify` judge the next, once for each claim that weights are gathered
    in FP8 or not; compiled code runs without code generation."""
    assert code.count(FSDP) == 1
    compile_ = torch.compile

    @functools.wraps(compile_)
    def ungenerated(*args: Any, **kwargs: Any) -> Any:
        return compile_(*args, **{**kwargs, "backend": "eager"})

    torch.compile = ungenerated
    torch.manual_seed(0)
    model = Tiny()
    names: dict[str, Any] = {"model": model, "shard": shard, "total_steps": 100}
    exec(code.replace(FSDP, SHARD), names)
    optimizer = names["optimizer"] = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    batch = (torch.randn(128, 128),)

    def plain(step: int, batch: tuple[torch.Tensor, ...]) -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step = names.get("train_step", plain)
    for i in range(2):
        step(i, batch)
    proofs = [verify(lambda: step(2, batch), model, fp8_all_gather=claim, announce=False) for claim in claims]
    return [
        {"ok": each.ok, "line": each.line, "layers": len([la for la in each.layers if la.recipe])}
        for each in proofs
    ]
