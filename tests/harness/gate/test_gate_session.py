"""Oracle: a real session of this tree against itself on the smallest cast, and scripted workers that misbehave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_session import BLOCK, CASE, PLAN, PLANNED, PREPARE, ROOT, SCRIPT, scripted

from harness import store
from harness.gate import session
from harness.gate.drive import Request, measure_and_judge
from harness.gate.exit_code import Exit
from harness.gate.policy import load_policy
from harness.gate.process import Process, WorkerError
from harness.gate.session import PairedMeasurement, SideError
from harness.gate.sides import CONTROL_SUITE

WORDS = ["sweep=cast", "axes.M=16", "axes.K=16", "axes.dtype=e4m3fn", "axes.granularity=tensorwise",
         "axes.src=bf16", "arms=[eager]", "device=cpu", "timing.block_ms=1"]  # fmt: skip
ROUNDS = 3


@pytest.fixture(scope="module")
def sitting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real session of three rounds; the second half of the judge's diet."""
    folder: Path = tmp_path_factory.mktemp("gate") / "S"
    PairedMeasurement({"baseline": ROOT, "candidate": ROOT}, WORDS, folder, blocks=2).stage(1, ROUNDS)
    return folder


def test_a_session_stores_pairs_of_rounds(sitting: Path) -> None:
    for side in ("baseline", "candidate"):
        rows = store.read(sitting / side).set_index(["suite", "metric"])
        timed = rows.loc["cast", "time_ms"]
        assert timed["status"] == "ok"
        assert sorted(set(timed["rounds"])) == list(range(ROUNDS))
        assert timed["regime"] == "isolated"
        assert json.loads(timed["resolved"])["operator_calls"] > 0
        assert rows.loc["cast", "mismatches"]["samples"].tolist() == [0.0]
        assert rows.loc[CONTROL_SUITE, "time_ms"]["value"] > 0
        gate = store.read_about(sitting / side / "stage1")["gate"]
        assert (gate["session"], gate["side"], gate["stage"], gate["pairs"]) == ("S", side, 1, ROUNDS)


def test_what_workers_say_becomes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(tmp_path, monkeypatch, candidate=SCRIPT).stage(1, 3)
    rows = store.read(tmp_path / "S").set_index("metric").query(f"suite != '{CONTROL_SUITE}'")
    assert sorted(rows.index) == ["compile_s", "sqnr_db", "time_ms"]
    timed = rows.loc["time_ms"]
    assert timed["samples"].tolist() == [1.0, 2.0] * 2 * 3
    assert timed["rounds"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert timed["sample_clock_mhz"].tolist() == [1980.0] * 12
    assert json.loads(timed["timing"])["late_samples"] == 6
    assert rows.loc["compile_s"]["rounds"].tolist() == [0, 1, 2]  # each process compiled once
    assert rows.loc["sqnr_db"]["samples"].tolist() == [28.0]  # no time: one number


def test_numerics_that_differ_between_processes_store_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = CASE | {"metric": "sqnr_db", "status": "ok", "samples": [3.0]}
    script = {**SCRIPT, "prepare": {**PREPARE, "rows": [*PREPARE["rows"], other]}}
    scripted(tmp_path, monkeypatch, candidate=script).stage(1, 1)
    rows = store.read(tmp_path / "S").set_index("metric")
    assert rows.loc["sqnr_db"]["samples"].tolist() == [3.0]


@pytest.mark.parametrize(("alone", "most"), [(False, 2), (True, 1)])
def test_alone_means_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool, most: int
) -> None:
    living: set[int] = set()
    seen = []

    class Counted(Process):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            living.add(id(self))
            seen.append(len(living))

        def close(self) -> None:
            super().close()
            living.discard(id(self))

    monkeypatch.setattr(session, "Process", Counted)
    sitting = scripted(tmp_path, monkeypatch, baseline=SCRIPT, candidate=SCRIPT)
    sitting.alone = alone
    sitting.stage(1, 3)
    assert (max(seen), len(seen), living) == (most, 6, set())
    assert (
        store.read(tmp_path / "S").query("metric == 'time_ms'")["rounds"].map(set).tolist() == [{0, 1, 2}] * 4
    )


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ({"prepare": "die"}, "ended with code 1: no memory left (round 0)"),
        ({"block2": "die"}, "ended with code 1: no memory left (round 0)"),
        ({"block": {"error": "RuntimeError: device lost"}}, "device lost"),
        ({"block2": {**BLOCK, "samples": {}, "faults": {"fp8": "recompiled"}}}, "recompiled (round 0)"),
    ],
)
def test_a_worker_that_dies_fails_its_case_and_no_other_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: dict[str, Any], reason: str
) -> None:
    sitting = scripted(tmp_path, monkeypatch, baseline=SCRIPT, candidate={**SCRIPT, **script})
    sitting.stage(1, 2)
    status = {}
    for side in ("baseline", "candidate"):
        (row,) = (
            store.read(tmp_path / "S" / side)
            .query("metric == 'time_ms' and suite == 'gemm'")
            .to_dict("records")
        )
        status[side] = row
    assert status["baseline"]["status"] == "ok"
    assert status["candidate"]["status"] == "failed"
    assert reason in status["candidate"]["reason"]


