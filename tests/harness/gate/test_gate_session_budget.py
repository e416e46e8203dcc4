"""The time budget of a gate session: what is begun, broken off, refused. Oracle: a clock by script."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_session import BLOCK, PLAN, PLANNED, PREPARE, ROOT, SCRIPT, SCRIPTED, scripted

from harness import store
from harness.gate import drive
from harness.gate.drive import Request, measure_and_judge
from harness.gate.exit_code import Exit, GateError
from harness.gate.policy import load_policy
from harness.gate.session import PairedMeasurement
from harness.gate.sides import load_side


class Steps:
    """A clock that a scripted worker's answers move: each reading is so many seconds after the last."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_no_round_is_begun_that_would_not_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sitting = scripted(tmp_path, monkeypatch, baseline=SCRIPT, candidate=SCRIPT)
    sitting.clock = Steps(1.0)  # some twenty readings a round
    done = sitting.stage(1, 10, ends=100.0)
    assert 1 < done < 10
    assert sitting.clock.now < 110
    rows = store.read(tmp_path / "S").query("metric == 'time_ms'")
    assert rows["rounds"].map(set).tolist() == [set(range(done))] * len(rows)
    gate = store.read_about(tmp_path / "S" / "candidate" / "stage1")["gate"]
    assert (gate["rounds"], gate["pairs"]) == (done, 10)
    side = load_side(tmp_path / "S" / "candidate", "candidate", "")
    assert any(f"held {done} of 10 rounds of stage 1" in note for note in side.notes)


def test_a_round_that_does_not_end_in_time_is_broken_off_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real time, and no bound on it but the hour that the worker would sleep: the candidate hangs in its second process, which lives in a file that counts the starts."""
    sitting = scripted(tmp_path, monkeypatch, baseline=SCRIPT, candidate=SCRIPT)
    counting = SCRIPTED.replace(
        "counts = {}",
        "counts = {}\nstarts = open(sys.argv[1] + '/starts', 'a+'); starts.write('x'); starts.flush()\n"
        "starts.seek(0); late = len(starts.read()) > 1 and 'candidate' in sys.argv[1]",
    ).replace('if says == "hang":', 'if late and what == "block":')
    (tmp_path / "worker.py").write_text(counting)
    begun = time.monotonic()
    assert sitting.stage(1, 10, ends=begun + 5.0) == 1
    rows = store.read(tmp_path / "S").query("metric == 'time_ms'")
    assert set(rows["status"]) == {"ok"}
    assert rows["rounds"].map(set).tolist() == [{0}] * len(rows)


def test_time_for_no_round_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sitting = scripted(tmp_path, monkeypatch, baseline=SCRIPT, candidate=SCRIPT)
    policy = dataclasses.replace(load_policy(), budget_s=1.0)
    with pytest.raises(GateError, match=r"not one round was measured .* --budget-s"):
        measure_and_judge(Request(sitting.trees, ["sweep=x"], policy, tmp_path / "r"), lambda line: None)
    assert not list((tmp_path / "r").rglob("*"))


def test_a_dry_run_says_how_many_rounds_a_decision_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fifty units: docs/gate-statistics.md has the same figures."""
    plan = PLAN | {"cases": [PLANNED | {"arms": {f"a{n}": "" for n in range(50)}}]}
    sitting = scripted(tmp_path, monkeypatch, candidate={"plan": plan})
    drive.print_plan(sitting.trees["candidate"], ["sweep=x"], load_policy())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "50 timed units: 5 rounds to flag, 8 to confirm; planned: 10 and 10 in 300 s"
    assert lines[1].startswith("rounds that differ by 1.0%: 9 find a unit 3% beyond its tolerance")
    assert lines[2].startswith("rounds that differ by 5.0%: 84 find a unit")
    page = (ROOT / "docs" / "gate-statistics.md").read_text()
    assert "| 50 | 9 | 19 | 84 |" in page


