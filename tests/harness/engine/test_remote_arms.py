"""Arms in a process of their own. Oracle: calls, counted by the arms themselves, and the processes that they ran in."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patching import LINEAR, Patching, detour
from test_executor_faults import QUICK, plan, sweep
from torch.nn import functional

from harness.engine import tasks
from harness.engine.bench import Bench, Setting
from harness.engine.tasks import Task
from harness.engine.worker_process import Resubmit
from harness.machine.processes import began
from harness.peers import PEERS
from harness.store.cause import Cause
from harness.store.measurement import Measurement
from harness.timing.rounds import timer_for


class Silent:
    """A worker's `Reporter` that keeps what it is told."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, done: int, total: int, what: str) -> None: ...

    def set_arm(self, arm: str) -> None: ...

    def stage(self, stage: Any) -> None: ...

    def keep(self, result: Any) -> None:
        self.kept.append(result)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(functional, "linear", LINEAR)
    tasks._bench.cache_clear()


def done(suite: Patching, **changes: Any) -> tuple[dict[str, Measurement], int]:
    """Rows of the time by arm, and how many workers had the case: each finds torch as it is when it is imported."""
    job, workers = Task(plan(suite, 1).cases[0], setting=Setting("cpu", QUICK), **changes), 0
    while isinstance(job, Task):
        functional.linear, workers = LINEAR, workers + 1
        tasks._bench.cache_clear()
        rows, _ = job(Silent())
        job = rows.job if isinstance(rows, Resubmit) else None
    return {r.arm: r for r in rows if r.metric == "time_ms"}, workers


def seen(row: Measurement) -> dict[str, int]:
    return json.loads(json.dumps(row.resolved))["seen"]


def test_a_function_that_one_arm_replaces_is_replaced_for_it_alone_and_its_row_says_so() -> None:
    rows, workers = done(Patching())
    assert {name: row.status for name, row in rows.items()} == dict.fromkeys(rows, "ok")
    assert set(rows) == {"base", "base:again", "peer", "last"}
    for name in ("base", "base:again", "last"):
        assert seen(rows[name])["replaced"] == 0
        assert seen(rows[name])["process"] == os.getpid()
        assert "own_process" not in rows[name].resolved
    assert seen(rows["peer"])["replaced"] == seen(rows["peer"])["calls"] > 0
    assert seen(rows["peer"])["process"] != os.getpid()
    assert (
        seen(rows["peer"])["frozen"] > 10_000
    )  # a step that collects looks through its own objects, as in a worker
    assert rows["peer"].resolved["own_process"] == {
        "why": "changed",
        "settings": {"functions": ["", "torch.nn.functional.linear"]},
        "process": seen(rows["peer"])["process"],
    }
    assert {frozenset(row.rounds) for row in rows.values()} == {frozenset({0, 1})}  # pairing stays
    assert workers == 2


def calls_timed(row: Measurement) -> int:
    """Calls of an arm as its timing has them; a resident block has one more that makes its memory, and one that leads in."""
    timing = row.timing
    more = 2 * seen(row)["entered"]
    return timing["warmup_iterations"] + len(row.samples) * timing["calls_per_sample"] + more


def with_peer(**fields: Any) -> Patching:
    """The suite, its arm `peer` one of a peer."""
    suite = Patching(**fields)
    suite.ARMS = {**suite.ARMS, "peer": replace(suite.ARMS["peer"], peer="scaled_mm")}
    return suite


@pytest.mark.parametrize("is_resident", [False, True])
def test_a_peer_that_asks_for_a_process_has_one_from_the_start_and_makes_the_calls_that_others_make(
    is_resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, "scaled_mm", replace(PEERS["scaled_mm"], own_process=True))
    rows, workers = done(with_peer(is_resident=is_resident))
    assert workers == 1
    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["peer"].resolved["own_process"] == {
        "why": "declared",
        "process": seen(rows["peer"])["process"],
    }
    assert seen(rows["peer"])["replaced"] == seen(rows["peer"])["calls"]
    assert seen(rows["last"])["replaced"] == 0
    assert bool(seen(rows["peer"])["entered"]) == is_resident
    for name in ("peer", "last"):
        assert seen(rows[name])["calls"] == calls_timed(rows[name])
    assert rows["peer"].rounds
    assert set(rows["peer"].rounds) == set(rows["base"].rounds)
    assert functional.linear is LINEAR


def test_a_remote_arm_that_raises_or_dies_fails_alone() -> None:
    """Oracle: the signal that it sends itself, and the exception that it raises, once it is timed."""
    expected = {
        "die": ("its own process was killed by SIGKILL", Cause.DIED),
        "raise": ("ValueError: a kernel refused", Cause.RUN),
    }
    for fate, (reason, cause) in expected.items():
        rows, workers = done(Patching(fate=fate), apart={"peer": {"why": "changed"}})
        assert workers == 1
        assert (rows["peer"].status, rows["peer"].reason, rows["peer"].cause) == ("failed", reason, cause)
        assert rows["peer"].samples == ()
        assert {rows[name].status for name in ("base", "base:again", "last")} == {"ok"}
        assert seen(rows["last"])["calls"] == calls_timed(rows["last"])


def test_nothing_of_a_remote_arm_is_left_when_its_case_has_ended() -> None:
    rows, _ = done(Patching(), apart={"peer": {"why": "changed"}})
    assert began(seen(rows["peer"])["process"]) is None


def test_where_an_import_has_changed_torch_no_arm_gets_a_number() -> None:
    """Planted as an extension's import would: before any arm is built."""
    bench = Bench(Setting("cpu", QUICK), timer_for("cpu"))
    functional.linear = detour
    rows = bench.measure(plan(Patching(), 1).cases[0])
    assert {(r.arm, r.status, r.samples) for r in rows} == {
        (arm, "failed", ()) for arm in ("base", "peer", "last")
    }
    assert all("torch.nn.functional.linear" in r.reason for r in rows)


@pytest.mark.slow
def test_a_remote_arm_that_hangs_with_the_interpreter_locked_fails_alone_and_is_ended() -> None:
    """Through workers, as a sweep: one finds the change, one waits in vain, one measures the others."""
    outcome, frame = sweep(Patching(fate="hang"), 1, case_timeout_s=20.0)
    assert outcome.state == "finished"
    rows = frame[frame["metric"] == "time_ms"].set_index("arm")
    assert rows["status"].to_dict() == {"base": "ok", "last": "ok", "peer": "failed"}
    assert (rows.loc["peer", "cause"], set(rows["tries"])) == (Cause.TIMEOUT, {3})
    assert rows.loc["peer", "reason"].startswith("no sign of life for 20 s in arm peer since timing began")
    [hung] = (int(path.name.removeprefix("hangs-")) for path in Path.cwd().glob("hangs-*"))
    assert began(hung) is None  # whoever was killed may not be reaped yet
