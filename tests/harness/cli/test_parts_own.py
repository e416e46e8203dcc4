"""Needs and priorities of parts, and real sweeps of a user's own folder that are cut off or killed."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from parts_machine import PART, PARTS

from harness import store
from harness.cli import parts as whole_module
from harness.cli.config import load
from harness.cli.parts import REHEARSAL
from harness.cli.sweep import run_sweep
from harness.engine import parts as schedule
from harness.engine.parts import CUT, TRIES, Part, Progress, parts_of
from harness.store.cause import Cause
from harness.store.compare import rows_of
from harness.store.errors import UsageError


@pytest.fixture(autouse=True)
def _any_text_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_module, "corpus", lambda name, path: None)


def scheduled(**needs: Sequence[str]) -> list[Part]:
    return [Part(name, "cast", needs=tuple(of), estimate_s=10.0) for name, of in needs.items()]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Progress(done=True, ok=True, tries=1), None),
        (Progress(done=True, tries=1, cause=Cause.NUMERICS), Cause.NUMERICS),
        (Progress(tries=TRIES, cause=Cause.BUDGET), Cause.BUDGET),
        (Progress(tries=1, cause=Cause.DIED), Cause.BUDGET),  # it waits, and may be started in the next slot
    ],
)
def test_a_part_whose_need_failed_is_skipped_with_its_cause(first: Progress, second: Cause | None) -> None:
    parts = scheduled(a=(), b=("a",))
    state = {"a": first, "b": Progress()}
    begun = []

    def measure(part: Part, mine: Progress, seconds: float) -> None:
        begun.append(part.name)
        mine.tries += 1
        if part.name == "b":
            mine.done = mine.ok = True

    schedule.run_slot(parts, state, math.inf, {}, measure, lambda: 0.0)
    assert ("b" in begun) == (second is None)
    assert state["b"].cause == (second or Cause.NONE)


def config_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> dict[str, Any]:
    (tmp_path / "sweeps").mkdir(exist_ok=True)
    (tmp_path / "sweeps" / "mine.yaml").write_text(f"# Mine?\n{text}")
    monkeypatch.chdir(tmp_path)
    return load(["sweep=mine"], lambda device: "cpu").config


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("parts: {a: {sweep: cast, needs: [b]}, b: {sweep: cast, needs: [a]}}", "a, b need each other"),
        ("parts: {a: {sweep: cast, needs: [c]}}", "need 'c'"),
        ("parts: {a: {sweep: cast, checked_by: [c]}}", "part 'c'"),
        ("parts: {a: {sweep: cast}, b: {suite: cast}}", "part b names no sweep"),
        ("parts: {a: {sweep: cast, axes: {M: [8]}}}", "part a is a sweep: write parts.a.overrides"),
    ],
)
def test_parts_that_cannot_be_are_refused(
    text: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=refused):
        parts_of(config_of(tmp_path, monkeypatch, text), ())


def test_the_lowest_priority_is_first_then_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "parts: {a: {sweep: cast, priority: 2}, b: {sweep: cast}, c: {sweep: gemm, priority: 2}, d: {sweep: gemm}}"
    assert [part.name for part in parts_of(config_of(tmp_path, monkeypatch, text), ())] == [
        "b",
        "d",
        "a",
        "c",
    ]


def test_a_part_that_has_no_room_makes_room_for_the_next() -> None:
    parts = [Part("long", "cast", estimate_s=100.0), Part("short", "cast", estimate_s=10.0)]
    lines = schedule.timetable(parts, 60.0)
    assert [(line.slot, line.part.name) for line in lines] == [(1, "short")]
    lines = schedule.timetable(parts, 110.0)
    assert [(line.slot, line.part.name) for line in lines] == [(1, "long"), (2, "short")]


QUICK = """timing.min_seconds: 0.01, timing.max_seconds: 0.05, timing.min_samples: 3, timing.block_ms: 2,
    timing.warmup_min_seconds: 0.01, timing.warmup_max_seconds: 0.05, rounds: 3, isolate: false"""


TWO = f"""
parts:
  products:
    sweep: gemm
    overrides: {{axes: {{M: 32, K: 32, N: 32, role: output}}, arms: [bf16, tensorwise_eager], {QUICK}}}
  never: {{sweep: cast, needs: [gpu]}}
  wrong: {{sweep: cast, priority: 1, overrides: {{axes.dtype: nonsense}}}}
  after: {{sweep: cast, priority: 2, needs: [wrong]}}
  casts:
    sweep: cast
    priority: -1
    overrides: {{axes.M: 64, axes.K: 64, axes.dtype: e4m3fn, axes.granularity: tensorwise, axes.src: bf16, arms: [eager, copy],
      {QUICK}}}
