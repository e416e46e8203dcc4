"""A sweep of sweeps: slots, order, what a part keeps that is cut off, refused or killed. Oracle: the contract, on toys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toy import ToySuite, offered

from harness import store
from harness.__main__ import main
from harness.cli import parts as parts_module
from harness.cli.parts import CUT, REHEARSAL, TRIES, Part, within
from harness.engine import places
from harness.engine.runlog import notes
from harness.machine import device_lock
from harness.machine.processes import interruptible
from harness.report import summary
from harness.store.case import Case
from harness.store.errors import Cause
from harness.store.measurement import Measurement
from harness.timing.workload import Numerics, Workload

MINE = """# Mine?
parts:
  late: {sweep: toy, priority: 2, estimate_s: 100, overrides: {axes.n: [3]}}
  first: {sweep: toy, estimate_s: 50, overrides: {axes.n: [1]}}
  steps: {sweep: toy, estimate_s: 200, overrides: {axes: {n: [2]}, arms: [base, other]}}
"""
WHOLE = ["sweep=mine", "device=cpu", "report=false", "quiet=true"]
FOLDER = Path("results/mine/r")
NAMES = ["first", "steps", "late"]


def row(arm: str = "bf16_eager", status: Any = "ok", cause: Cause = Cause.NONE) -> Measurement:
    timed = status in ("ok", "partial")
    return Measurement(
        "train", "c1", arm, '{"model": "nano"}', "time_ms", status, reason="" if status == "ok" else f"is {status}", cause=cause,
        regime="isolated", samples=(1.0,) * timed, rounds=(0,) * timed,
    )  # fmt: skip


class Builds:
    """The cases that were built, and what building one of them does; measured in this process."""

    def __init__(self, suite: ToySuite) -> None:
        self.seen: list[int] = []
        self.acts: dict[int, Callable[[], object]] = {}
        suite.behaviour = {"base": self}

    def __call__(self, case: Case) -> Workload:
        self.seen.append(case.integer("n"))
        self.acts.get(case.integer("n"), int)()
        return Workload(run=int, check=lambda: Numerics({"sqnr_db": 30.0}))


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    suite = offered([1], tmp_path, monkeypatch)
    Path("sweeps/mine.yaml").write_text(MINE)
    return Builds(suite)


def state() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = store.read_about(FOLDER)["parts"]
    return found


def test_a_slot_starts_by_priority_what_it_has_room_for_and_resume_the_rest(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WHOLE, "run_id=r", "budget_s=190", "seed=7"]) == 0, "what is left is no failure"
    assert capsys.readouterr().out.splitlines()[-1] == "left: steps; resume=r continues"
    assert builds.seen == [1, 3]
    assert store.read_about(FOLDER)["state"] == "interrupted"
    assert main(["resume=r", "seed=8"]) == 2
    assert "would change what this run measures" in capsys.readouterr().err
    assert main(["resume=r", "budget_s=null"]) == 0
    assert builds.seen == [1, 3, 2]
    assert "nothing is left" in capsys.readouterr().out
    assert main(["resume=r-first"]) == 0, "a part is a run of its own"
    assert store.read_about(FOLDER)["state"] == "finished"
    assert all(mine["ok"] and mine["tries"] == 1 for mine in state().values())
    rows = store.read(FOLDER)
    assert set(rows["seed"]) == {7}, "a key that every part is given"
    assert {json.loads(axes)["n"] for axes in rows["axes"]} == {1, 2, 3}
    assert main(["resume=r"]) == 0
    assert len(builds.seen) == 3
    (note,) = notes(FOLDER)
    assert (note.state, note.share, note.total) == ("finished", 1.0, 3), "also where nothing was started"


def test_the_timetable(builds: Builds, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the estimates by hand: 50, 200 and 100 s, by priority, in slots of 280 s and of 120 s."""
    assert main([*WHOLE, "dry_run=true", "budget_s=280"]) == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:-1]] == [
        ["1", "0:00", "50", "first"], ["1", "0:50", "200", "steps"], ["2", "0:00", "100", "late"],
    ]  # fmt: skip
    assert main([*WHOLE, "dry_run=true", "budget_s=120"]) == 0
    assert "slots of 120 s are too short" in capsys.readouterr().out
    assert not Path("results").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("signals_are_heard")
def test_a_part_that_is_cut_off_is_tried_again_and_given_up(builds: Builds) -> None:
    builds.acts = {1: lambda: time.sleep(30)}
    Path("sweeps/mine.yaml").write_text(MINE.replace("estimate_s: 50", "estimate_s: 0.5"))
    for tried in range(1, TRIES + 1):
        assert main([*WHOLE, "run_id=r" if tried == 1 else "resume=r"]) == (tried == TRIES)
        assert (state()["first"]["tries"], state()["first"]["exit"]) == (tried, CUT)
    assert main([*WHOLE, "resume=r"]) == 1
    assert state()["first"]["tries"] == TRIES, "given up"
    assert [n for n in builds.seen if n > 1] == [2, 3]
    assert store.read_about(FOLDER)["state"] == "interrupted"


