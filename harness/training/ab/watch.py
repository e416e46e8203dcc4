"""What is seen of the loop's own steps: shapes of batches, losses, compilations, marks and energy of a block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.machine.gpu_monitor import monitor_for
from harness.timing.compiling import CompileWatch
from harness.timing.session import METERED_S
from harness.training.models.calls import numbers_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.timing.clock import Clock
    from harness.training.ab.result import PlannedStep, TrialPlan

Shapes = tuple[tuple[int, ...], ...]
# What is seen of a step beside its arm and its fault; None where it is not, as times of a step that is not timed
SEEN = ("times_ms", "gaps_ms", "losses", "peak_bytes", "joules")


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step trained on; equal for steps whose times may be compared.

    Attributes:
        calls: forward passes of the model that were seen.
        shapes: of all tensors that they took, or of the batch that `Trial.step` was told.
        updates: steps of optimizers.
    """

    calls: int = 0
    shapes: Shapes = ()
    updates: int = 0

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes[:4])
        return f"{self.calls} forward passes of {shapes or 'shapes unseen'}, {self.updates} optimizer steps"

    def unseen(self, plan: TrialPlan) -> tuple[str, ...]:
        """What could not be watched in a trial whose steps train on this."""
        notes = {
            "shapes of batches were not seen: tell them by trial.step(batch)": not self.shapes,
            "no optimizer step was seen inside trial.step()": not self.updates,
            "time between steps was not seen: block=2 or more gives it": plan.block == 1 and not plan.lead,
        }
        return tuple(note for note, holds in notes.items() if holds)