"""


def test_a_users_own_sweep_of_two_parts_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: what the file says. Of five parts two are measured, one is refused, one needs that one, one needs a GPU."""
    config_of(tmp_path, monkeypatch, TWO)
    words = ["sweep=mine", "device=cpu", "seed=7", "quiet=true", "resume=last"]
    assert run_sweep(words) == 1
    (folder,) = (tmp_path / "results" / "mine").iterdir()
    about = store.read_about(folder)
    assert about["state"] == "interrupted"  # the part that is refused may be mended, however often
    mine = about["parts"]
    assert {name: (p["ok"], p["cause"]) for name, p in mine.items()} == {
        "casts": (True, ""),
        "products": (True, ""),
        "never": (False, "missing"),
        "wrong": (False, "refused"),
        "after": (False, "budget"),  # it waits
    }
    rows = store.read(folder)
    assert set(rows["sweep"]) == {"cast", "gemm"}
    assert set(rows["seed"]) == {7}
    first = rows.groupby("sweep")["created_at"].min()
    assert first["cast"] < first["gemm"], "the lower number is started first"
    assert (tmp_path / "reports" / f"{folder.name}.html").exists()
    assert "axes.dtype='nonsense': expected one of" in capsys.readouterr().err
    assert [run_sweep(words) for _ in range(TRIES - 1)] == [1, 1]
    assert [path.name for path in (tmp_path / "results" / "mine").iterdir()] == [folder.name], (
        "one run, slot after slot"
    )
    again = store.read_about(folder)
    assert again["parts"]["casts"]["tries"] == 1, "what is done is not run again"
    assert (again["parts"]["wrong"]["tries"], again["parts"]["wrong"]["retryable"]) == (0, True)
    assert again["parts"]["after"]["cause"] == "budget", "it waits for the part that it needs"
    assert again["state"] == "interrupted"
    assert len(store.read(folder)) == len(rows)


