"""launch: how many programs of a persistent kernel are started."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8core.kernels import launch
from fp8core.kernels.occupancy import programs_per_processor

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared", "capability", "programs"),
    [
        (32, 8, 0, 90, 8),  # 2048 threads
        (33, 8, 0, 90, 6),  # 40 registers are allocated: 1280 a warp, 12 warps in a partition
        (255, 4, 0, 90, 2),
        (255, 16, 0, 90, 0),  # the file has no room for 16 such warps
        (16, 1, 0, 90, 32),  # the hardware's own limit
        (16, 1, 0, 89, 24),
        (32, 4, 75 * 1024, 90, 3),  # 228 KB, 1 KB of each is the system's
        (32, 4, 75 * 1024, 120, 1),
        (32, 8, 0, 103, 8),  # not listed: as sm_100
    ],
)
def test_occupancy(registers: int, num_warps: int, shared: int, capability: int, programs: int) -> None:
    """Oracle: NVIDIA's occupancy calculator, by hand from the CUDA guide's table of limits."""
    assert programs_per_processor(registers, num_warps, shared, capability) == programs


class Kernel:
    """What Triton's launcher offers; counts what is asked of it."""

    def __init__(self, registers: int, shared: int) -> None:
        self.fn = self
        self.compiled = SimpleNamespace(n_regs=None, metadata=SimpleNamespace(shared=shared))
        self.compiled._init_handles = lambda: setattr(self.compiled, "n_regs", registers)
        self.looked_at = 0
        self.grids: list[tuple[int, ...]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **keywords: Any) -> Any:
        self.looked_at += 1
        return self.compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **keywords: self.grids.append(grid)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "target_of", lambda device: launch.Target(90, 132, True, "H200"))
    monkeypatch.setattr(launch, "_AT_ONCE", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


@pytest.mark.usefixtures("hopper")
def test_as_many_programs_as_run_at_once() -> None:
    """Oracle: 132 SMs of a claimed H200 times the programs of each; fewer where there is less work. Looked at once for
    each kind of argument and constant."""
    kernel, x = Kernel(registers=44, shared=8192), torch.empty(16, dtype=torch.bfloat16)

    def start(work: int, *args: Any, block: int = 64) -> None:
        launch.launch(kernel, launch.walking(work), *args, device=CPU, num_warps=4, BLOCK=block)

    start(8192, x)
    start(1000, x)
    start(0, x)
    assert kernel.grids == [(1320,), (1000,)]
    assert kernel.looked_at == 1
    launch.launch(kernel, (4096, 2), device=CPU)  # an ordinary grid is left alone, and nothing looked at
    assert (kernel.grids[-1], kernel.looked_at) == ((4096, 2), 1)
    start(8192, x.float())
    start(8192, x, block=128)
    assert kernel.looked_at == 3


@pytest.mark.usefixtures("hopper")
def test_a_kernel_too_large_for_the_formula_still_starts() -> None:
    """The driver says so if it really does not fit; a grid of 0 would silently compute nothing."""
    kernel = Kernel(registers=255, shared=0)
    launch.launch(kernel, launch.walking(10**6), device=CPU, num_warps=16)
    assert kernel.grids == [(132,)]


def test_interpreter_walks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    kernel = Kernel(registers=1, shared=0)
    launch.launch(kernel, launch.walking(100), device=CPU)
    assert (kernel.grids, kernel.looked_at) == ([(12,)], 0)
