"""Speed bars of the harness itself; run by `make bench`, never by `make test`.

Bars: a sweep of 1,000 trivial cases spends under 10 ms a case outside the timed region, storing included, compiling
excluded; under 25 ms a case in all where a worker process measures, its start included. The timed region is what the timer
itself accounts for, so everything else is overhead. A sweep of 10,000 cases takes no more memory at its end than at its
beginning, and 100,000 rows are read in under 2 s.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy import ToySuite

from harness import store
from harness.engine.executor import Executor, Place
from harness.engine.plan import Plan, PlannedCase, make_plan
from harness.engine.workers import Conditions
from harness.store.measurement import Measurement
from harness.timing.rounds import TimingConfig, timer_for

pytestmark = pytest.mark.benchmark_bar

CASES = 1000
BAR_MS = 10.0
WORKER_BAR_MS = 25.0
READ_BAR_S = 2.0
GROWTH_MIB = 32.0  # what the allocators of two processes may wander by
TIMING = TimingConfig(
    min_rounds=8, max_rounds=8, min_samples=1, min_seconds=0.0, block_ms=0.1,
    warmup_min_iterations=1, warmup_min_seconds=0.0, warmup_max_seconds=0.1,
)  # fmt: skip


class CountingTimer:
    """Times as the CPU timer does and adds up the seconds spent inside of it."""

    def __init__(self) -> None:
        self.inner, self.seconds = timer_for("cpu"), 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:
            import time

            started = time.perf_counter()
            try:
                return found(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return counted


def toy_plan(cases: int) -> Plan:
    config = {
        "name": "toy", "suite": "toy", "axes": {"n": list(range(1, cases + 1))}, "shapes": [], "arms": [],
        "parts": {}, "model": None, "seed": 0, "device": "cpu",
    }  # fmt: skip
    return make_plan(config, {"toy": ToySuite()})


def writer(folder: Path) -> store.RunWriter:
    return store.RunWriter(folder, run_id="r", sweep="toy", env_id="e", env={}, about={})


def test_a_thousand_trivial_cases(benchmark: Any, tmp_path: Path) -> None:
    plan = toy_plan(CASES)
    timer = CountingTimer()
    executor = Executor(device="cpu", timer=timer, timing=TIMING)

    def sweep() -> None:
        into = writer(tmp_path / "r")
        outcome = executor.run(plan, into)
        into.close(outcome.state)

    benchmark.pedantic(sweep, rounds=1, iterations=1)
    assert store.read(tmp_path)["case_id"].nunique() == CASES
    overhead_ms = (benchmark.stats.stats.total - timer.seconds) / CASES * 1e3
    benchmark.extra_info["overhead_ms_per_case"] = overhead_ms
    print(f"\noverhead outside the timed region: {overhead_ms:.2f} ms a case (bar {BAR_MS:g} ms)")
    assert overhead_ms < BAR_MS


def test_a_thousand_trivial_cases_in_a_worker(benchmark: Any, tmp_path: Path) -> None:
    """All of it: starting the server and the worker, timing (some 0.1 ms a case), sending, storing."""
    plan = toy_plan(CASES)
    executor = Executor(device="cpu", timing=TIMING, places=[Place(Conditions.here())])

    def sweep() -> None:
        into = writer(tmp_path / "r")
        outcome = executor.run(plan, into)
        into.close(outcome.state)

    benchmark.pedantic(sweep, rounds=1, iterations=1)
    frame = store.read(tmp_path)
    assert frame["case_id"].nunique() == CASES
    assert set(frame["status"]) == {"ok"}
    each_ms = benchmark.stats.stats.total / CASES * 1e3
    benchmark.extra_info["ms_per_case"] = each_ms
    print(f"\nin a worker: {each_ms:.2f} ms a case in all (bar {WORKER_BAR_MS:g} ms)")
    assert each_ms < WORKER_BAR_MS


def test_ten_thousand_cases_take_no_more_memory_than_one_thousand(tmp_path: Path) -> None:
    """Resident memory of this process and of the worker, every 1,000 cases."""
    me, seen = psutil.Process(), []

    def on_case(planned: PlannedCase) -> None:
        n = planned.case.integer("n")
        if n % 1000 == 0:
            server = psutil.Process(forkserver._forkserver._forkserver_pid)
            worker = [c.memory_info().rss for c in server.children() if c.status() != psutil.STATUS_ZOMBIE]
            seen.append((me.memory_info().rss / 2**20, sum(worker) / 2**20))

    executor = Executor(device="cpu", timing=TIMING, places=[Place(Conditions.here())], on_case=on_case)
    into = writer(tmp_path / "r")
    outcome = executor.run(toy_plan(10_000), into)
    into.close(outcome.state)
    seen.append((me.memory_info().rss / 2**20, 0.0))
    print("\nMiB of the sweep and its worker: " + ", ".join(f"{a:.0f} {b:.0f}" for a, b in seen))
    assert outcome.statuses.total() == 50_000  # five rows a case
    sweep, worker = zip(*seen, strict=True)
    assert max(sweep) - sweep[0] < GROWTH_MIB
    assert max(worker) - worker[0] < GROWTH_MIB


def test_a_hundred_thousand_rows_are_read_in_two_seconds(benchmark: Any, tmp_path: Path) -> None:
    """Rows of 200 runs: 500 rows each, 20 samples a row."""
    samples = tuple(float(i) for i in range(20))
    for run in range(200):
        into = store.RunWriter(
            tmp_path / f"r{run}", run_id=f"r{run}", sweep="toy", env_id="e", env={"torch": "2.13"}, about={}
        )
        into.append(
            Measurement(
                "toy", f"{run}-{i}", "base", f'{{"n":{i}}}', "time_ms", "ok", samples=samples,
                rounds=tuple(range(20)), resolved={"backend": "reference"}, timing={"method": "perf_counter"},
            )
            for i in range(500)
        )  # fmt: skip
        into.close("finished")
    frame = benchmark.pedantic(store.read, args=(tmp_path,), rounds=3, iterations=1)
    assert len(frame) == 100_000
    assert benchmark.stats.stats.min < READ_BAR_S


@pytest.mark.parametrize("words", [["--help"], ["report", "--help"]])
def test_commands_that_need_no_torch_start_quickly(benchmark: Callable[..., Any], words: list[str]) -> None:
    def start() -> None:
        subprocess.run([sys.executable, "-m", "harness", *words], check=True, capture_output=True)

    benchmark(start)
