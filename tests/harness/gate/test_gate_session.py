"""A session of the gate: pairs of rounds, lost processes, the time budget. Oracle: sweeps and a clock by script."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import scipy.stats

from harness import store
from harness.engine.turns import VERSION
from harness.gate import sweeping
from harness.gate.options import Exit, GateError
from harness.gate.policy import load_policy
from harness.gate.runner import GateRound, Instrument, Session, SideError
from harness.gate.sides import CONTROL_SUITE
from harness.gate.sweeping import EndedError, Sweeping
from harness.store.case import Case
from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from harness.gate.unit import Judgement

CASE = Case.of("gemm", {"n": 1}).case_id
OTHER = Case.of("gemm", {"n": 2}).case_id


def about(n: int = 1) -> dict[str, Any]:
    case = Case.of("gemm", {"n": n})
    return {"suite": case.suite, "case_id": case.case_id, "axes": case.axes_json}


def row(metric: str = "time_ms", ms: float = 1.0, n: int = 1, **more: Any) -> Measurement:
    """What a sweep stores of two blocks, or of a check."""
    timed: dict[str, Any] = {"samples": (ms,)}
    if metric == "time_ms":
        timed = {"samples": (ms, 1.00001 * ms) * 2, "rounds": (0, 0, 1, 1), "regime": "isolated"}
        timed |= {"timing": {"method": "m", "l2": "cold", "late_samples": 2}}
        timed |= {"sample_clock_mhz": (1980.0,) * 4, "bytes_moved": 4.0, "flops": {"e4m3": 2.0}}
    return Measurement(**{**about(n), "arm": "fp8", "metric": metric, "status": "ok", **timed, **more})


SOUND = (row(), row("sqnr_db", 28.0), row("compile_s", 1.5))


class Scripted:
    """In the place of a sweep's process: rows by case, an ending or a silence at a message, and how many live."""

    SIDES: ClassVar[dict[str, dict[str, Any]]] = {}
    living = most = started = 0

    def __init__(self, tree: Path, words: Sequence[str], folder: Path, *, in_turns: bool) -> None:
        assert in_turns
        self.script, self.folder, self.root = self.SIDES[tree.name], folder, tree
        self.messages, self.wanted, self.answer = 0, [""], object()
        Scripted.living += 1
        Scripted.started += 1
        Scripted.most = max(Scripted.most, Scripted.living)

    def reply(self, answer: object) -> None:
        self.answer = answer
        if isinstance(answer, str):
            self.wanted.append(answer)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        if self.messages == self.script.get("ends"):
            raise EndedError("ended with code 1: no memory left", 1)
        if self.messages == self.script.get("hangs") and Scripted.started > 2:
            time.sleep(timeout_s)
            raise EndedError("no answer", None)
        self.messages += 1
        if self.answer is not False and self.wanted[1:] and not self.script.get("unfit"):
            return {"block": 0}
        cases = [{**about(n), "seed": 0, "arms": {"fp8": ""}} for n in self.script.get("cases", (1,))]
        return {"version": VERSION, "root": str(self.root.resolve()), "cases": cases}

    def rows(self) -> Any:
        said = self.script["rows"]
        rows = [r for r in (said(Scripted.started) if callable(said) else said) if r.case_id in self.wanted]
        if rows and self.messages != self.script.get("ends"):
            writer = store.RunWriter(
                self.folder, run_id="run", sweep="x", env_id="e", env={"device": "cuda"}, about={}
            )
            writer.append(rows)
        return store.read(self.folder)

    def close(self) -> None:
        Scripted.living -= 1


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a session whose sides answer by scripts."""

    def make(**sides: dict[str, Any]) -> Session:
        monkeypatch.setattr(sweeping, "Sweep", Scripted)
        monkeypatch.setattr(Scripted, "SIDES", sides)
        for name in ("living", "most", "started"):
            monkeypatch.setattr(Scripted, name, 0)
        trees = {side: tmp_path / side for side in sides}
        return Session(Sweeping(trees, ["sweep=x"], blocks=2), load_policy(), tmp_path / "r")

    return make


SCRIPT: dict[str, Any] = {"rows": SOUND}


def judged(sitting: Session, **policy: Any) -> Judgement:
    sitting.policy = dataclasses.replace(sitting.policy, **policy)
    sitting.instrument.blocks = sitting.policy.blocks
    return sitting.run()


def timed_rows(folder: Path) -> Any:
    return store.read(folder).query("metric == 'time_ms'")


@pytest.mark.parametrize("ends", [1, 2, 3])
def test_a_sweep_that_ends_early_fails_its_case_and_no_other_side(scripted: Any, ends: int) -> None:
    """While it prepares, in a block, or before it says that the case has ended."""
    sitting = scripted(baseline=SCRIPT, candidate={**SCRIPT, "ends": ends})
    sitting.stage(1, 2)
    (good,), (bad,) = (
        timed_rows(sitting.folder / side).to_dict("records") for side in ("baseline", "candidate")
    )
    reason = "its process ended with code 1: no memory left (round 0)"
    assert (good["status"], bad["status"], bad["reason"], bad["cause"]) == ("ok", "failed", reason, "died")


def test_a_sweep_that_ended_takes_no_further_part_in_its_round(scripted: Any) -> None:
    rows = {"cases": (1, 2), "rows": (row(), row(n=2))}
    sitting = scripted(baseline=rows, candidate={**rows, "ends": 2})
    sitting.stage(1, 1)
    cases = [timed_rows(sitting.folder / side)["case_id"].tolist() for side in ("baseline", "candidate")]
    assert cases == [[CASE, OTHER], [CASE]]


@pytest.mark.parametrize(
    "script",
    [{"ends": 0, "rows": ()}, {"cases": (), "rows": (), "root": "elsewhere"}],
    ids=["ended", "elsewhere"],
)
def test_a_side_that_cannot_plan_or_is_of_another_tree_is_refused(
    tmp_path: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch, script: dict[str, Any]
) -> None:
    sitting = scripted(candidate=SCRIPT, baseline=script)
    if "root" in script:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "baseline").symlink_to(tmp_path / "elsewhere")
        monkeypatch.setattr(Path, "resolve", Path.absolute)  # what a sweep says is its own path
        real = Scripted.receive
        monkeypatch.setattr(
            Scripted, "receive", lambda self, s: {**real(self, s), "root": str(tmp_path / "elsewhere")}
        )
    with pytest.raises(GateError if "root" in script else SideError):
        sitting.stage(1, 2)
    assert not list(tmp_path.rglob("*.parquet"))


# The time budget


class Clock:
    """Each reading is so many seconds after the last; or only rounds move it."""

    def __init__(self, reading: float = 0.0) -> None:
        self.reading, self.now, self.rounds = reading, 0.0, 0

    def __call__(self) -> float:
        self.now += self.reading
        return self.now


def test_a_round_that_does_not_end_in_time_is_broken_off_and_forgotten(scripted: Any) -> None:
    """Real time: the candidate hangs in its second process."""
    sitting = scripted(baseline=SCRIPT, candidate={**SCRIPT, "hangs": 2})
    assert sitting.stage(1, 10, ends=time.monotonic() + 2.0) == 1
    rows = timed_rows(sitting.folder)
    assert (set(rows["status"]), {frozenset(r) for r in rows["rounds"]}) == ({"ok"}, {frozenset({0})})


def test_time_for_no_round_at_all_is_refused(tmp_path: Path, scripted: Any) -> None:
    with pytest.raises(GateError, match=r"not one round was measured .* --budget-s"):
        judged(scripted(baseline=SCRIPT, candidate=SCRIPT), budget_s=1.0)
    assert not list((tmp_path / "r").rglob("*"))


class Stream(Instrument):
    """Rounds whose log ratios are known by case, of so many seconds each; nothing is run."""

    def __init__(self, seconds: float, **logs: Sequence[float]) -> None:
        super().__init__({"baseline": Path(), "candidate": Path()}, ["sweep=x"], 1)
        self.seconds, self.logs, self.clock, self.told = seconds, logs, Clock(), list[str]()

    def measure(self, this: GateRound) -> None:
        for side, told in this.collected.items():
            told.env, told.env_id = {"device": "cuda"}, "e"
            for name, logs in self.logs.items():
                ms = math.exp(logs[self.clock.rounds]) if side == "candidate" else 1.0
                suite = CONTROL_SUITE if name == "control" else "gemm"
                told.rows.append((this.number, row(ms=ms, case_id=name, suite=suite)))
        self.clock.now += self.seconds
        self.clock.rounds += 1

    def session(self, folder: Path) -> Session:
        return Session(
            self,
            load_policy(),
            folder,
            report=self.told.append,
            clock=self.clock,
        )


SLOWER = [0.18] * 20


@pytest.mark.parametrize(("seconds", "rounds"), [(20.0, 6 + 8), (22.0, 5 + 8)])
def test_the_budget_keeps_time_for_the_confirmation(tmp_path: Path, seconds: float, rounds: int) -> None:
    """300 s less 5 for judging. Rounds of 20 s: six to flag and eight to confirm, not seven and none."""
    stream = Stream(seconds, a=SLOWER)
    found = judged(stream.session(tmp_path))
    assert (found.findings[0].rounds, stream.clock.rounds, found.code) == (rounds, rounds, Exit.REGRESSED)


def test_a_budget_that_cannot_hold_a_decision_is_refused_after_one_round(tmp_path: Path) -> None:
    """Rounds of 27 s: 300 s hold fewer than the 13 of a decision, which take 351 s. A fifth more and 5 s are advised."""
    stream = Stream(27.0, a=SLOWER)
    with pytest.raises(GateError, match=r"--budget-s 430$") as caught:
        judged(stream.session(tmp_path))
    assert (caught.value.code, stream.clock.rounds) == (Exit.USAGE, 1)
    # no time decides there, so none is missed
    assert judged(stream.session(tmp_path), on_slower="warn", pairs=2).code is Exit.OK


NOISY = np.random.default_rng(0).normal(0, 0.4, 20)
LOUD = 2.5 * NOISY
QUIET = [0.001, -0.001] * 10
UNSETTLED = [0.05, -0.05] * 10
WIDENED = [0.01, -0.01] * 3 + [0.065, -0.065] * 2 + [0.0] * 10  # open after ten rounds
TWICE = (
    [0.05, -0.05] * 5 + [0.08, -0.08] * 7 + [0.0] * 26
)  # open after ten rounds, and after those that were added
STEADY, MOVED = [0.001, -0.001] * 10, [0.031, 0.029] * 10  # the control case, of which 1.5 % are allowed


@pytest.mark.parametrize(
    ("logs", "seconds", "rounds", "code"),
    [
        ({"a": LOUD, "b": -LOUD}, 7.0, 10, 6),  # no round more would do
        ({"a": NOISY, "b": SLOWER}, 7.0, 10 + 10, 1),
        ({"a": QUIET}, 7.0, 10, 0),
        ({"a": UNSETTLED}, 22.0, 5, 6),  # the time holds no more of them
        ({"a": [0.03, -0.03] * 10}, 7.0, 10, 0),  # open after five rounds, decided by ten
        ({"a": [0.01, -0.01] * 3 + [0.08, -0.08] * 2 + [0.0] * 16}, 2.0, 26, 0),  # what 99 % takes
        ({"a": WIDENED, "control": STEADY}, 2.0, 20, 0),  # ten, and as many again
        ({"a": TWICE}, 2.0, 50, 0),  # and as many again
        ({"a": TWICE}, 7.0, 25, 6),  # the time does not hold those
        ({"a": WIDENED, "control": MOVED}, 2.0, 10, 3),  # no round more is worth its time
        ({"a": WIDENED, "control": [0.014, 0.012] * 5 + MOVED}, 2.0, 20, 3),  # it moved in those
        ({"a": SLOWER, "control": MOVED}, 2.0, 10, 3),  # nor one of the confirmation
    ],
)
def test_while_more_rounds_settle_what_is_open_and_fit_it_goes_on(
    tmp_path: Path, logs: dict[str, Sequence[float]], seconds: float, rounds: int, code: int
) -> None:
    stream = Stream(seconds, **logs)
    found = judged(stream.session(tmp_path))
    assert (stream.clock.rounds, int(found.code)) == (rounds, code)


def test_rounds_that_were_added_are_another_look(tmp_path: Path) -> None:
    """Oracle: scipy's intervals over all rounds: 95 % of the first look, 99 % of the second, 99.5 % of the third."""
    for logs, confidence in ((QUIET[:10], 0.95), (WIDENED, 0.99), (TWICE, 0.995)):
        stream = Stream(2.0, a=logs)
        found = judged(stream.session(tmp_path / str(confidence))).findings[0]
        rows = np.array(logs)
        expected = scipy.stats.t.interval(confidence, len(rows) - 1, rows.mean(), scipy.stats.sem(rows))
        tick = 2e-5  # of the clock of `row`
        assert (found.low, found.high) == pytest.approx(tuple(map(math.exp, expected)), abs=tick)


def test_a_session_without_a_limit_of_time_has_all_its_rounds(tmp_path: Path) -> None:
    """What is left of it is infinite; the first rounds decided nothing."""
    stream = Stream(20.0, a=NOISY)
    assert judged(stream.session(tmp_path), budget_s=0.0, pairs=6).code is Exit.INCONCLUSIVE
