"""Oracle: the rules of the store - every case ends as rows, a wrong or unmeasurable arm never as a number."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
import torch
from toy import ToySuite, nothing, planned

from harness import store
from harness.engine.bench import Setting
from harness.engine.executor import RunOutcome, run
from harness.machine.gpu_monitor import Monitor
from harness.timing import compiling
from harness.timing import session as timing_session
from harness.timing.rounds import TimingConfig
from harness.timing.workload import Numerics, Workload

if TYPE_CHECKING:
    from harness.engine.plan import SweepPlan
    from harness.store.case import Case

QUICK = TimingConfig(
    min_rounds=3,
    max_rounds=3,
    min_samples=1,
    min_seconds=0.0,
    warmup_min_iterations=1,
    warmup_min_seconds=0.0,
    warmup_max_seconds=0.1,
)


def plan(suite: ToySuite, n: list[int] | None = None) -> SweepPlan:
    return planned(suite, {"n": n or [1]})


def execute(
    folder: Path, suite: ToySuite, n: list[int] | None = None, done: tuple[str, ...] = (), **changes: Any
) -> tuple[RunOutcome, pd.DataFrame]:
    setting = Setting("cpu", changes.pop("timing", QUICK))
    writer = store.RunWriter(folder, run_id="r", sweep="toy", env_id="e", env={}, about={})
    outcome = run(plan(suite, n), writer, setting, done=done, **changes)
    writer.close(outcome.state)
    return outcome, store.read(folder)


def time_rows(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["metric"] == "time_ms"].set_index("arm")


def other(run: Callable[[], object], **changes: Any) -> ToySuite:
    """A toy suite whose candidate arm does `run`."""
    given: dict[str, Any] = {"run": run, "check": lambda: Numerics({"sqnr_db": 28.0})}
    return ToySuite(behaviour={"other": lambda case: Workload(**(given | changes))})


def test_a_wrong_result_gets_no_speed(tmp_path: Path) -> None:
    ran: list[int] = []
    suite = other(
        lambda: ran.append(1), check=lambda: Numerics({"sqnr_db": 3.0}, False, "SQNR 3 dB, bound 28.3 dB")
    )
    _, frame = execute(tmp_path, suite)
    rows = time_rows(frame)
    assert rows.loc["other", "status"] == "failed"
    assert rows.loc["other", "reason"] == "numerics: SQNR 3 dB, bound 28.3 dB"
    assert pd.isna(rows.loc["other", "value"])
    assert ran == []
    figure = frame[(frame["arm"] == "other") & (frame["metric"] == "sqnr_db")].iloc[0]
    assert (figure["status"], figure["reason"]) == ("failed", "3; SQNR 3 dB, bound 28.3 dB")


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


needs_compiler = pytest.mark.skipif(
    compiling.compile_unavailable("cpu") is not None, reason=str(compiling.compile_unavailable("cpu"))
)


@needs_compiler
def test_an_arm_that_recompiles_while_it_is_timed_fails(tmp_path: Path) -> None:
    def build(case: Case) -> Workload:
        step, sizes = compiling.fresh_compile(add_one), iter(range(2, 10**6))
        return Workload(run=lambda: step(torch.ones(next(sizes))), check=lambda: Numerics({}), compiled=True)

    _, frame = execute(tmp_path, ToySuite(behaviour={"other": build}))
    row = frame[(frame["arm"] == "other") & (frame["metric"] == "time_ms")].iloc[0]
    assert row["status"] == "failed"
    assert "compiled" in row["reason"]


@needs_compiler
def test_an_arm_that_can_is_compiled_cold_and_warm(tmp_path: Path) -> None:
    """From empty caches, whatever this machine has compiled before; then from those that the first call filled."""

    def build(case: Case) -> Workload:
        made = [compiling.fresh_compile(add_one)]
        x = torch.ones(case.integer("n") + 40)
        return Workload(
            run=lambda: made[0](x),
            check=lambda: Numerics({}),
            compiled=True,
            recompile=lambda: made.__setitem__(0, compiling.fresh_compile(add_one)),
        )

    for folder in ("first", "second"):
        _, frame = execute(tmp_path / folder, ToySuite(behaviour={"other": build}))
        rows = frame[(frame["arm"] == "other") & (frame["metric"] == "compile_s")]
        assert rows["part"].tolist() == ["", "warm"]
        assert (rows["status"] == "ok").all()
        assert rows["resolved"].str.contains('"compile_cache":"cold"').all()


class Metered(Monitor):
    """A board that uses a joule between two readings."""

    def __init__(self) -> None:
        self.joules = 0.0

    def energy_j(self) -> float | None:
        self.joules += 1.0
        return self.joules


def test_energy_is_by_token_and_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one sample and one call before it: half a joule a call, 8 tokens each."""
    monkeypatch.setattr(timing_session, "METERED_S", 0.0)  # this meter has no tick
    quick = replace(QUICK, block_ms=0.0)
    suite = other(nothing, resident=nullcontext, tokens=8)
    _, frame = execute(tmp_path, suite, monitor=Metered(), timing=quick)
    (row,) = frame[frame["metric"] == "joules_per_token"].to_dict("records")
    assert row["status"] == "ok"
    assert row["rounds"].tolist() == [0, 1, 2]
    assert row["samples"].tolist() == pytest.approx([1 / 16] * 3)


def test_an_arm_that_claims_to_be_compiled_and_runs_eager_fails(tmp_path: Path) -> None:
    _, frame = execute(tmp_path, other(nothing, compiled=True))
    row = time_rows(frame).loc["other"]
    assert row["status"] == "failed"
    assert "ran eager" in row["reason"]


def compiled(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Case], Workload]:
    def build(case: Case) -> Workload:
        step = compiling.fresh_compile(fn)
        x = torch.ones(case.integer("n"))
        return Workload(run=lambda: step(x), check=lambda: Numerics({}), compiled=True)

    return build


@needs_compiler
def test_more_shapes_than_dynamos_limit_all_run_compiled(tmp_path: Path) -> None:
    """Past so many graphs of a code object (by default 8) a plain torch.compile runs eager."""
    with torch._dynamo.config.patch(recompile_limit=2):
        _, frame = execute(tmp_path, ToySuite(behaviour={"other": compiled(add_one)}), [2, 3, 4, 5])
    rows = frame[(frame["arm"] == "other") & (frame["metric"] == "time_ms")]
    assert len(rows) == 4
    assert (rows["status"] == "ok").all()
    assert rows["resolved"].str.contains('"compile_graphs":1').all()
    assert len(frame[(frame["metric"] == "compile_s") & (frame["status"] == "ok")]) == 4
