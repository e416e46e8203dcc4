"""Builds stored runs for the tests of compare and report: invented times, written through the real store.

`gpu_run` looks like a run on an H200 and `cpu_run` like one on a CPU; the numbers come from a formula and a seeded
generator. They exist only inside a test's temporary folder.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stored import row

from harness import store
from harness.store.errors import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pandas as pd

    from harness.store.case import Case
    from harness.store.measurement import Measurement

H200 = {
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "gpu_capability": "9.0",
    "gpu_memory_gib": 139.8,
    "hip": None,
    "torchao": None,
    "power_limit_w": 700.0,
    "driver": "570.124.06",
    "cuda": "12.8",
    "torch": "2.13.0+cu128",
    "triton": "3.7.1",
    "python": "3.11.7",
    "git_commit": "0123456789abcdef0123456789abcdef01234567",
    "git_dirty": False,
}
CPU = {
    "device": "cpu",
    "cpu": "AMD EPYC 7B13",
    "cpu_threads": 2,
    "torch": "2.13.0+cpu",
    "triton": None,
    "python": "3.11.7",
    "git_commit": "0123456789abcdef0123456789abcdef01234567",
    "git_dirty": True,
}
H100 = H200 | {"gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_gib": 79.2, "driver": "560.35.03"}
TIMING = {
    "method": "cuda_events",
    "l2": "cold",
    "stop_reason": "converged",
    "throttled": False,
    "contended": False,
}


@dataclass
class Invented:
    """Makes measurements with a fixed noise: `spread` is the relative sd of a round, drift is shared by the arms."""

    seed: int = 0
    rounds: int = 10
    samples: int = 4
    spread: float = 0.004
    clock_mhz: float | None = 1755.0
    timing: Mapping[str, object] = field(default_factory=lambda: dict(TIMING))

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def times(
        self, case: Case, arms: Mapping[str, Mapping[str, object]], regime: str = "isolated"
    ) -> list[Measurement]:
        """Time rows of the arms of a case. An arm is {ms, baseline, flops, bytes, resolved, rounds}."""
        drift = [self.random.gauss(0, 0.02) for _ in range(64)]
        rows = []
        for arm, about in arms.items():
            samples, rounds = [], []
            for r in range(int(str(about.get("rounds", self.rounds)))):
                level = float(str(about["ms"])) * math.exp(drift[r] + self.random.gauss(0, self.spread))
                samples += [level * math.exp(self.random.gauss(0, self.spread)) for _ in range(self.samples)]
                rounds += [r] * self.samples
            rows.append(
                row(
                    case,
                    arm,
                    samples,
                    baseline=str(about.get("baseline", "")),
                    regime=regime,
                    resolved=about.get("resolved", {}),
                    rounds=tuple(rounds),
                    sample_clock_mhz=(self.clock_mhz,) * len(samples) if self.clock_mhz else (),
                    flops=about.get("flops", {}),
                    bytes_moved=about.get("bytes"),
                    timing=self.timing,
                )
            )
        return rows


def figure(case: Case, arm: str, metric: str, value: float, **more: object) -> Measurement:
    """One row of a metric that is a single figure."""
    return row(case, arm, [value], metric, **more)


def absent(
    case: Case,
    arm: str,
    status: str,
    reason: str,
    baseline: str = "",
    metric: str = "time_ms",
    cause: Cause = Cause.NONE,
) -> Measurement:
    """A row of an arm that failed or was skipped."""
    return row(case, arm, metric=metric, status=status, baseline=baseline, reason=reason, cause=cause)


def write_run(
    folder: Path,
    cases: Sequence[Sequence[Measurement]],
    *,
    run_id: str = "20260102T030405Z-0123456-abcd",
    sweep: str = "quick",
    env: Mapping[str, object] = H200,
    env_id: str = "",
    state: str = "finished",
) -> Path:
    """Writes one part a case, as the executor does, and closes the run; returns its folder."""
    target = folder / sweep / run_id
    writer = store.RunWriter(
        target,
        run_id=run_id,
        sweep=sweep,
        env_id=env_id or f"env{env.get('gpu') or env.get('cpu')}".replace(" ", ""),
        env=env,
        about={"command": f"python -m harness sweep={sweep}", "question": "Does FP8 pay here?"},
    )
    for rows in cases:
        writer.append(rows)
    if state != "running":
        writer.close(state)
    return target


def frame(tmp_path: Path, rows: Sequence[Measurement], **more: object) -> pd.DataFrame:
    """Rows after one trip through the store."""
    return store.read(write_run(tmp_path, [rows], **more))