class Rounds:
    """A clock that only rounds move: each takes `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.rounds = 0.0, 0
        whole = PairedMeasurement._round

        def counted(sitting: PairedMeasurement, *args: Any) -> None:
            whole(sitting, *args)
            self.now += seconds
            self.rounds += 1

        monkeypatch.setattr(PairedMeasurement, "_round", counted)

    def __call__(self) -> float:
        return self.now


def slow_sitting(tmp: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> tuple[Request, Rounds]:
    def script(ms: float) -> dict[str, Any]:
        block = {**BLOCK, "samples": {"fp8": [ms, ms], "control": [0.5]}}
        return {**SCRIPT, "prepare": {**PREPARE, "rows": PREPARE["rows"][:1]}, "block": block}

    sitting = scripted(tmp, monkeypatch, baseline=script(1.0), candidate=script(1.2))
    clock = Rounds(monkeypatch, seconds)
    opened = drive.open_session
    monkeypatch.setattr(drive, "open_session", lambda *args: dataclasses.replace(opened(*args), clock=clock))
    policy = dataclasses.replace(load_policy(), blocks=1)
    command = "python -m harness gate --against main"
    return Request(sitting.trees, ["sweep=x"], policy, tmp / "r", command=command), clock


@pytest.mark.parametrize(("seconds", "first", "second"), [(20.0, 6, 8), (22.0, 5, 8)])
def test_the_budget_keeps_time_for_the_confirmation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, first: int, second: int
) -> None:
    """300 s less 5 for judging. Rounds of 20 s: six to flag and eight to confirm, not seven and none."""
    request, clock = slow_sitting(tmp_path, monkeypatch, seconds)
    found = measure_and_judge(request, lambda line: None)
    (finding,) = [f for f in found.findings if f.unit.metric == "time_ms"]
    assert (finding.rounds, clock.rounds) == (first + second, first + second)
    assert found.code is Exit.REGRESSED


def test_a_budget_that_cannot_hold_a_decision_is_refused_after_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of 27 s: 300 s hold fewer than the 13 of a decision, which take 351 s. A fifth more and 5 s are advised."""
    request, clock = slow_sitting(tmp_path, monkeypatch, 27.0)
    with pytest.raises(GateError, match="a round takes 27 s") as caught:
        measure_and_judge(request, lambda line: None)
    assert caught.value.code is Exit.USAGE
    assert str(caught.value).endswith("python -m harness gate --against main --budget-s 430")
    assert clock.rounds == 1
    told = dataclasses.replace(request, policy=dataclasses.replace(request.policy, on_slower="warn", pairs=2))
    assert (
        measure_and_judge(told, lambda line: None).code is Exit.OK
    )  # no time decides there, so none is missed


def test_a_confirmation_cut_short_leaves_inconclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 % slower in each of 6 rounds is flagged, and the time allowed holds no confirmation of 7."""

    def script(ms: float) -> dict[str, Any]:
        timed = {**PREPARE, "rows": PREPARE["rows"][:1]}
        return {
            **SCRIPT,
            "prepare": timed,
            "block": {**BLOCK, "samples": {"fp8": [ms, ms], "control": [0.5]}},
        }

    sitting = scripted(tmp_path, monkeypatch, baseline=script(1.0), candidate=script(1.2))
    policy = dataclasses.replace(load_policy(), pairs=6, budget_s=300.0)
    stages = []

    def stage(self: PairedMeasurement, number: int, pairs: int, only: Any = (), **_: Any) -> int:
        stages.append((number, pairs))
        return whole(self, number, pairs if number == 1 else 4, only)

    whole = PairedMeasurement.stage
    monkeypatch.setattr(PairedMeasurement, "stage", stage)
    request = Request(sitting.trees, ["sweep=x"], policy, tmp_path / "r")
    found = measure_and_judge(request, lambda line: None)
    assert stages == [(1, 6), (2, 10)]
    (finding,) = [f for f in found.findings if f.unit.metric == "time_ms"]
    assert (str(finding.verdict), found.code) == ("INCONCLUSIVE", Exit.INCONCLUSIVE)
    assert "4 fresh rounds did not confirm it" in finding.reason
