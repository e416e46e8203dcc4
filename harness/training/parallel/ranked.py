"""What ranks hold and are asked to do: an arm of the suite `train`, or a training run; sharded by FSDP2.

The ranks are processes of their own (`harness.machine.ranks.Gang`) that follow: hold this, take n steps, give it up. An arm's
steps are taken block by block, each rank marks its own on its device's clock as the engine does in one process
(`harness.timing.clock`), and of each step the slowest rank's time counts: no command and no message is in it. What the
engine decides (warm-up, interleaving, rounds, stop rule, pairing, noise floor) stays where it is.

Nothing of an arm is left on the ranks between its blocks, so that a rank that dies takes one arm with it: the next one
gets ranks of its own.
"""

from __future__ import annotations

import functools
import pickle
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8core import Float8Linear
from fp8core.distributed.weight_gather import weight_gather_precision
from fp8core.proof.wire import count_collectives
from harness.machine.ranks import Gang, RanksError, hosts
from harness.store.errors import Cause, one_line
from harness.timing.clock import Split, adjoining, clock_for
from harness.timing.device_memory import peak_memory
from harness.timing.timers import CpuTimer, release_memory
from harness.timing.workload import Numerics, Workload
from harness.training.batches import digest
from harness.training.parallel.job import MARGIN, deviation
from harness.training.setup import Setup, Trainee, forward_of, optimizer_of, prepare
from harness.training.timed import STEPS, WATCHED, Arm, Source, Stepper, facts_of, first_fault, without_fp8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from harness.training import steps


TIMEOUT_S = 300.0  # of a command, and of each step before one was taken: a first step may compile kernels
COUNTED = 3  # steps whose losses are compared, the last of which is counted
LONGER = 4.0  # a step may take so many times what one took before
SHARED = ("tokens_per_step", "parameters", "linear_layers", "fp8_layers", "batch_shapes")


Sharded = tuple[Setup, Source, str]  # of one rank; each reads other batches; "cpu" or "cuda"


# What a rank does

_held: list[Any] = []  # at most one


def hold(make: Callable[..., object], *args: Any) -> None:
    """Keeps what `make(*args)` gives, in the place of what was held."""
    leave()
    _held.append(make(*args))


def ask(method: str, *args: Any) -> Any:
    """Calls a method of what is held."""
    return getattr(_held[0], method)(*args)


def leave() -> None:
    """Gives up the memory of what is held."""
    if _held:
        _held.clear()
        if torch.cuda.is_initialized():
            release_memory()


def enter(arm: Sharded) -> str:
    """Holds an arm: why it cannot be made, "" if it can."""
    try:
        hold(Part, *arm)
    except (ValueError, TypeError, AssertionError) as error:  # FSDP2 or fp8core refuses, on all ranks alike
        return one_line(error)
    return ""


class Part(Stepper):
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
        """For `resolved`."""
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

    def take(self, n: int) -> tuple[list[float], list[float]]:
        """Takes n adjoining steps: milliseconds of each on this rank, and of its passes."""
        clock = clock_for(next(self.trainee.model.parameters()).device)
        dist.barrier()
        return adjoining(clock, self.run, n, split=self.split), self.split.samples_ms


def peak(arm: Sharded, n: int) -> tuple[int, int]:
    """Bytes allocated and reserved at most in n steps, above what was there before the arm was made."""
    leave()
    with peak_memory() as found:
        if refused := enter(arm):
            raise ValueError(refused)
        for _ in range(n):
            ask("run")
    return found.allocated, found.reserved


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


# What this process does


class Crew:
    """Ranks whose time limit grows by the steps that they are to take.

    Attributes:
        gang: the ranks.
        step_s: of the last command with steps; None before one was taken.
    """

    def __init__(self, gang: Gang) -> None:
        self.gang = gang
        self.step_s: float | None = None

    def run(
        self, fn: Callable[..., Any], *args: Any, n: int = 0, meanwhile: Callable[[], object] | None = None
    ) -> list[Any]:
        """What `fn(*args)` returns on each rank; it takes up to n steps.

        Raises:
            RanksError: as `Gang.run`.
        """
        limit = TIMEOUT_S * max(1, n) if self.step_s is None else TIMEOUT_S + LONGER * self.step_s * n
        began = time.monotonic()
        found = self.gang.run(fn, *args, timeout_s=limit, meanwhile=meanwhile)
        if n:
            self.step_s = (time.monotonic() - began) / n
        return found


class RankedTimer(CpuTimer):
    """Takes samples on the ranks: of each step the slowest rank's. Nothing is flushed, and a command ends on all ranks."""

    method = "perf_counter_ranks"

    def __init__(self, device: str) -> None:
        super().__init__()
        if device == "cuda":
            self.method, self.l2, self.resolution_ms = "cuda_events_ranks", "warm", 5e-4

    def back_to_back(
        self,
        fn: Callable[[], object],
        n: int,
        calls: int = 1,
        probe: Callable[[], None] | None = None,
        split: Split | None = None,
    ) -> list[float]:
        """n adjoining steps on all ranks, one a sample; see `Timer`."""
        assert isinstance(fn, RankedArm)
        assert calls == 1
        every = fn.crew.run(ask, "take", n, n=n, meanwhile=probe)
        if split is not None:
            split.samples_ms = slowest([halves for _, halves in every])
        return slowest([samples for samples, _ in every])

    block = back_to_back