def test_a_refusal_is_no_try_and_a_fault_costs_its_part_alone(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sweeps/mine.yaml").write_text(MINE.replace("{axes.n: [1]}", "{axes.n: [-1]}"))
    real = parts_module.within

    def breaks(seconds: float, work: Callable[[], int]) -> int:
        if real(seconds, work) == 0 and builds.seen == [2]:
            raise RuntimeError("a bug")
        return 0

    monkeypatch.setattr(parts_module, "within", breaks)
    assert main([*WHOLE, "run_id=r"]) == 1
    assert "axes.n=-1" in capsys.readouterr().err
    assert {name: (mine["tries"], mine["exit"], mine["done"]) for name, mine in state().items()} == {
        "first": (0, 2, False), "steps": (1, 7, False), "late": (1, 0, True),
    }  # fmt: skip


def test_what_ends_a_slot_loses_no_row(builds: Builds, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupts() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    builds.acts = {2: interrupts}
    assert main([*WHOLE, "run_id=r"]) == 2
    assert "left: steps, late; resume=r continues" in capsys.readouterr().out.splitlines()
    assert state()["steps"]["tries"] == 1
    assert set(store.read(FOLDER)["status"]) == {"ok"}
    builds.acts = {}
    assert main([*WHOLE, "resume=r"]) == 0
    assert builds.seen == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("exit_code", "rows", "done", "ok"),
    [
        (0, [row()], True, True),
        (0, [row(), row("a", "skipped", Cause.UNSUPPORTED)], True, True),
        (0, [row("a", "skipped", Cause.UNSUPPORTED)], True, False),
        (1, [row(), row("a", "failed", Cause.NUMERICS)], True, False),
        (1, [row(), row("a", "failed", Cause.DEVICE_LOST)], False, False),
        (0, [row(), row("a", "skipped", Cause.BUDGET)], False, False),
        (CUT, [row("b", "partial")], False, False),
        (None, [row("b", "partial")], False, False),
        (2, [row()], False, False),
    ],
)
def test_what_rows_say_of_a_part(
    exit_code: int | None, rows: list[Measurement], done: bool, ok: bool, tmp_path: Path
) -> None:
    writer = store.RunWriter(tmp_path, run_id="r", sweep="s", env_id="e", env={}, about={})
    writer.append(rows)
    mine = Part("a", "toy", exit=exit_code)
    mine.settle(store.read(tmp_path))
    assert (mine.done, mine.ok) == (done, ok)


@pytest.mark.parametrize(
    "text",
    [
        "parts: {a: {sweep: cast}, b: {suite: cast}}",
        "parts: {a: {sweep: cast, axes: {M: [8]}}}",
        "parts: {a: {sweep: cast, estimate_s: -1}}",
        "parts: {a: {sweep: no_such_sweep}}",
        "parts: {a: {sweep: cast, overrides: {no_such_key: 1}}}",
    ],
)
@pytest.mark.usefixtures("builds")
def test_parts_that_cannot_be_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweeps/mine.yaml").write_text(f"# Mine?\n{text}")
    assert main(WHOLE) == 2
    assert "part" in capsys.readouterr().err
    assert not Path("results").exists()


def test_a_key_that_no_part_has_is_refused_by_the_part(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WHOLE, "timing.min_round=3"]) == 2
    assert main([*WHOLE, "axes.nn=3"]) == 2
    assert "part first: " in capsys.readouterr().err
    assert main([*WHOLE, "shard=0/2"]) == 2, "half of each part would pass for the whole"
    assert "shard=0/2: sweep 'mine' is made of sweeps" in capsys.readouterr().err
    assert builds.seen == []