def test_dry_run_of_a_users_own_sweep_prints_its_timetable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of(tmp_path, monkeypatch, TWO)
    assert run_sweep(["sweep=mine", "device=cpu", "dry_run=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines[1:6]] == ["casts", "products", "wrong", "after", "never"]
    assert "skipped: needs a GPU" in lines[5]
    assert not (tmp_path / "results").exists()


SWEEP = """# Takes a while
suite: cast
axes: {dtype: [e4m3fn], granularity: [tensorwise], src: [bf16], M: [64], K: [64]}
arms: [eager, copy]
isolate: false
rounds: 500
report: false
timing: {min_samples: 1, min_seconds: 0.0, block_ms: 20, max_block_samples: 100000, warmup_min_iterations: 1,
         warmup_min_seconds: 0.0, warmup_max_seconds: 0.1, max_seconds: 60, checkpoint_s: 0}
"""


# An interrupt may come while a file is opened; what was written then is no part of the store.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_sweep_that_runs_too_long_is_cut_off_and_keeps_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "long.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    words = ["sweep=long", "device=cpu", "run_id=r1", "quiet=true"]
    run = tmp_path / "results" / "long" / "r1"

    class Deadline(threading.Timer):
        """Comes when two rounds are stored, however long that takes."""

        def run(self) -> None:
            while not self.finished.is_set():
                if any(run.glob("*.parquet")) and store.read(run)["rounds"].map(len).max() > 1:
                    self.function()
                    return
                time.sleep(0.01)

    with monkeypatch.context() as patched:
        patched.setattr(schedule.threading, "Timer", Deadline)
        assert schedule.within(4.0, lambda: run_sweep(words)) == CUT
    times = store.read(tmp_path / "results" / "long" / "r1")
    times = times[times["metric"] == "time_ms"]
    assert set(times["status"]) == {"partial"}


def told_by(results: Path) -> dict[tuple[str, str, str], int]:
    """Rounds of every case and arm that the store has, by run."""
    found: dict[tuple[str, str, str], int] = {}
    if not any(results.rglob("*.parquet")):
        return found
    rows = store.read(results)
    for r in rows_of(
        rows[rows["metric"].isin(["time_ms", "launch_us"]) & rows["status"].isin(["ok", "partial"])]
    ):
        key = r["run_id"], r["case_id"], r["arm"]
        found[key] = max(found.get(key, 0), len(set(r["rounds"])))
    return found


@pytest.mark.slow
def test_the_rehearsal_killed_at_ten_random_moments(tmp_path: Path) -> None:
    """Oracle: what the store held just before each kill is still there after it, and at the end everything is done."""
    words = [sys.executable, "-m", "harness", "gpu", "device=cpu", "minutes=60", f"results_dir={tmp_path}"]
    moments = random.Random(20261122)
    for _ in range(10):
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            before = told_by(tmp_path)
            goal = sum(before.values()) + moments.randrange(1, 60)  # rounds of all arms
            while sum(before.values()) < goal and process.poll() is None:
                time.sleep(0.1)
                before = told_by(tmp_path)
            time.sleep(moments.uniform(0, 0.5))  # in the midst of the next one
            before = told_by(tmp_path)
            while process.poll() is None and any(
                mine["tries"] == TRIES and not mine["done"]
                for path in (tmp_path / "gpu").glob("*/_run.json")
                for mine in store.read_about(path.parent)["parts"].values()
            ):
                time.sleep(0.1)  # a part that is killed in its last try is given up
                before = told_by(tmp_path)
            process.kill()
        after = told_by(tmp_path)
        assert all(after.get(key, 0) >= rounds for key, rounds in before.items())
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    (folder,) = (path.parent for path in (tmp_path / "gpu").glob("*/_run.json"))
    state = store.read_about(folder)["parts"]
    assert all(state[part.name]["done"] for part in PARTS if "text" not in part.needs)
    assert "partial" not in set(store.read(folder)["status"])


@pytest.mark.slow
def test_the_rehearsal_for_real(tmp_path: Path) -> None:
    """Oracle: what the command promises: every part, three files, twenty lines between two that say what it is."""
    words = [sys.executable, "-m", "harness", "gpu", "device=cpu", "minutes=60", f"results_dir={tmp_path}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert REHEARSAL in lines
    assert lines[-1] == REHEARSAL
    (folder,) = (path for path in (tmp_path / "gpu").iterdir() if path.is_dir())
    files = sorted(path.name for path in (tmp_path / "gpu").iterdir() if path.is_file())
    assert files == [f"{folder.name}{ending}" for ending in (".html", ".md", ".parquet")]
    for name, mine in store.read_about(folder)["parts"].items():
        assert mine["done"] or (mine["cause"] == "missing" and "text" in PART[name].needs), mine
    first = next(i for i, line in enumerate(lines) if line.startswith("tests: "))
    assert 8 <= len(lines[first:-1]) <= 20
    assert "Measured on a CPU" in (tmp_path / "gpu" / f"{folder.name}.md").read_text()
