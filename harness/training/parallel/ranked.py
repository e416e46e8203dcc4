"""An arm of the suite `train` on several ranks, as each of them has it: sharded by FSDP2.

Each rank is a process of the arm (`harness.engine.arms`) and is asked the same; it reads other batches than the other ranks, and
marks its own steps on its device's clock. Of each step the slowest rank's time counts. What is found of an arm is gathered, so
that all ranks say the same of it. Nothing of an arm is left on the ranks between its blocks.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8core import Float8Linear
from fp8core.distributed.weight_gather import weight_gather_precision
from fp8core.proof.wire import count_collectives
from harness.machine.ranks import hosts
from harness.store.errors import Cause
from harness.timing.clock import Split
from harness.timing.timers import RanksTimer, release_memory
from harness.timing.workload import Numerics, Workload
from harness.training.batches import digest
from harness.training.parallel.job import MARGIN, deviation
from harness.training.parallel.together import gathered
from harness.training.setup import Setup, Trainee, forward_of, optimizer_of, prepare
from harness.training.timed import STEPS, Source, Stepper, TrainingArm, facts_of, without_fp8

if TYPE_CHECKING:
    from collections.abc import Iterator


COUNTED = 3  # steps whose losses are compared, the last of which is counted
SHARED = ("tokens_per_step", "parameters", "linear_layers", "fp8_layers", "batch_shapes")


class RankPart(Stepper):
    """A rank's part of an arm."""

    def __init__(self, setup: Setup, source: Source, device: str) -> None:
        trainee = prepare(setup, device, weights="device" if device == "cuda" else "host")
        model = trainee.model
        trainee.run = forward_of(model, replace(setup, compiled=False), device)
        for block in blocks_of(model) if setup.compiled else ():
            block.compile(fullgraph=True, dynamic=False)
        shard(trainee, device)
        rank, world = dist.get_rank(), dist.get_world_size()
        batches = [source.step(setup, step * world + rank, device) for step in range(STEPS)]
        super().__init__(trainee, batches)
        self.source, self.device = source, device
        torch.manual_seed(setup.seed)

    def facts(self) -> dict[str, Any]:
        """What this rank knows of its part, for `resolved`."""
        setup, model = self.trainee.setup, self.trainee.model
        facts = facts_of(self.trainee, self.source, self.device)
        del facts["memory"]  # of the whole model in one process
        layers = [m for m in model.modules() if isinstance(m, Float8Linear)]
        return facts | {
            "timed": "one optimizer step of all ranks: forward, backward, clipping, optimizer, FP8 scales; the slowest rank's",
            "compile": "each block by itself" if setup.compiled else "eager",
            "sharding": f"FSDP2, each of {len(blocks_of(model))} blocks and the rest",
            "weights_gathered_as": sorted({weight_gather_precision(layer) for layer in layers})
            or ["float32" if setup.compute == "fp32" else "bfloat16"],
            "weights": "drawn on every rank alike, then sharded",
            "batch_shapes": [[list(part.shape) for part in parts] for parts in self.batches[0]],
            "batch_sha256": digest(part for parts in self.batches[0] for part in parts),
        }

    def counted(self, n: int) -> tuple[list[float], list[tuple[str, int, int]], int]:
        """Losses of n steps; of the last one what this rank gave to collectives (what and of which dtype, calls, bytes), and
        how many of them found scales.
        """
        losses = [float(self.run()) for _ in range(n - 1)]
        with count_collectives() as counts:
            losses.append(float(self.run()))
        sizes = counts.bytes
        sent = [(" ".join(key), calls, sizes[key]) for key, calls in sorted(counts.calls.items())]
        return losses, sent, counts.scale_reductions


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost lists of modules: what FSDP2 gathers one by one."""
    if isinstance(model, nn.ModuleList):
        return list(model)
    return [block for child in model.children() for block in blocks_of(child)]


def shard(trainee: Trainee, device: str) -> None:
    """FSDP2 of every block and of the rest, over all ranks; gradients are reduced in float32."""
    low = torch.bfloat16 if trainee.setup.compute != "fp32" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for block in (*blocks_of(trainee.model), trainee.model):
        fully_shard(block, mp_policy=policy)
    trainee.optimizer = optimizer_of(trainee.model, trainee.setup, device)  # of the sharded parameters


class RankedArm(TrainingArm):
    """One arm of the suite `train`, on this rank.

    Args:
        setup: of one rank; its recipe says whether weights are gathered in FP8.
        source: of the batches.
        device: "cpu" or "cuda".
        world: ranks.
        prediction: what is expected of the step, with `step_ms`; or why nothing is.

    Raises:
        ValueError: the model cannot be converted or sharded, or ranks would train another one.
    """

    def __init__(
        self, setup: Setup, source: Source, device: str, world: int, prediction: dict[str, object] | str
    ) -> None:
        self.setup, self.source, self.device, self.world = setup, source, device, world
        self.split = Split()
        self.resolved = {"ranks": world, "hosts": hosts(), "prediction": prediction}
        with self._holding(without_fp8(setup)) as part:
            self.control = part.control()
        with self._holding(setup) as part:
            self.resolved |= same_on_all(gathered(part.facts()))

    def workload(self) -> Workload:
        """What the executor asks for."""
        meter = f"the energy meter here is one GPU's, and {self.world} ranks take the step"
        return self.offered(self, self.split, timer=RanksTimer(self.device), unmetered=meter)

    def __call__(self) -> None:
        """One step."""
        self.stepper.run()

    @contextmanager
    def resident(self, *, recorded: bool = True) -> Iterator[None]:
        """The arm is there, in its initial state."""
        with self._holding(self.setup) as self.stepper:
            self.stepper.split = self.split
            try:
                yield
            finally:
                del self.stepper

    @contextmanager
    def _holding(self, setup: Setup) -> Iterator[RankPart]:
        held = [RankPart(setup, self.source, self.device)]
        try:
            yield held[0]
        finally:
            held.clear()
            if self.device == "cuda":
                release_memory()

    def check(self) -> Numerics:
        """Checks as every arm is, and what eager steps send, whose losses must be those with weights gathered in high precision."""
        found, recipe = super().check(), self.setup.recipe
        if not found.ok:
            return found
        if self.setup.compiled:
            why = "what compiled code sends is not seen; the eager arm has it"
            return replace(found, skipped={**found.skipped, "wire_bytes": why, "collectives": why})
        losses, sent, self.resolved["scale_all_reduces_per_step"] = self.counted(self.setup)
        parts = {("collectives", what): float(calls) for what, calls, _ in sent}
        parts |= {("wire_bytes", what): float(size) for what, _, size in sent}
        if recipe is None or not recipe.fp8_all_gather:
            return replace(found, parts=parts)
        high = replace(self.setup, recipe=recipe.with_fp8_all_gather(False))
        expected, _, _ = self.counted(high)
        # A GPU's backward kernels need not repeat their sums
        bound = 0.0 if self.device == "cpu" else MARGIN * deviation(self.counted(high)[0], expected)
        self.resolved["bound"], apart = bound, deviation(losses, expected)
        if not apart <= bound:  # also where a loss is NaN
            why = f"losses differ by {apart:.2e} from those with weights gathered in high precision; bound {bound:.2e}"
            return Numerics({}, ok=False, reason=why, cause=Cause.NUMERICS)
        return replace(found, values={**found.values, "loss_deviation": apart}, parts=parts)

    def counted(self, setup: Setup) -> tuple[list[float], list[tuple[str, int, int]], int]:
        """`RankPart.counted` of a set-up from its initial state: losses of all ranks, what this one sends."""
        with self._holding(setup) as part:
            losses, sent, scales = part.counted(COUNTED)
        return [loss for own in gathered(losses) for loss in own], sent, scales

    def expected(self) -> Numerics:
        """The time of a step."""
        expected = self.resolved["prediction"]
        if isinstance(expected, dict):
            return Numerics({"predicted_step_ms": expected["step_ms"]})
        return Numerics({}, skipped={"predicted_step_ms": str(expected)})


def same_on_all(every: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of rank 0, which are those of all.

    Raises:
        ValueError: ranks that train another model, or batches of another size.
    """
    for name in SHARED:
        for rank, one in enumerate(every):
            if str(one[name]) != str(every[0][name]):
                raise ValueError(
                    f"rank {rank} has {name} = {one[name]}, rank 0 {every[0][name]}: ranks must take the same step"
                )
    return every[0] | {"batch_sha256": [one["batch_sha256"] for one in every]}
