"""Rounds of a case under way. Oracles: the calls that the arms themselves log, a fake clock, and the store's contract.

A round is finished when its last sample is taken; what is stored of a case that was cut off is rounds of one attempt,
with the status `partial`, and no reader that asks for complete measurements gets them.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import forked
import logged_calls
import pandas as pd
import pytest
from logged_calls import WARM_CALLS, plan, sweep
from toy import ToySuite

from harness import store
from harness.engine.resume import stored_cases
from harness.store.measurement import Measurement

WHERE: dict[str, Any] = {"run_id": "r", "sweep": "toy", "env_id": "e", "env": {}, "about": {}}


def row(case: str, arm: str, rounds: int, status: str = "partial") -> Measurement:
    samples, order = tuple(float(i + 1) for i in range(rounds)), tuple(range(rounds))
    reason = f"partial: {rounds} of at least 6 rounds" if status == "partial" else ""
    base = "" if arm == "base" else "base"
    return Measurement("toy", case, arm, "{}", "time_ms", status, baseline=base, regime="isolated",  # type: ignore[arg-type]
                       samples=samples, rounds=order, reason=reason)  # fmt: skip


# What the timing engine hands over


# What a partial row may say


# What the store keeps


def writer(folder: Path) -> store.RunWriter:
    return store.RunWriter(folder, **WHERE)


def rounds(frame: pd.DataFrame, case: str = "c") -> dict[str, int]:
    own = frame[frame["case_id"] == case]
    return {r.arm: len(set(r.rounds)) for r in own.itertuples()}


def test_of_attempts_that_were_cut_off_the_longest_counts_and_a_whole_one_before_all(tmp_path: Path) -> None:
    """Rounds of two attempts are never in one row, nor in one case."""
    for count in (2, 4, 3):
        made = writer(tmp_path)
        made.checkpoint([row("c", "base", count), row("c", "other", count)])
        made.close("interrupted")
    assert rounds(store.read(tmp_path)) == {"base": 4, "other": 4}
    assert len(store.read(tmp_path, all_attempts=True)) == 6
    made = writer(tmp_path)
    made.append([row("c", "base", 3, "ok"), row("c", "other", 3, "ok")])
    made.close("finished")
    frame = store.read(tmp_path)
    assert rounds(frame) == {"base": 3, "other": 3}
    assert set(frame["status"]) == {"ok"}


# What a sweep keeps


def killed_after(calls: int, tmp_path: Path) -> tuple[Path, list[str]]:
    """A sweep in a process of its own, killed with SIGKILL once its arms were called so often; its folder and its log."""
    log, folder = tmp_path / "log", tmp_path / "run"
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = forked.start([logged_calls.__file__, str(log), str(folder)], env={**os.environ, **path})
    while process.is_alive() and not (log.exists() and len(log.read_text().splitlines()) >= calls):
        time.sleep(0.002)
    process.kill()
    process.join()
    return folder, log.read_text().splitlines()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 11))])
def test_a_killed_sweep_keeps_every_finished_round(seed: int, tmp_path: Path) -> None:
    """A call that begins round k + 1 proves that round k is stored: the worker goes on only when it is."""
    calls = random.Random(seed).randrange(2 * WARM_CALLS + 3, 2 * (WARM_CALLS + 6))
    folder, log = killed_after(calls, tmp_path)
    begun = -(-(len(log) - 2 * WARM_CALLS) // 2)
    assert begun >= 2
    frame = store.read(folder)
    times = frame[frame["metric"] == "time_ms"]
    kept = rounds(times, times["case_id"].iloc[0])
    assert set(kept) == {"base", "other"}
    assert len(set(kept.values())) == 1, "all arms have the same rounds"
    assert kept["base"] >= begun - 1
    if kept["base"] < 6:
        assert set(times["status"]) == {"partial"}
        assert stored_cases(folder, plan(ToySuite())) == set()


def test_what_was_cut_off_is_measured_again_and_never_mixed(tmp_path: Path) -> None:
    made = writer(tmp_path)
    case = plan(ToySuite()).cases[0].case.case_id
    made.checkpoint([row(case, "base", 4), row(case, "other", 4)])
    made.close("interrupted")
    assert stored_cases(tmp_path, plan(ToySuite())) == set()
    sweep(ToySuite(), tmp_path)
    times = store.read(tmp_path)
    times = times[times["metric"] == "time_ms"]
    assert list(times["status"]) == ["ok", "ok"]
    assert times["attempt"].nunique() == 1
    assert {len(set(r)) for r in times["rounds"]} == {6}
    assert stored_cases(tmp_path, plan(ToySuite())) == {case}