class StepWatch:
    """Watches calls of the model, where it is not compiled from outside, and steps of optimizers, while a step is open.

    Attributes:
        loss: of the step's last forward pass, or what `Trial.loss` was told; None where nothing was seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.start(None)
        self._open = False
        self._hooks: list[Any] = [register_optimizer_step_post_hook(self._updated)]
        # A hook inside compiled code would be traced with it; one on the wrapper of torch.compile runs outside.
        if getattr(model, "_compiled_call_impl", None) is None:
            self._hooks.append(model.register_forward_hook(self._seen, with_kwargs=True))

    def start(self, batch: object) -> None:
        """A step begins; `batch` is what it will train on, None where that is not told."""
        self._calls = self._updates = 0
        self._passed: Shapes = ()  # to the model
        self._told: Shapes | None = None
        self.loss: Tensor | float | None = None
        self._open = True
        if batch is not None:
            self.add(batch)

    def add(self, batch: object) -> None:
        """One more part of what the step trains on; what the model is called with is then not asked."""
        if self._open:
            self._told = (*(self._told or ()), *_shapes(batch))

    def end(self) -> StepWork:
        """The step has ended: what it trained on."""
        self._open = False
        return StepWork(self._calls, self._passed if self._told is None else self._told, self._updates)

    def _seen(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # First: where the model is compiled by its caller this is traced, and must then guard on nothing
        if torch.compiler.is_compiling() or not self._open:
            return
        self._calls += 1
        self._passed += tuple(_shapes((args, kwargs)))
        numbers = list(numbers_in(output, (*args, *kwargs.values())).values())
        if len(numbers) == 1 and (numbers[0].requires_grad or not torch.is_grad_enabled()):
            self.loss = numbers[0].detach()

    def _updated(self, *_: Any) -> None:
        if self._open:
            self._updates += 1

    def close(self) -> None:
        """Leaves the model and the optimizers alone."""
        for hook in self._hooks:
            hook.remove()


class Meter:
    """Reads the energy counter of a GPU's board around blocks.

    The counter moves some ten times a second, so only blocks of `METERED_S` and more are read; how long they are is known
    once the first round is over. A reading waits for the device, once before a block's first timed step and once after its
    last one, in all arms alike.

    Args:
        device: of the model.
        monitor: to ask instead of NVML.

    Attributes:
        why_not: why nothing is measured; "" while blocks are.
    """

    def __init__(self, device: torch.device, monitor: Any = None) -> None:
        self._monitor = monitor or monitor_for(str(device))
        self._monitor.__enter__()
        self.why_not = "no round was whole"

    def judge(self, records: Sequence[Mapping[str, Any]], block: int) -> None:
        """Decides whether the next blocks are read.

        Args:
            records: of the steps of the last round (`RoundSteps.records`).
            block: timed steps of a block.
        """
        lasted: defaultdict[str, float] = defaultdict(float)
        for step in records:
            lasted[step["arm"]] += step["times_ms"] or 0.0
        shortest_s = 1e-3 * min(lasted.values())
        self.why_not = ""
        if self._monitor.energy_j() is None:
            self.why_not = "the counter of a board's energy cannot be read here"
        elif shortest_s < METERED_S:
            enough = int(block * METERED_S / shortest_s) + 1
            self.why_not = (
                f"the timed steps of a block take {1e3 * shortest_s:.0f} ms, and the counter moves every ~100 ms: "
                f"{METERED_S:g} s are needed, which block={enough} gives"
            )

    def read(self, clock: Clock) -> float | None:
        """Joules since some fixed time; None where they are not read."""
        if self.why_not:
            return None
        clock.settle()
        return self._monitor.energy_j()

    def close(self) -> None:
        """Lets NVML go."""
        self._monitor.__exit__(None, None, None)


class RoundSteps:
    """This rank's steps of the round under way. Each timed one must train on as much as the step that was proved.

    Attributes:
        expected: what each step trains on.
        seen: of each step what `SEEN` names, with marks in place of times.

    Args:
        device: of the model.
        clock: that gives the marks.
        meter: that is read around the timed steps of a block.
        expected: of the step that was proved.
        block: timed steps of each arm.
    """

    def __init__(
        self, device: torch.device, clock: Clock, meter: Meter, expected: StepWork, block: int
    ) -> None:
        self._device, self._clock, self._meter = device, clock, meter
        self.expected, self._block = expected, block
        self.seen: list[dict[str, Any]] = []
        self._before: tuple[str, Any] = ("", None)  # arm and end of the step before

    def begin_block(self) -> None:
        """The first timed step of a block begins."""
        self._joules, self._compiled, self._left = self._meter.read(self._clock), CompileWatch(), self._block
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def add(
        self,
        turn: PlannedStep,
        marks: tuple[Any, Any],
        extent: StepWork,
        loss: Tensor | float | None,
        fault: str,
    ) -> None:
        """A step has ended.

        Args:
            turn: what it was for.
            marks: of its start and its end.
            extent: what it trained on.
            loss: None where none was seen.
            fault: why it did not run in its precision.
        """
        start, end = marks
        step = dict.fromkeys(SEEN) | {"arm": turn.arm, "faults": fault}
        if turn.purpose == "timed":
            if extent != self.expected:
                fault = f"a step of {extent}, where the proved one had {self.expected}"
            step |= {"faults": step["faults"] or self._compiled.steady_fault() or fault, "losses": loss}
            step["times_ms"] = marks
            if self._before[0] == turn.arm:
                step["gaps_ms"] = self._before[1], start
            if self._device.type == "cuda":
                step["peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
            self._left -= 1
            if not self._left and self._joules is not None:
                after = self._meter.read(self._clock)
                step["joules"] = None if after is None else (after - self._joules) / self._block
        self.seen.append(step)
        self._before = turn.arm, end

    def records(self) -> list[dict[str, Any]]:
        """What this rank tells the others of the round that is over: of each step what `SEEN` names."""
        self._clock.settle()
        records, self.seen = self.seen, []
        self._before = ("", None)  # what ranks tell each other now is none of the loop's time either
        for step in records:
            for name in ("times_ms", "gaps_ms"):
                step[name] = step[name] and self._clock.ms(*step[name])
            step["losses"] = None if step["losses"] is None else float(step["losses"])
        return records


def _shapes(value: object) -> Iterator[tuple[int, ...]]:
    """Shapes of all tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        yield tuple(value.shape)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in parts:
        yield from _shapes(part)
