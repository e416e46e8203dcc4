"""Builds the two sides of a gate for tests: invented rounds, written through the real store into a temporary folder."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from stored import row

from harness import store
from harness.gate.judge import judge
from harness.gate.policy import Policy, load_policy
from harness.gate.sides import CONTROL_SUITE, load_side
from harness.machine.environment import env_id
from harness.store.case import Case
from harness.store.errors import Cause
from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from harness.gate.unit import Judgement

ENV: Mapping[str, Any] = {
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "power_limit_w": 700.0,
    "driver": "570.124.06",
    "torch": "2.13.0+cu128",
    "git_commit": "0123456789abcdef0123456789abcdef01234567",
    "git_dirty": False,
}
ROUNDS = 10
POLICY = load_policy()
TODAY = datetime.date(2027, 1, 15)
Rows = Sequence[Measurement]


def case(n: int) -> Case:
    return Case.of("gemm", {"M": n, "K": 64, "N": 64})


def time_row(
    n: int,
    times: Sequence[float],
    arm: str = "fp8",
    *,
    metric: str = "time_ms",
    baseline: str = "bf16",
    clocks: Sequence[float] = (),
    resolved: Mapping[str, object] | None = None,
    bytes_moved: float | None = None,
) -> Measurement:
    """One sample a round."""
    return row(
        case(n), arm, times, metric, baseline=baseline if arm != baseline else "", regime="isolated",
        resolved=resolved or {}, rounds=tuple(range(len(times))), sample_clock_mhz=tuple(clocks),
        bytes_moved=bytes_moved, timing={"method": "cuda_events"},
    )  # fmt: skip


def value_row(n: int, metric: str, value: float, arm: str = "fp8") -> Measurement:
    return row(case(n), arm, [value], metric)


def failed_row(
    n: int, reason: str, arm: str = "fp8", status: str = "failed", cause: Cause = Cause.NONE
) -> Measurement:
    return row(case(n), arm, status=status, reason=reason, cause=cause)


def control_row(times: Sequence[float]) -> Measurement:
    return row(Case.of(CONTROL_SUITE, {"what": "bf16_mm"}), "bf16_mm", times)


@dataclass
class Times:
    """Times with a known ratio and a known noise: a drift that both sides share, and noise of each round."""

    spread: float = 0.005
    seed: int = 0
    rounds: int = ROUNDS
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.drift = 0.1 * self.random.standard_normal(1000)  # of the machine: cancels only in pairs

    def __call__(self, factor: float = 1.0, base: float = 1.0) -> list[float]:
        noise = self.spread * self.random.standard_normal(self.rounds)
        return list(base * factor * np.exp(self.drift[: self.rounds] + noise))


def write(
    folder: Path,
    rows: Sequence[Measurement],
    *,
    session: str = "S",
    stage: int = 1,
    env: Mapping[str, Any] = ENV,
    **gate: Any,
) -> Path:
    """Writes one run of one side below `folder` (a side's folder holds its stages); returns `folder`."""
    writer = store.RunWriter(
        folder / f"stage{stage}",
        run_id=f"{folder.name}-{stage}",
        sweep="gate",
        env_id=env_id(env),
        env=env,
        about={"gate": {"session": session, "stage": stage, **gate}} if session else {},
    )
    writer.append(rows)
    writer.close("finished")
    return folder


def run(tmp: Path, before: Rows, after: Rows, *, policy: Policy = POLICY, **options: Any) -> Judgement:
    """Judges two sides; `confirm=(before, after)` adds a confirmation, `envs` and `session` replace the defaults."""
    envs = options.pop("envs", (ENV, ENV))
    session = options.pop("session", "S")
    confirm = options.pop("confirm", None)
    sides = []
    for index, (name, rows) in enumerate((("baseline", before), ("candidate", after))):
        folder = write(tmp / name, rows, session=session, env=envs[index])
        if confirm is not None:
            write(folder, confirm[index], session=session, stage=2, env=envs[index])
        sides.append(load_side(folder, name, ""))
    return judge(*sides, policy, today=TODAY, **options)


def slowed(factor: float, *, spread: float = 0.005, seed: int = 0) -> tuple[Rows, Rows]:
    times = Times(spread, seed)
    return [time_row(1, times())], [time_row(1, times(factor))]
