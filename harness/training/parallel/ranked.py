"""A training step of several ranks as the sweep times it: the model sharded by FSDP2, its arms in turns on the same ranks.

The ranks are processes of their own (`harness.machine.ranks.Gang`) that follow: make this arm, take n steps, give it up.
They take the steps of a block by themselves, each marks its own on its device's clock as the engine does in one process
(`harness.timing.clock`), and of each step the slowest rank's time counts: no command and no message is in it. What the
engine decides (warm-up, interleaving, rounds, stop rule, pairing, noise floor) stays where it is.

Nothing of an arm is left on the ranks between its blocks, so that a rank that dies takes one arm with it: the next one
gets ranks of its own.
"""

from __future__ import annotations

import functools
import pickle
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8core import Float8Linear
from fp8core.distributed.gather_reasons import gathered_as
from harness.machine.ranks import Gang, RanksError
from harness.store.cause import Cause
from harness.store.errors import one_line
from harness.timing.clock import Split, adjoining, clock_for
from harness.timing.device_memory import peak_memory
from harness.timing.timers import release_memory
from harness.timing.workload import Numerics, Workload
from harness.training import meta_estimate, steps
from harness.training.batches import corpus_of, digest, microbatches_of
from harness.training.parallel.agreement import first_fault, proofs_differ, same_on_all
from harness.training.setup import Setup, forward_of, optimizer_of, prepare
from harness.training.timed import STEPS, WATCHED, Source, facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

TIMEOUT_S = 300.0  # of a command, and of each step before one was taken: a first step may compile kernels
LONGER = 4.0  # a step may take so many times what one took before


@dataclass(frozen=True, slots=True)
class Sharded:
    """What every rank trains.

    Attributes:
        setup: of one rank; its recipe says whether weights are gathered in FP8.
        source: of the batches; each rank reads others.
        device: "cpu" or "cuda".
    """

    setup: Setup
    source: Source
    device: str


# What a rank does


class _Held:
    """The arm whose memory is on this rank."""

    def __init__(self, arm: Sharded) -> None:
        setup, device = arm.setup, arm.device
        on_gpu = device == "cuda"
        # The optimizer is made again below, of the parameters that are sharded
        self.trainee = prepare(setup, device, weights="device" if on_gpu else "host")
        model = self.trainee.model
        self.trainee.run = forward_of(model, replace(setup, compiled=False), device)
        for block in blocks_of(model) if setup.compiled else ():
            block.compile(fullgraph=True, dynamic=False)
        shard(model, setup.compute)
        self.trainee.optimizer = optimizer_of(self.trainee.model, setup, device)
        self.arm, self.split, self._turn = arm, Split(), 0
        self.device = next(self.trainee.model.parameters()).device
        text: Any = corpus_of(setup.model, arm.source.data, arm.source.path)
        size = (setup.accumulation, setup.batch, setup.seq)
        first, world = dist.get_rank(), dist.get_world_size()
        self.batches = [
            microbatches_of(setup.model, text, step * world + first, arm.source.seed, size, device)
            for step in range(STEPS)
        ]
        torch.manual_seed(setup.seed)

    def run(self) -> Tensor:
        """One step."""
        self._turn += 1
        return self.trainee.step(self.batches[(self._turn - 1) % STEPS], self.split)

    def facts(self) -> dict[str, Any]:
        """For `resolved`."""
        facts = facts_of(self.trainee, self.arm.source, self.arm.device)
        del facts["memory"]  # of the whole model in one process
        layers = [m for m in self.trainee.model.modules() if isinstance(m, Float8Linear)]
        plain = str(gathered_in(self.arm.setup))
        return facts | {
            "timed": "one optimizer step of all ranks: forward, backward, clipping, optimizer, FP8 scales; the slowest rank's",
            "compile": "each block by itself" if self.arm.setup.compiled else "eager",
            "sharding": f"FSDP2, each of {len(blocks_of(self.trainee.model))} blocks and the rest",
            "weights_gathered_as": sorted({gathered_as(layer) for layer in layers})
            or [plain.removeprefix("torch.")],
            "weights": "drawn on every rank alike, then sharded",
            "batch_shapes": [[list(part.shape) for part in parts] for parts in self.batches[0]],
            "batch_sha256": digest(part for parts in self.batches[0] for part in parts),
        }


_held: list[_Held] = []  # at most one


def enter(arm: Sharded) -> str:
    """Makes an arm on this rank: why it cannot be made, "" if it can."""
    leave()
    try:
        _held.append(_Held(arm))
    except (ValueError, TypeError, AssertionError) as error:  # FSDP2 or fp8core refuses, on all ranks alike
        return one_line(error)
    return ""


