"""Fleets made up for the tests of harness.judge.fleet: healthy cards from a seeded generator, one of which a test breaks.

No number in these rows was measured. Failed rows are made as the harness makes them (`harness.engine.rows.row`).
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import stored
from report_fixtures import H200, TIMING, figure, write_run

from harness import store
from harness.engine.plan import PlannedCase
from harness.engine.rows import row
from harness.judge.fleet import Score, judge
from harness.store.case import Case
from harness.store.private import hashed
from harness.suites import gemm

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from harness.store.measurement import Measurement

CASES = [Case.of("gemm", {"M": m, "K": 64, "N": 64}) for m in (1024, 2048, 4096)]
CASTS = [Case.of("cast", {"M": m, "K": 64}) for m in (1024, 2048)]
CHECK = Case.of("checksum", {"cube": 64, "data": "codes"})
BASE_MS = {"bf16_eager": 2.0, "rowwise_eager": 1.25}


def env(name: str, **more: object) -> dict[str, object]:
    """The environment of a card of one host."""
    return H200 | {"gpu_uuid_hash": name * 3, "host_hash": hashed("node1")} | more


def time(
    case: Case, arm: str, ms: float, clock: float = 1755.0, throttled: bool = False, **more: object
) -> Measurement:
    """The row of one time."""
    return stored.row(
        case,
        arm,
        (ms,) * 3,
        baseline="" if arm == "bf16_eager" else "bf16_eager",
        sample_clock_mhz=(clock,) * 3,
        timing={**TIMING, "throttled": throttled},
        **more,
    )


def sustained(case: Case, factor: float = 1.0, throttled: bool = False) -> list[Measurement]:
    """The rows of a case under sustained load, without noise."""
    rows = [
        time(case, arm, factor * ms * case.integer("M") / 1024, throttled=throttled)
        for arm, ms in BASE_MS.items()
    ]
    return [replace(r, regime="sustained") for r in rows]


def failed(case: Case, reason: str, regime: str = "") -> list[Measurement]:
    """The rows of a case of the suite gemm that failed, as the harness writes them."""
    planned = PlannedCase("gemm", gemm, case, tuple(BASE_MS))
    return [row(planned, arm, "failed", reason=reason, regime=regime) for arm in planned.arms]


def card(
    folder: Path,
    name: str,
    slow: float = 1.0,
    slow_casts: float = 1.0,
    clock: float = 1755.0,
    throttled: bool = False,
    checksum: str = "c0ffee",
    run_id: str = "",
    fails: str = "",
    extra: Sequence[Sequence[Measurement]] = (),
    **more: object,
) -> None:
    """One invented card: times 1 % around the same middle, times `slow`; `fails` is why its first case does."""
    draw = random.Random(name)
    rows = [list(some) for some in extra]
    for case in (*CASES, *CASTS):
        level = (slow_casts if case.suite == "cast" else slow) * case.integer("M") / 1024
        rows.append(
            [
                time(case, arm, ms * level * math.exp(draw.gauss(0, 0.01)), clock, throttled)
                for arm, ms in BASE_MS.items()
            ]
        )
    if fails:
        rows[len(extra)] = failed(CASES[0], fails)
    rows.append([figure(CHECK, "rowwise_eager", "mismatches", 0.0, resolved={"checksum": checksum})])
    made = [row for some in rows for row in some]  # one part: six to sync make a test slow
    write_run(folder / name, [made], run_id=run_id or f"run-{name}", sweep="fleet", env=env(name, **more))


def judged(*folders: Path) -> list[Score]:
    """What is found in all runs below some folders."""
    return judge(store.read(list(folders), all_attempts=True), 0.05)


def names(count: int) -> list[str]:
    """Names of cards."""
    return [f"{i:04x}" for i in range(count)]
