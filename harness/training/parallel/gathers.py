"""Gathers: FSDP2 of a stack of linear layers whose weights are gathered one way, counted and timed in every rank.

Beside the way that is measured, three in all take turns, round by round, in an order that is the same on every rank:

    own       the way itself
    high      the same layers, weights gathered in high precision: losses must be equal, bit for bit
    alone     the same as own with all weights on each rank: nothing is on the wire, so what own takes longer is exposed

A block is a norm and two linear layers without biases, one all-gather each time: what is not a weight of a linear layer
(the gains of norms) is gathered in high precision in every way, and counted.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8core
from fp8core.proof.wire import count_collectives
from harness.peers import torchao
from harness.store.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh

OWN, HIGH, ALONE = "own", "high precision gather", "alone"
LR = 0.05
WARMUP = 2  # rounds that are not timed


@dataclass(frozen=True, slots=True)
class Gather:
    """One way to gather, and how large a model.

    Attributes:
        implementation: "" for no FP8, "fp8core" or "torchao".
        precompute: scales of all weights are found right after each optimizer step, by a call.
        width, hidden, layers: of the blocks.
        tokens: of each rank's step.
        rounds: timed steps of each of the ways that take turns.
        param_dtype: what weights are cast to before they are gathered in high precision: "bf16" or "fp32".
        seed: of weights, inputs and the order of turns.
        device: "cpu" or "cuda".
    """

    implementation: str
    precompute: bool
    width: int
    hidden: int
    layers: int
    tokens: int
    rounds: int
    param_dtype: str
    seed: int = 0
    device: str = "cpu"


@dataclass(slots=True)
class Measured:
    """What one rank has seen, by step of the way itself.

    Attributes:
        losses: of OWN and HIGH.
        ms: of OWN, HIGH and ALONE.
        sent: (collective, dtype) -> (calls, bytes) of one step.
        scale_all_reduces: of one step, that were for weight scales.
        refusal: why nothing ran; "" where it did.
    """

    losses: dict[str, list[float]] = field(default_factory=dict)
    ms: dict[str, list[float]] = field(default_factory=dict)
    sent: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    scale_all_reduces: int = 0
    refusal: str = ""


class Block(nn.Module):
    """x + down(relu(up(norm(x))))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] -> the same."""
        return x + self.down(self.up(self.norm(x)).relu())


class _Trained:
    """A model that is trained step by step."""

    def __init__(self, gather: Gather, fp8_gather: bool, mesh: DeviceMesh) -> None:
        self.gather = gather
        torch.manual_seed(gather.seed)
        model: Any = nn.Sequential(*(Block(gather.width, gather.hidden) for _ in range(gather.layers)))
        self.model = model.to(gather.device)
        self.precompute = None
        if gather.implementation:
            library = _library(gather.implementation)
            config = library.Float8LinearConfig(enable_fsdp_float8_all_gather=fp8_gather)
            self.model = library.convert_to_float8_training(self.model, config=config)
            if gather.precompute and fp8_gather:
                self.precompute = library.precompute_float8_dynamic_scale_for_fsdp
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if gather.param_dtype == "bf16" else None)
        for block in self.model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, foreach=False)
        drawn = torch.Generator().manual_seed(gather.seed * 1009 + dist.get_rank())
        self.x = torch.randn(gather.tokens, gather.width, generator=drawn).to(gather.device)
        self.losses: list[float] = []

    def step(self) -> None:
        """One training step."""
        loss = self.model(self.x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.precompute is not None:
            self.precompute(self.model)
        self.losses.append(loss.item())  # waits for the device


def measure(gather: Gather) -> Measured:
    """What every rank does."""
    mesh = init_device_mesh(gather.device, (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))
    fp8 = bool(gather.implementation)
    try:
        turns = {OWN: _Trained(gather, fp8, mesh["all"]), ALONE: _Trained(gather, fp8, mesh["one"])}
        if fp8:
            turns[HIGH] = _Trained(gather, False, mesh["all"])
    except ValueError as error:
        return Measured(refusal=one_line(error))
    found = Measured(ms={name: [] for name in turns})
    order = random.Random(gather.seed)
    for number in range(WARMUP + gather.rounds):
        names = list(turns)
        order.shuffle(names)
        for name in names:
            dist.barrier()
            started = time.perf_counter()
            turns[name].step()
            if number >= WARMUP:
                found.ms[name].append((time.perf_counter() - started) * 1e3)
    found.losses = {name: turns[name].losses[:] for name in turns if name != ALONE}
    turns[OWN].step()  # the optimizers of the others have stepped since, after which scales are found anew
    with count_collectives() as counts:
        turns[OWN].step()
    sizes = counts.bytes
    found.sent = {key: (calls, sizes[key]) for key, calls in counts.calls.items()}
    found.scale_all_reduces = counts.scale_reductions
    return found


def weights_in(gather: Gather) -> Mapping[str, int]:
    """Numbers of the model: weights of linear layers, and all else that is gathered with them."""
    return {"linear": 2 * gather.width * gather.hidden * gather.layers, "other": gather.width * gather.layers}


def _library(implementation: str) -> Any:
    """fp8core, or torchao.float8 with the same names."""
    if implementation == "fp8core":
        return fp8core
    torchao.load("torchao.float8")
    from torchao import float8

    return float8