def slowest(by_rank: list[list[float]]) -> list[float]:
    """Longest time of any rank by step; [] where a rank has none."""
    return [max(times) for times in zip(*by_rank, strict=True)] if all(by_rank) else []


_gangs: WeakValueDictionary[tuple[int, str], Gang] = WeakValueDictionary()


def gang_of(world: int, device: str) -> Gang:
    """The ranks of this process, shared by the arms of a case; new ones after a fault."""
    gang = _gangs.get((world, device))
    if gang is None or gang.fault is not None:
        gang = Gang(world, device, first=pickle.dumps(ask))
        _gangs[world, device] = gang
    return gang


class RankedArm(Arm):
    """One arm of the suite `train` on several ranks; calling it takes one step on all of them.

    Args:
        setup: of one rank; its recipe says whether weights are gathered in FP8.
        source: of the batches.
        device: "cpu" or "cuda".
        world: ranks.
        prediction: what is expected of the step, with `step_ms`; or why nothing is.

    Raises:
        ValueError: the model cannot be converted or sharded.
        RanksError: a rank raised, died or was late.
    """

    def __init__(
        self, setup: Setup, source: Source, device: str, world: int, prediction: dict[str, object] | str
    ) -> None:
        self.setup, self.source, self.device, self.world = setup, source, device, world
        self.resolved = {"ranks": world, "hosts": hosts(world), "prediction": prediction}
        self.crew = Crew(gang_of(world, device))
        self.controls = control_of((without_fp8(setup), source, device), world)
        with self.resident():
            self.resolved |= same_on_all(self.crew.run(ask, "facts"))

    def workload(self) -> Workload:
        """What the executor asks for."""
        meter = f"the energy meter here is one GPU's, and {self.world} ranks take the step"
        return self.offered(self, Split(), timer=RankedTimer(self.device), unmetered=meter)

    @contextmanager
    def resident(self, *, recorded: bool = True) -> Iterator[None]:
        """The arm is on the ranks, in its initial state."""
        self.crew.gang = gang_of(self.world, self.device)
        with entered(self.crew.run, (self.setup, self.source, self.device)):
            yield

    def __call__(self) -> None:
        """One step on all ranks."""
        self.crew.run(ask, "take", 1, n=1)

    def on_all(self, method: str, n: int) -> list[Any]:
        """On the ranks."""
        return self.crew.run(ask, method, n=n)

    def peaks(self) -> list[tuple[int, int]]:
        """Those of all ranks."""
        try:
            return self.crew.run(peak, (self.setup, self.source, self.device), WATCHED, n=WATCHED)
        finally:
            with suppress(RanksError):
                self.crew.run(leave)

    def check(self) -> Numerics:
        """Also what goes over the wire in eager steps, whose losses must be those with weights gathered in high precision."""
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
        """`Part.counted` of a set-up from its initial state: losses of all ranks, what rank 0 sends."""
        with entered(self.crew.run, (setup, self.source, self.device)):
            every = self.crew.run(ask, "counted", COUNTED, n=COUNTED)
        return [loss for losses, _, _ in every for loss in losses], *every[0][1:]

    def expected(self) -> Numerics:
        """The time of a step."""
        expected = self.resolved["prediction"]
        if isinstance(expected, dict):
            return Numerics({"predicted_step_ms": expected["step_ms"]})
        return Numerics({}, skipped={"predicted_step_ms": str(expected)})


@functools.lru_cache(maxsize=1)  # of the case under way
def control_of(arm: Sharded, world: int) -> tuple[steps.FirstStep, ...]:
    """What the first step without FP8 gives, by rank."""
    run = Crew(gang_of(world, arm[-1])).run
    with entered(run, arm):
        return tuple(run(ask, "control"))


@contextmanager
def entered(run: Callable[..., list[Any]], arm: Sharded) -> Iterator[None]:
    """The arm is on the ranks, and afterwards on none: also where one refuses it and the others do not.

    Args:
        run: calls a function on all ranks.
        arm: in its initial state.

    Raises:
        ValueError: a rank refuses it.
    """
    try:
        if refused := first_fault(run(enter, arm)):
            raise ValueError(refused)
        yield
    finally:
        with suppress(RanksError):  # a fault was raised where it happened
            run(leave)


def same_on_all(every: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of rank 0, which are those of all.

    Raises:
        RanksError: ranks that train another model, or batches of another size.
    """
    for name in SHARED:
        for rank, one in enumerate(every):
            if str(one[name]) != str(every[0][name]):
                raise RanksError(
                    f"rank {rank} has {name} = {one[name]}, rank 0 {every[0][name]}: ranks must take the same step",
                    rank,
                )
    return every[0] | {"batch_sha256": [one["batch_sha256"] for one in every]}