@pytest.mark.parametrize("plan", ["die", {"error": "UsageError: unknown sweep 'gate'"}])
def test_a_side_that_cannot_plan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Any
) -> None:
    """The other commit may lack the sweep, or its environment."""
    sitting = scripted(tmp_path, monkeypatch, candidate=SCRIPT, baseline={"plan": plan})
    with pytest.raises(SideError, match="baseline"):
        sitting.stage(1, 2)
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_worker_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(tmp_path, monkeypatch, candidate={"plan": "hang"})
    worker = Process(tmp_path / "candidate")
    with pytest.raises(WorkerError, match="no answer within 0 s"):
        worker.ask({"do": "plan"}, 0.2)
    worker.close()


def test_what_is_flagged_is_measured_again_and_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(factor: float) -> dict[str, Any]:
        timed = {**PREPARE, "rows": PREPARE["rows"][:1]}
        other = {**timed, "rows": [{**PREPARE["rows"][0], "case_id": "c2"}]}
        cases = {"cases": [PLANNED, PLANNED | {"case_id": "c2"}]}
        slow = {**BLOCK, "samples": {"fp8": [factor], "control": [0.5]}, "clocks": {"fp8": [], "control": []}}
        same = {**slow, "samples": {"fp8": [1.0], "control": [0.5]}}
        turns = {"block1": slow, "block2": slow, "block3": same, "block4": same}
        return {"plan": PLAN | cases, "prepare1": timed, "prepare2": other, **turns}

    sitting = scripted(tmp_path, monkeypatch, baseline=script(1.0), candidate=script(1.2))
    monkeypatch.setattr(session, "new_session", lambda: "T")
    policy = load_policy(_policy(tmp_path, "pairs: 6\nconfirm_pairs: 8\nblocks: 2\n"))
    said: list[str] = []
    found = measure_and_judge(Request(sitting.trees, ["sweep=x"], policy, tmp_path / "results"), said.append)
    assert found.code is Exit.REGRESSED
    timed = {f.unit.case_id: str(f.verdict) for f in found.findings if f.unit.metric == "time_ms"}
    assert timed == {"c1": "REGRESSED", "c2": "OK"}
    assert "1 cases are flagged and measured again, 8 rounds" in said
    again = store.read(next((tmp_path / "results").rglob("candidate/stage2"))).query("suite == 'gemm'")
    assert again["case_id"].tolist() == ["c1"]


def _policy(tmp: Path, text: str) -> Path:
    file = tmp / "policy.yaml"
    file.write_text(text)
    return file
