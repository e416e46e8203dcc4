"""When a step began and ended, on the clock of the device that computes it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks points in time; two marks give a duration once `settle` has been called after both.

    Attributes:
        method: how time is read; ratios of two methods mean nothing.
    """

    method: str

    def mark(self) -> Any:
        """A point in time; costs microseconds and never waits."""
        ...

    def settle(self) -> None:
        """Waits until all marks are reached; called between rounds alone."""
        ...

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to the other."""
        ...


class HostClock:
    """`time.perf_counter`, for a device whose work is done when a call returns."""

    method = "perf_counter_adjoining"

    def mark(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is in flight."""

    def ms(self, start: float, end: float) -> float:
        """Milliseconds between two marks."""
        return 1e3 * (end - start)


class EventClock:
    """CUDA events on the device's current stream: its own time, gaps of launches within a step included.

    Args:
        cuda: the module that offers `Event`, `current_stream` and `synchronize`; `torch.cuda` by default.
        device: of the model; None: the current one.
    """

    method = "cuda_events_adjoining"

    def __init__(self, cuda: Any = None, device: torch.device | None = None) -> None:
        self._cuda, self._device = cuda if cuda is not None else torch.cuda, device

    def mark(self) -> Any:
        """An event that the device records when it comes to it."""
        event = self._cuda.Event(enable_timing=True)
        if self._device is None:
            event.record()
        else:
            event.record(self._cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Waits for the device."""
        if self._device is None:
            self._cuda.synchronize()
        else:
            self._cuda.synchronize(self._device)

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two events."""
        return float(start.elapsed_time(end))


def clock_for(device: torch.device) -> Clock:
    """The clock of a model's device."""
    return EventClock(device=device) if device.type == "cuda" else HostClock()
