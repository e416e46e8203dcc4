"""One bad arm costs its own rows. Oracle: what each arm is told to do, and that the others were timed in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_executor_faults import QUICK, of_case, plan, sweep
from unruly import FOUR, Unruly, fault

from harness import store
from harness.engine import workers
from harness.engine.executor import Executor
from harness.engine.resume import stored_cases
from harness.timing.timers import CpuTimer

TWICE = "its process died twice (signal 9, SIGKILL) in arm"
CUDA = "RuntimeError: CUDA error: an illegal memory access was encountered"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# What the arms do; processes that had the case; how the reasons of those that failed begin.
FAULTS: list[tuple[dict[str, str], int, dict[str, str]]] = [
    ({"peer": "timed die"}, 3, {"peer": f"{TWICE} peer after timing began; resume="}),
    (
        {"peer": "die", "far": "segfault"},
        4,
        {
            "peer": f"{TWICE} peer after it was begun",
            "far": "its process died 3 times (signal 11, SIGSEGV) in arm far after it was begun: ",
        },
    ),
    ({"other": "die"}, 3, dict.fromkeys(("other", "far"), f"{TWICE} other after it was begun; resume=")),
    ({"base": "die"}, 2, dict.fromkeys(FOUR, f"{TWICE} base after it was begun; resume=")),
    ({"peer": "lose"}, 2, {"peer": CUDA}),
    ({"peer": "timed lose"}, 2, {"peer": CUDA}),
    ({"peer": "spoil"}, 2, {"peer": "SpoiledError: a recording was refused"}),
    ({"peer": "timed spoil"}, 2, {"peer": "SpoiledError: a recording was refused"}),
    (
        {"other": "lose", "peer": "die"},
        4,
        {"other": CUDA, "far": f"arm other lost the device: {CUDA}", "peer": TWICE},
    ),
    ({"base": "timed lose"}, 1, {**dict.fromkeys(FOUR, f"arm base lost the device: {CUDA}"), "base": CUDA}),
    ({"peer": "nan"}, 1, {"peer": "ValueError: sqnr_db of toy/peer: NaN is no measurement"}),
]


def test_an_arm_that_ends_its_process_fails_with_those_compared_with_it_and_the_others_are_timed() -> None:
    acts = {n: arms for n, (arms, _, _) in enumerate(FAULTS, 1)}
    outcome, frame = sweep(Unruly(ARMS=FOUR, acts=acts), len(acts) + 1)
    assert outcome.state == "finished"
    assert not frame.duplicated(["case_id", "arm", "metric"]).any()
    times = frame[frame["metric"] == "time_ms"]
    assert times.groupby("arm").size().to_dict() == dict.fromkeys(FOUR, len(acts) + 1)
    for n, (arms, tries, reasons) in enumerate([*FAULTS, ({}, 1, {})], 1):
        rows = of_case(times, n).set_index("arm")
        assert set(rows["tries"]) == {tries}, arms
        assert set(rows.index[rows["status"] == "failed"]) == set(reasons), arms
        for arm, reason in reasons.items():
            assert rows.loc[arm, "reason"].startswith(reason), arms
        measured = rows[rows["status"] == "ok"]
        assert len({json.loads(r)["process"] for r in measured["resolved"]}) <= 1
        assert measured["rounds"].map(frozenset).nunique() <= 1


def test_without_other_processes_a_lost_device_is_laid_at_its_arm_and_resume_runs_the_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuTimer, "synchronize", CpuTimer.synchronize)  # is put back, as `fault` is
    suite = Unruly(ARMS=FOUR, acts={2: {"other": "timed lose"}})
    try:
        _, frame = sweep(suite, 3, places=())
    finally:
        fault.clear()
    assert (of_case(frame, 1)["status"] == "ok").all()
    times = frame[frame["metric"] == "time_ms"]
    rows = of_case(times, 2).set_index("arm")["reason"].to_dict()
    assert rows.pop("other") == CUDA
    assert set(rows.values()) == {
        f"the device was lost in arm other: {CUDA}; resume=RUN_ID runs the case again"
    }
    assert of_case(times, 3)["reason"].str.startswith("the device was lost in case ").all()
    assert len(stored_cases(Path("run"), plan(suite, 3))) == 1


def test_a_case_that_takes_too_long_as_a_whole_fails_as_a_whole() -> None:
    _, frame = sweep(Unruly(acts={1: "hang"}), 2, case_wall_s=1.0)
    rows = of_case(frame, 1)
    assert rows["reason"].tolist() == [
        "not done within 1 s in arm other after it was begun; case_wall_s=SECONDS allows more"
    ] * len(rows)
    assert rows["arm"].tolist() == ["base", "other"]
    assert (of_case(frame, 2)["status"] == "ok").all()


# What arm `other` does, and how the reasons of its row and of the other arm's begin. Rows are read together, and sent so
# where each of them can be.
UNFIT = {
    "unreadable": ("its rows cannot be read: ModuleNotFoundError: No module named 'no_such_module'",) * 2,
    "unsendable": ("its row cannot be sent to the process that stores it: ValueError: no pickle", ""),
    "scribble": ("its rows cannot be read: UnpicklingError: ",) * 2,
    "begin": ("its rows cannot be read: a message broke off (",) * 2,
    "tensor": ("its row cannot be stored: TypeError: Object of type Tensor is not JSON serializable", ""),
    "words": ("its row cannot be stored: ArrowInvalid: Could not convert 'many'", ""),
    "undecodable": ("RuntimeError: a bad \\udcff byte", ""),
}


def test_rows_that_cannot_be_read_or_stored_are_failed_rows_and_the_sweep_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "MESSAGE_S", 1.0)
    acts = {2 * i + 2: act for i, act in enumerate(UNFIT)}
    count = 2 * len(acts) + 1
    outcome, frame = sweep(Unruly(acts=acts), count)
    assert outcome.state == "finished"
    assert all(reason.isascii() for reason in outcome.reasons)
    assert not frame.duplicated(["case_id", "arm", "metric"]).any()
    times = frame[frame["metric"] == "time_ms"]
    assert times.groupby("arm").size().to_dict() == {"base": count, "other": count}
    for n, act in acts.items():
        rows = of_case(times, n).set_index("arm")
        for arm, reason in zip(("other", "base"), UNFIT[act], strict=True):
            assert rows.loc[arm, "status"] == ("failed" if reason else "ok"), act
            assert rows.loc[arm, "reason"].startswith(reason), act
    for n in range(1, count + 1, 2):
        assert (of_case(times, n)["status"] == "ok").all()


def test_rows_that_the_store_refuses_for_no_fault_of_theirs_are_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug of the store must be seen, and not become a thousand failed rows."""

    def refuse(self: Any, rows: Any, env: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(store.RunWriter, "_append", refuse)
    writer = store.RunWriter(Path("run"), run_id="r", sweep="toy", env_id="e", env={}, about={})
    with pytest.raises(ValueError, match="a bug"):
        Executor(device="cpu", timing=QUICK).run(plan(Unruly(), 1), writer)


def test_an_unfit_row_of_this_process_is_replaced_too() -> None:
    _, frame = sweep(Unruly(acts={1: "tensor"}), 1, places=())
    rows: pd.DataFrame = frame.set_index(["arm", "metric"])["status"]
    assert rows.to_dict() == {
        ("base", "sqnr_db"): "ok", ("base", "time_ms"): "ok", ("other", "sqnr_db"): "failed", ("other", "time_ms"): "failed",
    }  # fmt: skip