def test_a_text_that_is_none_is_refused_before_anything_is_measured(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any name will do for the file, also one that JSON would escape."""
    Path("sweeps/mine.yaml").write_text(
        MINE + "  text: {sweep: nanogpt_char, priority: 3, overrides: {data: shakespeare}}"
    )
    Path("ein é.txt").write_text("another")
    assert main([*WHOLE, "data_path=ein é.txt"]) == 2
    assert "ein é.txt is not nanoGPT's text" in capsys.readouterr().err
    assert main([*WHOLE, "data_path=none.txt"]) == 2
    assert "part text: data=shakespeare: no file " in capsys.readouterr().err
    assert builds.seen == []


def test_what_is_said_of_a_part_that_was_killed() -> None:
    """Nothing but its try was noted; it is not said to be without rows, nor not to have been started."""
    assert str(Part("a", "toy")).split(None, 1)[1] == "not started, unfinished"
    assert str(Part("a", "toy", tries=1)).split(None, 1)[1] == "interrupted, 0 s, unfinished"


HOLD = (
    "from harness.machine.device_lock import held\nwith held(['u1']):\n    print('held', flush=True); input()"
)


def test_beside_another_sweep_of_its_gpu_it_is_refused_as_a_whole(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its own parts, which take the same lock, pass."""
    monkeypatch.setenv(device_lock.FOLDER_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr(places, "chosen", lambda *_: [places.Gpu(0, "u1")])
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert main([*WHOLE, "run_id=r"]) == 2
        assert f"GPU u1 is in use by another sweep (process {other.pid})" in capsys.readouterr().err
        other.kill()
    assert not FOLDER.exists()
    assert main([*WHOLE, "run_id=r"]) == 0
    assert builds.seen == [1, 2, 3]


# Deadlines. Oracle: a clock, and signals that this process sends to itself.


@pytest.fixture
def _signals_restored() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with interruptible():
        yield
    signal.signal(signal.SIGTERM, before)


def records_its_end(seconds: float, then_s: float = 0.0, code: int = 0) -> Callable[[], int]:
    """A sweep: it records that it was interrupted, which takes `then_s`, and returns 2."""

    def work() -> int:
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            time.sleep(then_s)
            return 2
        return code

    return work


def sleeps() -> int:
    time.sleep(3.0)
    return 0


@pytest.mark.usefixtures("_signals_restored")
def test_a_part_is_cut_off_at_its_own_deadline() -> None:
    for work in (sleeps, records_its_end(3.0)):
        began = time.monotonic()
        assert within(0.2, work) == CUT
        assert time.monotonic() - began < 1.5
    assert within(5.0, records_its_end(0.1, code=1)) == 1


@pytest.mark.usefixtures("_signals_restored")
def test_a_signal_soon_after_a_cut_lets_the_sweep_record_its_end() -> None:
    """A scheduler may end the command at the deadline of its last part."""
    recorded: list[bool] = []

    def work() -> int:
        try:
            time.sleep(3.0)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            recorded.append(True)
        return 2

    with pytest.raises(KeyboardInterrupt):
        within(0.1, work)
    assert recorded


@pytest.mark.usefixtures("_signals_restored")
@pytest.mark.parametrize(
    ("deadline", "signalled", "work"),
    [
        (10.0, 0.3, sleeps),
        (10.0, 0.3, records_its_end(3.0)),
        (0.1, 0.5, records_its_end(3.0, then_s=0.8)),  # while it records that it was cut off
        (0.3, 0.1, records_its_end(3.0, then_s=0.6)),  # and a deadline after the signal
    ],
)
def test_a_signal_ends_the_whole(deadline: float, signalled: float, work: Callable[[], int]) -> None:
    assert within(0.1, sleeps) == CUT, "however soon before"
    later = threading.Timer(signalled, os.kill, [os.getpid(), signal.SIGTERM])
    later.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        within(deadline, work)
    assert time.monotonic() - began < 2.5
    later.join()


def test_the_summary_has_speedups_cast_shares_and_failures(tmp_path: Path) -> None:
    """Oracle: the samples, by hand."""

    def timed(suite: str, arm: str, ms: float, baseline: str = "", moved: float = 0.0) -> Measurement:
        samples = (ms * 0.999, ms, ms * 1.001) * 3
        return Measurement(
            suite, f"c-{suite}", arm, '{"model":"m"}', "time_ms", "ok", baseline=baseline, regime="isolated", samples=samples,
            rounds=(0, 0, 0, 1, 1, 1, 2, 2, 2), bytes_moved=moved,
        )  # fmt: skip

    writer = store.RunWriter(tmp_path, run_id="r", sweep="s", env_id="e", env={"device": "cuda"}, about={})
    writer.append(
        [
            timed("train", "bf16_eager", 120.0),
            timed("train", "tensorwise_eager", 100.0, "bf16_eager"),
            timed("cast", "copy", 1.0, moved=4.0),
            timed("cast", "fused", 1.0, moved=3.0),
            row("other", "failed", Cause.NUMERICS),
        ]
    )
    found = list(summary.lines(store.read(tmp_path)))
    assert found[0].startswith("failed: 1 rows, first other")
    assert "tensorwise_eager 1.200x of bf16_eager, 100 ms" in found[1]
    assert "fused 0.750x" in found[2]
    assert len(found) == 3


@pytest.mark.slow
def test_the_rehearsal_ends(tmp_path: Path) -> None:
    """What a run that is killed keeps: tests/harness/engine/test_survival.py."""
    words = [sys.executable, "-m", "harness", "sweep=gpu", "device=cpu", "budget_s=3600", f"results_dir={tmp_path}", f"reports_dir={tmp_path}"]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "data=shakespeare cannot be downloaded" in done.stderr, (
        done.stdout[-3000:] + done.stderr
    )
    assert done.stdout.splitlines()[-1] == REHEARSAL
    (folder,) = (path.parent for path in (tmp_path / "gpu").glob("*/_run.json"))
    state = store.read_about(folder)["parts"]
    assert [name for name, mine in state.items() if not mine["done"]] in (
        [],
        ["nanogpt_char"],
    )  # its text may be missing
    assert "partial" not in set(store.read(folder)["status"])
    assert "Measured on a CPU" in (tmp_path / f"{folder.name}.md").read_text()
