"""Joules of a step by arm: from whole blocks that are long enough for the counter of the board."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from harness.machine.gpu_monitor import monitor_for
from harness.timing.session import METERED_S

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from harness.machine.gpu_monitor import Monitor


class Meter:
    """Reads the energy counter of a GPU's board around blocks.

    The counter moves some ten times a second, so only blocks of `METERED_S` and more are read; how long they are is known
    once the first round is over. A reading waits for the device, once before a block's first timed step and once after its
    last one, in all arms alike.

    Args:
        device: of the model; one that is no GPU has no counter.
        monitor: to ask instead of NVML.
        now: seconds, of a clock of the host.

    Attributes:
        why_not: why nothing is measured; "" while blocks are.
    """

    def __init__(
        self, device: torch.device, monitor: Any = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now, self._monitor = now, monitor
        self.why_not = "no round was whole"
        if monitor is None and device.type != "cuda":
            self.why_not = f"a {device.type} has no counter here"
            return
        self._opened: Any = monitor_for(str(device)) if monitor is None else monitor
        self._monitor = self._opened.__enter__()

    @property
    def reads(self) -> bool:
        """Whether blocks are long enough."""
        return not self.why_not

    def judge(self, block_s: float, block: int) -> None:
        """Decides whether the next blocks are read.

        Args:
            block_s: how long the shortest block of the last round took.
            block: timed steps of a block.
        """
        if self._monitor is None:
            return
        if self._monitor.energy_j() is None:
            self.why_not = "the counter of the board's energy cannot be read here"
        elif block_s < METERED_S:
            enough = int(block * METERED_S / block_s) + 1 if block_s > 0 else 0
            self.why_not = (
                f"a block lasts {1e3 * block_s:.0f} ms, and the counter moves every ~100 ms: {METERED_S:g} s are needed"
                + (f", which block={enough} gives" if enough else "")
            )
        else:
            self.why_not = ""

    def read(self) -> float | None:
        """Joules since some fixed time; None where they cannot be read."""
        monitor: Monitor = self._monitor
        return monitor.energy_j()

    def close(self) -> None:
        """Lets NVML go."""
        if self._monitor is not None:
            self._opened.__exit__(None, None, None)
            self._monitor = None