def facts() -> dict[str, Any]:
    """What is held."""
    return _held[0].facts()


def leave() -> None:
    """Gives up the arm's memory."""
    if _held:
        device = _held[0].device
        _held.clear()
        if device.type == "cuda":
            release_memory()


def take(n: int) -> tuple[list[float], list[float]]:
    """Takes n adjoining steps: milliseconds of each on this rank, and of its passes."""
    held = _held[0]
    dist.barrier()
    samples = adjoining(clock_for(held.device), held.run, n, split=held.split)
    return samples, held.split.samples_ms


def first_step() -> steps.FirstStep:
    """Takes the first step; gradients are this rank's part. Logits are looked at in eager mode, which the control has."""
    held = _held[0]
    looked: AbstractContextManager[list[float]] = (
        nullcontext([]) if held.arm.setup.compiled else steps.spread_of_logits(held.trainee)
    )
    with looked as spread:
        return steps.FirstStep.of(held.run(), held.trainee, spread)


def prove() -> tuple[str, dict[str, object]]:
    """Why this rank's steps do not run in the precision asked for, "" if they do; and what was found."""
    held, resolved = _held[0], dict[str, object]()
    return steps.precision_fault(held.run, held.trainee, resolved), resolved


def peak(n: int) -> tuple[int, int]:
    """Bytes allocated and reserved at most in n steps, above what was there before the arm was made."""
    arm = _held[0].arm
    leave()
    with peak_memory() as found:
        if refused := enter(arm):
            raise ValueError(refused)
        for _ in range(n):
            _held[0].run()
    return found.allocated, found.reserved


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost lists of modules: what FSDP2 gathers one by one."""
    if isinstance(model, nn.ModuleList):
        return list(model)
    return [block for child in model.children() for block in blocks_of(child)]


def gathered_in(setup: Setup) -> torch.dtype:
    """What weights are cast to before they are gathered in high precision."""
    return torch.float32 if setup.compute == "fp32" else torch.bfloat16


def shard(model: nn.Module, compute: str) -> None:
    """FSDP2 of every block and of the rest, over all ranks; gradients are reduced in float32."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if compute != "fp32" else None, reduce_dtype=torch.float32
    )
    for block in blocks_of(model):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


# What this process does


class RankedTimer:
    """Takes samples on the ranks: of each step the slowest rank's (`harness.timing.timers.Timer`)."""

    method = "perf_counter"
    l2 = "none"
    resolution_ms = 1e-4
    late = 0
    hold = ""

    def __init__(self, device: str) -> None:
        if device == "cuda":
            self.method, self.l2, self.resolution_ms = "cuda_events", "warm", 5e-4
        self.method += "_ranks"

    def back_to_back(
        self,
        fn: Callable[[], object],
        n: int,
        calls: int = 1,
        probe: Callable[[], None] | None = None,
        split: Split | None = None,
    ) -> list[float]:
        """n adjoining steps on all ranks, see `Timer`.

        Raises:
            ValueError: a closure that is no step of ranks, or several calls a sample.
        """
        if not isinstance(fn, RankedArm) or calls != 1:
            raise ValueError(f"{fn!r} x {calls}: expected a step of ranks, one a sample")
        every = fn.on_ranks(take, n, n=n, meanwhile=probe)
        if split is not None:
            split.samples_ms = slowest([halves for _, halves in every])
        return slowest([samples for samples, _ in every])

    block = back_to_back

    def rotating(self) -> None:
        """Nothing is flushed."""

    def synchronize(self) -> None:
        """A command has ended on all ranks when it returns."""

    def annotate(self, name: str) -> Any:
        """No ranges: the work is in other processes."""
        return nullcontext(name)


_gangs: WeakValueDictionary[tuple[int, str], Gang] = WeakValueDictionary()


def gang_of(world: int, device: str) -> Gang:
    """The ranks of this process, shared by the arms of a case; new ones after a fault."""
    gang = _gangs.get((world, device))
    if gang is None or gang.fault is not None:
        gang = Gang(world, device, first=pickle.dumps(take))
        _gangs[world, device] = gang
    return gang


