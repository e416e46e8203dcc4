"""Speed bar of the gate; run by `make bench`, never by `make test`.

Bar: 10,000 cases of 20 rounds a side, read from the store and judged, in under 5 s, in a process that never imports
torch. Half of them regressed, since a unit within its tolerance is judged in a moment. The bar is on the CPU time of the
process: it runs in one thread, so that is its time on a machine that does nothing else.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import store
from harness.store.case import Case
from harness.store.measurement import Measurement

pytestmark = pytest.mark.benchmark_bar

CASES, ROUNDS = 10_000, 20
BAR_S = 5.0
JUDGE = """
import sys, time
from pathlib import Path
from harness.gate.judge import judge
from harness.gate.policy import load_policy
from harness.gate.sides import load_side
sides = [load_side(Path(sys.argv[1]) / name, name, "") for name in ("baseline", "candidate")]
found = judge(*sides, load_policy())
print(time.process_time())
assert len(found.findings) == int(sys.argv[2]), len(found.findings)
assert len(found.to_confirm) > 0.4 * len(found.findings)
assert "torch" not in sys.modules
"""


def write_side(folder: Path, slow: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    writer = store.RunWriter(
        folder,
        run_id=folder.name,
        sweep="gate",
        env_id="e",
        env={},
        about={"gate": {"session": "S", "stage": 1}},
    )
    cases = [Case.of("gemm", {"M": n}) for n in range(CASES)]
    writer.append(
        Measurement(
            suite="gemm", case_id=case.case_id, arm="fp8", axes=case.axes_json, metric="time_ms", status="ok",
            regime="isolated", rounds=tuple(range(ROUNDS)),
            samples=tuple(np.exp((slow if n % 2 else 0.0) + 0.01 * random.standard_normal(ROUNDS))),
        )
        for n, case in enumerate(cases)
    )  # fmt: skip
    writer.close("finished")


def test_ten_thousand_cases(benchmark: Callable[..., Any], tmp_path: Path) -> None:
    write_side(tmp_path / "baseline", 0.0, 0)
    write_side(tmp_path / "candidate", 0.1, 1)
    seconds: list[float] = []

    def judge() -> None:
        command = [sys.executable, "-c", JUDGE, str(tmp_path), str(CASES)]
        seconds.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))

    benchmark.pedantic(judge, rounds=3, iterations=1)
    print(f"\n{CASES} cases x {ROUNDS} rounds judged in {min(seconds):.2f} s (bar {BAR_S:g} s)")
    assert min(seconds) < BAR_S
