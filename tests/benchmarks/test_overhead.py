"""Speed bars of the harness itself; run by `make bench`, never by `make test`.

Bar: a sweep of 1,000 trivial cases spends under 10 ms a case outside the timed region, storing included,
compiling excluded. The timed region is what the timer itself accounts for, so everything else is overhead.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy import ToySuite

from harness import store
from harness.executor import Executor
from harness.plan import make_plan
from harness.timing import TimingConfig, timer_for

pytestmark = pytest.mark.benchmark_bar

CASES = 1000
BAR_MS = 10.0
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


def test_a_thousand_trivial_cases(benchmark: Any, tmp_path: Path) -> None:
    config = {
        "name": "toy", "suite": "toy", "axes": {"n": list(range(1, CASES + 1))}, "shapes": [], "arms": [],
        "parts": {}, "model": None, "seed": 0, "device": "cpu",
    }  # fmt: skip
    plan = make_plan(config, {"toy": ToySuite()})
    timer = CountingTimer()
    executor = Executor(device="cpu", timer=timer, timing=TIMING)

    def sweep() -> None:
        writer = store.RunWriter(tmp_path / "r", run_id="r", sweep="toy", env_id="e", env={}, about={})
        outcome = executor.run(plan, writer)
        writer.close(outcome.state)

    benchmark.pedantic(sweep, rounds=1, iterations=1)
    assert store.read(tmp_path)["case_id"].nunique() == CASES
    overhead_ms = (benchmark.stats.stats.total - timer.seconds) / CASES * 1e3
    benchmark.extra_info["overhead_ms_per_case"] = overhead_ms
    print(f"\noverhead outside the timed region: {overhead_ms:.2f} ms a case (bar {BAR_MS:g} ms)")
    assert overhead_ms < BAR_MS


@pytest.mark.parametrize("words", [["--help"], ["report", "--help"]])
def test_commands_that_need_no_torch_start_quickly(benchmark: Callable[..., Any], words: list[str]) -> None:
    def start() -> None:
        subprocess.run([sys.executable, "-m", "harness", *words], check=True, capture_output=True)

    benchmark(start)