class RankedArm:
    """One arm of the suite `train` on several ranks; calling it takes one step on all of them.

    Args:
        arm: what each rank trains.
        world: ranks.
        prediction: what is expected of the step, with `step_ms`; or why nothing is.

    Raises:
        ValueError: the model cannot be converted or sharded.
        RanksError: a rank raised, died or was late.
    """

    def __init__(
        self, arm: Sharded, world: int, prediction: dict[str, object] | str = "no prediction"
    ) -> None:
        self.arm, self.world = arm, world
        self.resolved: dict[str, object] = {"ranks": world, "prediction": prediction}
        self.timer = RankedTimer(arm.device)
        self._step_s: float | None = None  # of the last command with steps; None before one was taken
        self._gang = gang_of(world, arm.device)
        self.control = control_of(replace(arm, setup=without_fp8(arm.setup)), world)
        with self.resident():
            self.resolved |= same_on_all(self.on_ranks(facts))

    def on_ranks(
        self, fn: Callable[..., Any], *args: Any, n: int = 0, meanwhile: Callable[[], object] | None = None
    ) -> list[Any]:
        """What `fn(*args)` returns on each rank; it takes up to n steps, by which its time limit grows.

        Raises:
            RanksError: as `Gang.run`.
        """
        limit = TIMEOUT_S * max(1, n) if self._step_s is None else TIMEOUT_S + LONGER * self._step_s * n
        began = time.monotonic()
        found = self._gang.run(fn, *args, timeout_s=limit, meanwhile=meanwhile)
        if n:
            self._step_s = (time.monotonic() - began) / n
        return found

    def workload(self) -> Workload:
        """What the executor asks for."""
        return Workload(
            run=self,
            check=self.check,
            flops=meta_estimate.flops(self.arm.setup),
            resolved=self.resolved,
            resident=self.resident,
            tokens=self.world * meta_estimate.tokens(self.arm.setup),
            split=Split(),
            split_metric="forward_backward_ms",
            timer=self.timer,
            unmetered=f"the energy meter here is one GPU's, and {self.world} ranks take the step",
        )

    @contextmanager
    def resident(self) -> Iterator[None]:
        """The arm is on the ranks, in its initial state."""
        self._gang = gang_of(self.world, self.arm.device)
        with entered(self.on_ranks, self.arm):
            yield

    def __call__(self) -> None:
        """One step on all ranks."""
        self.on_ranks(take, 1, n=1)

    def check(self) -> Numerics:
        """First step against the control's on every rank, every rank's proof, then the memory of some steps."""
        with self.resident():
            mine = self.on_ranks(first_step, n=1)
            fault = first_fault(
                [steps.first_step_fault(own, base) for own, base in zip(mine, self.control, strict=True)]
            )
            self.resolved |= {
                "first_loss": mean_loss(mine),
                "first_loss_control": mean_loss(self.control),
            }
            cause = Cause.NUMERICS
            if not fault:
                proofs = self.on_ranks(prove, n=steps.PROOF)
                self.resolved |= proofs[0][1]
                fault = first_fault([why for why, _ in proofs]) or proofs_differ([r for _, r in proofs])
                guilty = next((r for why, r in proofs if why), proofs[0][1])
                cause = steps.cause_of_fault(guilty)
                self.resolved["proved_on_ranks"] = sum(not why for why, _ in proofs)
            if fault:
                return Numerics({}, ok=False, reason=fault, cause=cause)
            measured = ("peak_memory_bytes", "reserved_memory_bytes")
            figures, skipped = dict[str, float](), dict[str, str]()
            if self.arm.device == "cuda":
                peaks = zip(*self.on_ranks(peak, WATCHED, n=WATCHED), strict=True)
                figures = {name: float(max(sizes)) for name, sizes in zip(measured, peaks, strict=True)}
            else:
                skipped = dict.fromkeys(measured, f"the allocator of a {self.arm.device} keeps no peak")
        expected = self.resolved["prediction"]
        if isinstance(expected, dict):
            figures["predicted_step_ms"] = expected["step_ms"]
        else:
            skipped["predicted_step_ms"] = str(expected)
        return Numerics(figures, skipped=skipped)


@functools.lru_cache(maxsize=1)  # of the case under way
def control_of(arm: Sharded, world: int) -> tuple[steps.FirstStep, ...]:
    """What the first step without FP8 gives, by rank."""
    run = functools.partial(gang_of(world, arm.device).run, timeout_s=TIMEOUT_S)
    with entered(run, arm):
        return tuple(run(first_step))


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


def without_fp8(setup: Setup) -> Setup:
    """The control's set-up."""
    return replace(setup, recipe=None, compiled=False)


def slowest(by_rank: list[list[float]]) -> list[float]:
    """Longest time of any rank by step; [] where a rank has none."""
    return [] if not all(by_rank) else [max(times) for times in zip(*by_rank, strict=True)]


def mean_loss(first: Any) -> float:
    """Mean loss over ranks, whose batches are of equal size."""
    return sum(own.loss for own in first) / len(first)
