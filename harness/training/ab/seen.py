"""What is seen of the loop's own steps: shapes of batches, losses, compilations, and the marks of a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.timing.compiling import CompileWatch
from harness.training.models.calls import numbers_in

if TYPE_CHECKING:
    from harness.timing.clock import Clock
    from harness.training.ab.energy import Meter


@dataclass(frozen=True, slots=True)
class Extent:
    """What a step trained on; equal for steps whose times may be compared.

    Attributes:
        calls: forward passes of the model that were seen.
        shapes: of all tensors that they took, or of the batch that `Trial.step` was told.
        updates: steps of optimizers.
    """

    calls: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    updates: int = 0

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes[:4])
        return f"{self.calls} forward passes of {shapes or 'shapes unseen'}, {self.updates} optimizer steps"


class Looks:
    """Watches calls of the model, where it is not compiled from outside, and steps of optimizers, while a step is open.

    Attributes:
        loss: of the step's last forward pass, or what `Trial.loss` was told; None where nothing was seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.loss: Tensor | float | None = None
        self._open = self._told = False
        self._calls = self._updates = 0
        self._shapes: tuple[tuple[int, ...], ...] = ()
        # A hook inside compiled code would be traced with it; one on the wrapper of torch.compile runs outside.
        is_compiled_inside = getattr(model, "_compiled_call_impl", None) is not None
        hook = None if is_compiled_inside else model.register_forward_hook(self._seen, with_kwargs=True)
        self._hooks: list[Any] = [register_optimizer_step_post_hook(self._updated)]
        self._hooks += [] if hook is None else [hook]

    def start(self, batch: object) -> None:
        """A step begins; `batch` is what it will train on, None where that is not told."""
        self._shapes, self._told = (), False
        self._calls = self._updates = 0
        self.loss, self._open = None, True
        if batch is not None:
            self.add(batch)

    def add(self, batch: object) -> None:
        """One more part of what the step trains on; what the model is called with is then not asked."""
        self._shapes, self._told = (self._shapes if self._told else ()) + _shapes(batch), True

    def end(self) -> Extent:
        """The step has ended: what it trained on."""
        self._open = False
        return Extent(self._calls, self._shapes, self._updates)

    def _seen(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # First: where the model is compiled by its caller this is traced, and must then guard on nothing
        if torch.compiler.is_compiling() or not self._open:
            return
        self._calls += 1
        if not self._told:
            self._shapes += _shapes((args, kwargs))
        numbers = list(numbers_in(output, (*args, *kwargs.values())).values())
        if len(numbers) == 1 and (numbers[0].requires_grad or not torch.is_grad_enabled()):
            self.loss = numbers[0].detach()

    def _updated(self, *_: Any) -> None:
        self._updates += self._open

    def close(self) -> None:
        """Leaves the model and the optimizers alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class Block:
    """Steps of one arm after a switch; each must train on as much as the step that was proved.

    Attributes:
        fault: why it counts for nothing; "" while it does.
        peak_bytes: most memory of its timed steps; 0 where the device keeps none.
        joules: of one of its timed steps; None where they were not read.

    Args:
        device: of the model.
        expected: of each step.
        steps: that will be timed.
        meter: that is read around them.
    """

    def __init__(self, device: torch.device, expected: Extent, steps: int, meter: Meter) -> None:
        self.fault, self.peak_bytes, self._expected = "", 0, expected
        self._device = device
        self._marks: list[tuple[Any, Any]] = []
        self._before: list[Any] = []  # end of the step before each timed one
        self._last: Any = None
        self._losses: list[Tensor | float | None] = []
        self._compiled: CompileWatch | None = None
        self.joules: float | None = None
        self._steps, self._meter = steps, meter
        self._before_j: float | None = None

    def begin(self, clock: Clock) -> None:
        """A timed step begins."""
        if self._compiled is None:
            if self._meter.reads:
                clock.settle()
                self._before_j = self._meter.read()
            self._compiled = CompileWatch()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)

    def close(self, clock: Clock) -> None:
        """Reads the meter, if the last timed step has just ended."""
        if self._before_j is not None and len(self._marks) == self._steps:
            clock.settle()
            after = self._meter.read()
            self.joules = None if after is None else (after - self._before_j) / self._steps
            self._before_j = None

    def add(
        self, start: Any, end: Any, extent: Extent, loss: Tensor | float | None, *, is_timed: bool, fault: str
    ) -> None:
        """A step has ended."""
        self.fault = self.fault or fault
        if is_timed:
            self._marks.append((start, end))
            if self._last is not None:
                self._before.append((self._last, start))
            self._losses.append(loss)
            compiled = self._compiled.steady_fault() if self._compiled is not None else ""
            self.fault = self.fault or compiled
            if self._device.type == "cuda":
                self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self._device))
            if extent != self._expected:
                self.fault = self.fault or f"a step of {extent}, where the proved one had {self._expected}"
        self._last = end

    def forget_end(self) -> None:
        """The time that follows the last step is not the loop's: a profiler was closed in it."""
        self._last = None

    def times_ms(self, clock: Clock) -> list[float]:
        """Times of the timed steps."""
        return [clock.ms(start, end) for start, end in self._marks]

    def lasted_s(self, clock: Clock) -> float:
        """From the start of the first timed step to the end of the last one; 0 without any."""
        return 1e-3 * clock.ms(self._marks[0][0], self._marks[-1][1]) if self._marks else 0.0

    def gaps_ms(self, clock: Clock) -> list[float]:
        """Time between steps, before each timed step that follows another of the block."""
        return [clock.ms(start, end) for start, end in self._before]

    def loss_values(self) -> list[float]:
        """Losses of the timed steps; empty where one was not seen."""
        if any(loss is None for loss in self._losses):
            return []
        return [float(loss) for loss in self._losses if loss is not None]


def told(blocks: Mapping[str, Block], clock: Clock) -> dict[str, Any]:
    """What a rank tells the others of a round: JSON values by arm."""
    return {
        "times_ms": {arm: block.times_ms(clock) for arm, block in blocks.items()},
        "gaps_ms": {arm: block.gaps_ms(clock) for arm, block in blocks.items()},
        "losses": {arm: block.loss_values() for arm, block in blocks.items()},
        "faults": {arm: block.fault for arm, block in blocks.items() if block.fault},
        "peaks": {arm: block.peak_bytes for arm, block in blocks.items() if block.peak_bytes},
        "joules": {arm: block.joules for arm, block in blocks.items() if block.joules is not None},
    }


def _shapes(value: object) -> tuple[tuple[int, ...], ...]:
    """Shapes of all tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        return (tuple(value.shape),)
    if isinstance(value, Mapping):
        return tuple(shape for key in value for shape in _shapes(value[key]))
    if isinstance(value, list | tuple):
        return tuple(shape for each in value for shape in _shapes(each))
    return ()
