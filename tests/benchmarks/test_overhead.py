"""Speed bars of the harness itself; run by `make bench`, never by `make test`.

Bars: a sweep of 1,000 trivial cases spends under 10 ms a case outside the timed region, storing included, compiling
excluded; under 25 ms a case in all where a worker process measures, its start included. The timed region is what the timer
itself accounts for, so everything else is overhead. A sweep of 10,000 cases takes no more memory at its end than at its
beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy import ToySuite, as_module

from harness import store
from harness.engine import arm_process
from harness.engine.arm_process import Conditions
from harness.engine.bench import Setting
from harness.engine.executor import Place, run
from harness.engine.plan import SweepPlan, Task, make_plan
from harness.engine.settings import SweepConfig
from harness.engine.stages import Mark
from harness.timing.config import TimingConfig
from harness.timing.timers import CpuTimer

pytestmark = pytest.mark.benchmark_bar

CASES = 1000
BAR_MS = 10.0
WORKER_BAR_MS = 25.0
GROWTH_MIB = 32.0  # what the allocators of two processes may wander by
TIMING = TimingConfig(
    min_rounds=8, max_rounds=8, min_samples=1, min_seconds=0.0, block_ms=0.1,
    warmup_min_iterations=1, warmup_min_seconds=0.0, warmup_max_seconds=0.1,
)  # fmt: skip


class CountingTimer(CpuTimer):
    """Adds up the seconds that samples take."""

    seconds = 0.0

    def block(self, *args: Any, **how: Any) -> list[float]:
        return self._counted(super().block, *args, **how)

    def back_to_back(self, *args: Any, **how: Any) -> list[float]:
        return self._counted(super().back_to_back, *args, **how)

    def _counted(self, take: Callable[..., list[float]], *args: Any, **how: Any) -> list[float]:
        started = time.perf_counter()
        samples = take(*args, **how)
        self.seconds += time.perf_counter() - started
        return samples


def toy_plan(cases: int) -> SweepPlan:
    config: dict[str, Any] = {
        "name": "toy", "suite": "toy", "axes": {"n": list(range(1, cases + 1))}, "shapes": [], "arms": [],
        "parts": {}, "model": None, "seed": 0, "device": "cpu",
    }  # fmt: skip
    return make_plan(SweepConfig.of(config), {"toy": as_module(ToySuite())})


def writer(folder: Path) -> store.RunWriter:
    return store.RunWriter(folder, run_id="r", sweep="toy", env_id="e", env={}, about={})


@pytest.mark.parametrize(("in_worker", "bar_ms"), [(False, BAR_MS), (True, WORKER_BAR_MS)])
def test_a_thousand_trivial_cases(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_worker: bool, bar_ms: float
) -> None:
    """In a worker all of it counts: starting the server and the worker, timing (some 0.1 ms a case), sending, storing."""
    plan, timer = toy_plan(CASES), CountingTimer()
    places = [Place(Conditions.here())] if in_worker else []
    monkeypatch.setattr(arm_process, "device_timer", lambda device: timer)

    def sweep() -> None:
        into = writer(tmp_path / "r")
        outcome = run(plan, into, Setting("cpu", TIMING), places=places)
        into.close(outcome.state)

    benchmark.pedantic(sweep, rounds=1, iterations=1)
    frame = store.read(tmp_path)
    assert frame["case_id"].nunique() == CASES
    assert set(frame["status"]) == {"ok"}
    overhead_ms = (benchmark.stats.stats.total - timer.seconds) / CASES * 1e3
    benchmark.extra_info["overhead_ms_per_case"] = overhead_ms
    print(f"\n{overhead_ms:.2f} ms a case outside of the timer (bar {bar_ms:g} ms)")
    assert overhead_ms < bar_ms


def test_ten_thousand_cases_take_no_more_memory_than_one_thousand(tmp_path: Path) -> None:
    """Resident memory of this process and of the worker, every 1,000 cases."""
    me, seen = psutil.Process(), []

    def on_case(task: Task | None, what: object) -> None:
        if task is not None and what is Mark.BEGUN and task.case.integer("n") % 1000 == 0:
            server = psutil.Process(forkserver._forkserver._forkserver_pid)
            worker = [c.memory_info().rss for c in server.children() if c.status() != psutil.STATUS_ZOMBIE]
            seen.append((me.memory_info().rss / 2**20, sum(worker) / 2**20))

    into = writer(tmp_path / "r")
    places = [Place(Conditions.here())]
    outcome = run(toy_plan(10_000), into, Setting("cpu", TIMING), places=places, notify=on_case)
    into.close(outcome.state)
    seen.append((me.memory_info().rss / 2**20, 0.0))
    print("\nMiB of the sweep and its worker: " + ", ".join(f"{a:.0f} {b:.0f}" for a, b in seen))
    assert outcome.statuses.total() == 50_000  # five rows a case
    sweep, worker = zip(*seen, strict=True)
    assert max(sweep) - sweep[0] < GROWTH_MIB
    assert max(worker) - worker[0] < GROWTH_MIB
