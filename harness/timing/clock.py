"""The one way to time whole steps: marks on the clock of the device that computes them, one between two steps.

A sweep's blocks of steps (`Timer.back_to_back`), those of ranks (`harness.training.parallel.ranked`) and those of a trial
in a user's loop (`harness.ab`) are read by these marks, so their times compare.
"""

from __future__ import annotations

import gc
import itertools
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
        """Waits until all marks are reached; never within a block."""
        ...

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to the other."""
        ...


class HostClock:
    """`time.perf_counter`, for a device whose work is done when a call returns.

    Args:
        now: seconds, monotonic.
    """

    method = "perf_counter_adjoining"

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        """Seconds."""
        return self._now()

    def settle(self) -> None:
        """Nothing is in flight."""

    def ms(self, start: float, end: float) -> float:
        """Milliseconds between two marks."""
        return 1e3 * (end - start)


class EventClock:
    """CUDA events on the device's current stream: its own time, gaps of launches within a step included.

    Args:
        cuda: the module that offers `Event`, `current_stream` and `synchronize`; `torch.cuda` by default.
        device: whose stream, a `torch.device`; None: the current one.
    """

    method = "cuda_events_adjoining"

    def __init__(self, cuda: Any = None, device: Any = None) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._cuda, self._device = cuda, device

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


def clock_for(device: Any) -> Clock:
    """The clock of a `torch.device`."""
    return EventClock(device=device) if device.type == "cuda" else HostClock()


class Split:
    """A point inside of a timed closure, and what each sample of the last block took up to it.

    The closure calls it once a call, of samples of one call each.

    Attributes:
        samples_ms: one for each sample, unless the closure did not come by.
    """

    def __init__(self) -> None:
        self.samples_ms: list[float] = []
        self._mark: Callable[[], object] | None = None

    def __call__(self) -> None:
        """The closure is at this point."""
        if self._mark is not None:
            self._mark()

    @contextmanager
    def marked_by(self, mark: Callable[[], object]) -> Iterator[None]:
        """Inside, `mark` is called at the point."""
        self.samples_ms, self._mark = [], mark
        try:
            yield
        finally:
            self._mark = None


def adjoining(
    clock: Clock,
    fn: Callable[[], object],
    n: int,
    calls: int = 1,
    probe: Callable[[], None] | None = None,
    split: Split | None = None,
) -> list[float]:
    """Time n samples of which one begins where the last one ended; nothing is flushed, launch gaps count.

    Args:
        clock: of the device.
        fn: what is timed.
        n: samples.
        calls: of each sample.
        probe: called once all work is queued.
        split: of samples of one call, whose `samples_ms` gets what each took up to its point.

    Returns:
        Milliseconds of a call, by sample.
    """
    middles: list[Any] = []
    marked = nullcontext() if split is None else split.marked_by(lambda: middles.append(clock.mark()))
    with gc_paused(), marked:
        marks = [clock.mark()]
        for _ in range(n):
            for _ in range(calls):
                fn()
            marks.append(clock.mark())
        if probe is not None:
            probe()
        clock.settle()
    if split is not None and len(middles) == n:
        split.samples_ms = list(map(clock.ms, marks, middles))
    return [clock.ms(start, end) / calls for start, end in itertools.pairwise(marks)]


@contextmanager
def gc_paused() -> Iterator[None]:
    """No cycle collection inside: it would strike single samples. Reference counting goes on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
