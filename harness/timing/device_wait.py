"""What is to be timed waits on the device until all of it is queued, so that a sample holds no launch gaps.

`HostReleased` is a kernel that reads a number in host memory until the host has raised it, as nvbench's blocking kernel
does (NVIDIA/nvbench, blocking_kernel.cu). It needs no assumption about clocks. It gives up after a time limit, so that
a host that waits for the device meanwhile (a copy, a full queue) is never stuck: such samples count as late.

`Sleep` spins for a number of cycles, at an assumed clock: for devices that the kernel cannot be built for.
"""

from __future__ import annotations

from typing import Any, Protocol

LIMIT_MS = 5.0  # least time limit; a pause of the host's interpreter is shorter
LIMIT_TIMES = 4  # of the planned time, where that is longer


class Hold(Protocol):
    """Keeps the device from what is queued behind it.

    Attributes:
        name: what it is, for the row.
    """

    name: str

    def hold(self, planned_ms: float) -> None:
        """What is queued on the current stream from now on waits; `planned_ms`: for how long, as far as is known."""
        ...

    def release(self) -> None:
        """All is queued."""
        ...


class Sleep:
    """`torch.cuda._sleep`, which counts cycles of a multiprocessor.

    Args:
        cuda: the module that has it.
        why: why it takes the place of `HostReleased`; "" where nobody asked for that one.
    """

    # 2 GHz is the boost clock of current parts; a slower clock holds for longer.
    cycles_per_ms = 2_000_000

    def __init__(self, cuda: Any, why: str = "") -> None:
        self._cuda = cuda
        self.name = "sleep of an assumed clock" + (f" ({why})" if why else "")

    def hold(self, planned_ms: float) -> None:
        self._cuda._sleep(int(planned_ms * self.cycles_per_ms))

    def release(self) -> None:
        """It ends by itself."""


class HostReleased:
    """A Triton kernel of one program that waits for a number in pinned host memory.

    Each hold waits for a number of its own, one higher than the last: nothing is reset, so the host may queue the next
    hold while the device is still at work behind the one before.

    Args:
        kernel: `harness.timing.wait_kernel.wait_for_host`, subscripted by its grid; replaced in tests.
        flag: int32 [1] in host memory that the device reads.
        synchronize: waits for the device.

    Raises:
        Exception: building or launching the kernel failed; it is tried here, before a sample depends on it.
    """

    name = "kernel released by the host"

    def __init__(self, kernel: Any, flag: Any, synchronize: Any) -> None:
        self._kernel, self._flag = kernel, flag
        self._number = flag.numpy()
        self._turn = int(self._number[0])
        self._launch(LIMIT_MS)  # released already
        synchronize()

    def hold(self, planned_ms: float) -> None:
        self._turn += 1
        self._launch(max(LIMIT_MS, LIMIT_TIMES * planned_ms))

    def release(self) -> None:
        self._number[0] = self._turn

    def _launch(self, limit_ms: float) -> None:
        self._kernel[(1,)](self._flag, self._turn, int(1e3 * limit_ms), num_warps=1)


def hold_for(cuda: Any) -> Hold:
    """`HostReleased` on the current device; `Sleep` with the reason where that cannot be had."""
    try:
        import torch

        if torch.version.hip is not None:
            return Sleep(cuda, "ROCm has no %globaltimer")
        from harness.timing.wait_kernel import wait_for_host

        flag = torch.zeros(1, dtype=torch.int32).pin_memory()
        return HostReleased(wait_for_host, flag, cuda.synchronize)
    except Exception as error:  # noqa: BLE001 - no Triton, no compiler, no pinned memory: any of them leaves the sleep
        return Sleep(cuda, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}")
