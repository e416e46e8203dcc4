"""Oracle: a real session of this tree against itself on the smallest cast, and scripted workers that misbehave."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from harness import store
from harness.gate import drive, process, session
from harness.gate.codes import Exit, GateError
from harness.gate.drive import Request, measure_and_judge
from harness.gate.judge import judge
from harness.gate.policy import load_policy
from harness.gate.process import Process, WorkerError
from harness.gate.session import Session, SideError
from harness.gate.sides import CONTROL_SUITE, load_side

ROOT = Path(process.__file__).resolve().parent.parent.parent
WORDS = ["sweep=cast", "axes.M=16", "axes.K=16", "axes.dtype=e4m3fn", "axes.granularity=tensorwise",
         "axes.src=bf16", "arms=[eager]", "device=cpu", "timing.block_ms=1"]  # fmt: skip
ROUNDS = 3

# Answers by script: `plan`, then whatever the test says for each command.
SCRIPTED = """\
import json, sys, time
script = json.loads(open(sys.argv[1] + "/script.json").read())
counts = {}
for line in sys.stdin:
    what = json.loads(line)["do"]
    if what == "quit":
        break
    counts[what] = counts.get(what, 0) + 1
    says = script.get(what + str(counts[what]), script.get(what))
    if says == "die":
        sys.exit("no memory left")
    if says == "hang":
        time.sleep(3600)
    print(json.dumps(says), flush=True)
"""
CASE = {"suite": "gemm", "case_id": "c1", "arm": "fp8", "baseline": "", "axes": "{}", "seed": 0}
PLANNED = {"case_id": "c1", "suite": "gemm", "axes": "{}", "seed": 0, "arms": {"fp8": ""}}
PLAN = {"env": {"device": "cuda"}, "env_id": "e", "cases": [PLANNED]}
PREPARE = {
    "rows": [
        CASE | {"metric": "time_ms", "status": "ok", "resolved": {"timed": "it"}, "flops": {"e4m3": 2.0}, "bytes_moved": 4.0},
        CASE | {"metric": "sqnr_db", "status": "ok", "samples": [28.0]},
        CASE | {"metric": "compile_s", "status": "ok", "samples": [1.5]},
        CASE | {"metric": "of_another_commit", "status": "ok", "samples": [1.0]},
    ],
    "arms": ["fp8"],
}  # fmt: skip
TIMED = {"method": "m", "l2": "cold"}
BLOCK = {
    "samples": {"fp8": [1.0, 2.0], "control": [0.5]}, "clocks": {"fp8": [1980.0, 1980.0], "control": []},
    "late": {"fp8": 1, "control": 0}, "timing": {"fp8": TIMED, "control": TIMED}, "faults": {},
}  # fmt: skip
SCRIPT: dict[str, Any] = {"plan": PLAN, "prepare": PREPARE, "block": BLOCK}


def scripted(tmp: Path, monkeypatch: pytest.MonkeyPatch, **sides: dict[str, Any]) -> Session:
    (tmp / "worker.py").write_text(SCRIPTED)
    monkeypatch.setattr(process, "WORKER", tmp / "worker.py")
    trees = {}
    for side, script in sides.items():
        trees[side] = tmp / side
        trees[side].mkdir()
        (trees[side] / "script.json").write_text(json.dumps(script))
    return Session(trees, ["sweep=x"], tmp / "S", blocks=2)


@pytest.fixture(scope="module")
def sitting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real session of three rounds; the second half of the judge's diet."""
    folder: Path = tmp_path_factory.mktemp("gate") / "S"
    Session({"baseline": ROOT, "candidate": ROOT}, WORDS, folder, blocks=2).stage(1, ROUNDS)
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


def test_the_same_tree_measured_twice_can_be_judged(sitting: Path) -> None:
    found = judge(
        load_side(sitting / "baseline", "baseline", ""),
        load_side(sitting / "candidate", "candidate", ""),
        load_policy(),
    )
    assert found.mode == "paired"
    assert found.counted["REGRESSED"] == 0
    assert found.control.rounds == ROUNDS


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


def test_many_regressions_are_confirmed_as_surely_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve arms at once: Holm over twelve passes in 8 rounds, though the policy asks for 2."""
    arms = [f"fp8_{n}" for n in range(12)]

    def script(factor: float) -> dict[str, Any]:
        rows = [{**PREPARE["rows"][0], "arm": arm} for arm in arms]
        each = {**{arm: [factor] for arm in arms}, "control": [0.5]}
        block = {
            "samples": each, "clocks": {name: [] for name in each}, "late": dict.fromkeys(each, 0),
            "timing": dict.fromkeys(each, TIMED), "faults": {},
        }  # fmt: skip
        plan = PLAN | {"cases": [PLANNED | {"arms": dict.fromkeys(arms, "")}]}
        return {"plan": plan, "prepare": {"rows": rows, "arms": arms}, "block": block}

    sitting = scripted(tmp_path, monkeypatch, baseline=script(1.0), candidate=script(1.2))
    policy = load_policy(_policy(tmp_path, "pairs: 5\nconfirm_pairs: 2\nblocks: 1\n"))
    found = measure_and_judge(
        Request(sitting.trees, ["sweep=x"], policy, tmp_path / "results"), lambda line: None
    )
    assert found.counted["REGRESSED"] == 12


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
        whole = Session._round

        def counted(sitting: Session, *args: Any) -> None:
            whole(sitting, *args)
            self.now += seconds
            self.rounds += 1

        monkeypatch.setattr(Session, "_round", counted)

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

    def stage(self: Session, number: int, pairs: int, only: Any = (), **_: Any) -> int:
        stages.append((number, pairs))
        return whole(self, number, pairs if number == 1 else 4, only)

    whole = Session.stage
    monkeypatch.setattr(Session, "stage", stage)
    request = Request(sitting.trees, ["sweep=x"], policy, tmp_path / "r")
    found = measure_and_judge(request, lambda line: None)
    assert stages == [(1, 6), (2, 10)]
    (finding,) = [f for f in found.findings if f.unit.metric == "time_ms"]
    assert (str(finding.verdict), found.code) == ("INCONCLUSIVE", Exit.INCONCLUSIVE)
    assert "4 fresh rounds did not confirm it" in finding.reason


def _policy(tmp: Path, text: str) -> Path:
    file = tmp / "policy.yaml"
    file.write_text(text)
    return file
