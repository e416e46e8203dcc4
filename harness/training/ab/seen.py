"""What is seen of the loop's own steps: shapes of batches, losses, compilations, and the marks of a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.timing.compiling import CompileWatch

if TYPE_CHECKING:
    from harness.training.ab.clock import Clock


class Looks:
    """Watches calls of the model, where it is not compiled as a whole: shapes of its inputs and its loss.

    Attributes:
        shapes: of all tensors that the step's forward passes took; () where nothing was seen.
        loss: of the step's last forward pass, or what `Trial.loss` was told; None where nothing was seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.shapes: tuple[tuple[int, ...], ...] = ()
        self.loss: Tensor | float | None = None
        # A hook inside compiled code would be traced with it; one on the wrapper of torch.compile runs outside.
        is_compiled_inside = getattr(model, "_compiled_call_impl", None) is not None
        self._hook = None if is_compiled_inside else model.register_forward_hook(self._seen, with_kwargs=True)

    def start(self, batch: object) -> None:
        """A step begins; `batch` is what it will train on, None where that is not told."""
        self.shapes = _shapes(batch) if batch is not None else ()
        self._told = batch is not None
        self.loss = None

    def _seen(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._told:
            self.shapes += _shapes((args, kwargs))
        loss = _loss_in(output)
        if loss is not None:
            self.loss = loss.detach()

    def close(self) -> None:
        """Leaves the model alone."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class Block:
    """Steps of one arm after a switch.

    Attributes:
        fault: why it counts for nothing; "" while it does.
        peak_bytes: most memory of its timed steps; 0 where the device keeps none.
    """

    def __init__(self, device: torch.device) -> None:
        self.fault, self.peak_bytes = "", 0
        self._device = device
        self._marks: list[tuple[Any, Any]] = []
        self._before: list[Any] = []  # end of the step before each timed one
        self._last: Any = None
        self._losses: list[Tensor | float | None] = []
        self._compiled: CompileWatch | None = None
        self.shapes: tuple[tuple[int, ...], ...] | None = None

    def begin(self) -> None:
        """A timed step begins."""
        if self._compiled is None:
            self._compiled = CompileWatch()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)

    def add(self, start: Any, end: Any, looks: Looks, *, is_timed: bool, fault: str) -> None:
        """A step has ended."""
        self.fault = self.fault or fault
        if is_timed:
            self._marks.append((start, end))
            if self._last is not None:
                self._before.append((self._last, start))
            self._losses.append(looks.loss)
            compiled = self._compiled.steady_fault() if self._compiled is not None else ""
            self.fault = self.fault or compiled
            if self._device.type == "cuda":
                self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self._device))
            if self.shapes is None:
                self.shapes = looks.shapes
            elif looks.shapes != self.shapes:
                self.fault = (
                    self.fault
                    or f"batches of other shapes: {_words(self.shapes)}, then {_words(looks.shapes)}"
                )
        self._last = end

    def times_ms(self, clock: Clock) -> list[float]:
        """Times of the timed steps."""
        return [clock.ms(start, end) for start, end in self._marks]

    def gaps_ms(self, clock: Clock) -> list[float]:
        """Time between steps, before each timed step that follows another of the block."""
        return [clock.ms(start, end) for start, end in self._before]

    def loss_values(self) -> list[float]:
        """Losses of the timed steps; empty where one was not seen."""
        if any(loss is None for loss in self._losses):
            return []
        return [float(loss) for loss in self._losses if loss is not None]


def _shapes(value: object) -> tuple[tuple[int, ...], ...]:
    """Shapes of all tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        return (tuple(value.shape),)
    if isinstance(value, Mapping):
        return tuple(shape for key in value for shape in _shapes(value[key]))
    if isinstance(value, list | tuple):
        return tuple(shape for each in value for shape in _shapes(each))
    return ()


def _loss_in(output: Any) -> Tensor | None:
    """The loss that a forward pass returned: a scalar, `output.loss`, or a scalar among a tuple's parts."""
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    parts = output if isinstance(output, tuple) else (output,)
    candidates = [found] if found is not None else [p for p in parts if isinstance(p, Tensor)]
    scalars = [p for p in candidates if isinstance(p, Tensor) and p.numel() == 1 and p.is_floating_point()]
    return scalars[0] if len(scalars) == 1 else None


def _words(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[:4]) or "none"
