"""A sweep of sweeps: slots, order, what a part keeps that is cut off, refused or killed. Oracle: the contract, on scripts and a fake
clock in place of sweeps; then real ones."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness import store
from harness.cli import parts as parts_module
from harness.cli.config import load
from harness.cli.parts import CUT, LEAST_ROUNDS, PATIENCE, REHEARSAL, TRIES, Progress, Whole, parts_of, within
from harness.cli.sweep import run_sweep
from harness.engine import places, runlog, watch
from harness.machine import device_lock
from harness.machine.processes import interruptible
from harness.report import summary
from harness.store.cause import Cause
from harness.store.compare import rows_of
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.training.data import shakespeare

MINE = """# Mine?
parts:
  late: {sweep: cast, priority: 2, estimate_s: 100}
  first: {sweep: smoke, estimate_s: 50}
  steps: {sweep: train, estimate_s: 200, overrides: {model: nano, arms: [bf16_eager, tensorwise_eager], rounds: 8}}
"""
Script = Callable[[Sequence[str], store.RunWriter], int]


def said(words: Sequence[str], key: str) -> str:
    return next((word.partition("=")[2] for word in reversed(words) if word.startswith(f"{key}=")), "")


def row(arm: str = "bf16_eager", status: Any = "ok", cause: Cause = Cause.NONE) -> Measurement:
    timed = status in ("ok", "partial")
    return Measurement(
        "train", "c1", arm, '{"model": "nano"}', "time_ms", status, reason="" if status == "ok" else f"is {status}", cause=cause,
        regime="isolated", samples=(1.0,) * timed, rounds=(0,) * timed,
    )  # fmt: skip


def stores(*rows: Measurement, code: int = 0) -> Script:
    def script(words: Sequence[str], writer: store.RunWriter) -> int:
        writer.append(rows or [row()])
        return code

    return script


def cut(words: Sequence[str], writer: store.RunWriter) -> int:
    writer.checkpoint([row(status="partial")])
    return CUT


def raises(error: BaseException, *rows: Measurement) -> Script:
    def script(words: Sequence[str], writer: store.RunWriter) -> int:
        if rows:
            writer.checkpoint(rows)
        raise error

    return script


class Slots:
    """Commands, each a slot of one sweep; a part does what its script says, and takes `takes` of its estimate."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "results" / "mine" / "r"
        self.now, self.takes = 0.0, 1.0
        self.begun: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.most: dict[str, float] = {}

    def whole(self, budget: float | None = None, **scripts: Script) -> Whole:
        def measure(words: Sequence[str], seconds: float) -> int:
            name = said(words, "run_id").removeprefix("r-")
            self.begun.append(name)
            self.words[name], self.most[name] = list(words), seconds
            self.now += min(seconds, self.takes * {"first": 50, "steps": 200, "late": 100}[name])
            folder = Path(said(words, "results_dir")) / said(words, "sweep") / said(words, "run_id")
            writer = store.RunWriter(
                folder, run_id=folder.name, sweep=said(words, "sweep"), env_id="e", env={}, about={}
            )
            return parts_module._isolated(lambda words: scripts.get(name, stores())(words, writer), words)

        about = {"parts": store.read_about(self.folder).get("parts", {})}
        writer = runlog.LoggingWriter(self.folder, run_id="r", sweep="mine", env_id="e", env={}, about=about)
        words = ["sweep=mine", "report=false", f"budget_s={'null' if budget is None else budget}"]
        note = runlog.ProgressFile(writer)
        return Whole(
            load(words, lambda device: "cpu"), self.folder, writer, measure, lambda: self.now, note.write
        )

    def slot(self, budget: float | None = None, **scripts: Script) -> list[str]:
        return self.whole(budget, **scripts).slot()

    def end(self, budget: float | None = None, **scripts: Script) -> int:
        """The exit code of a command."""
        whole = self.whole(budget, **scripts)
        return parts_module._run_and_report(whole, whole._writer, runlog.ProgressFile(whole._writer))  # type: ignore[arg-type]

    def about(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = store.read_about(self.folder)["parts"][name]
        return found


@pytest.fixture
def slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slots:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return Slots(tmp_path)


def test_slots_start_all_parts_by_priority_and_gather_their_rows_in_one_file(slots: Slots) -> None:
    """Oracle: the estimates by hand; the rows of the parts' own folders, which the one file holds once."""
    assert slots.slot(budget=280) == ["late"]
    assert slots.about("late")["cause"] == "budget"
    assert slots.most == {"first": PATIENCE * 50, "steps": 280 - 50 - 5}, "what is left of the slot"
    assert slots.slot(budget=280) == []
    assert slots.begun == ["first", "steps", "late"]
    assert said(slots.words["late"], "budget_s") == f"{0.9 * PATIENCE * 100:g}"
    gathered = store.read(Path("reports/r.parquet"))
    assert len(gathered) == len(store.read(slots.folder)) == 3
    assert set(gathered["sweep"]) == {"smoke", "train", "cast"}
    assert slots.slot() == []
    assert len(slots.begun) == 3


def test_a_part_that_is_cut_off_keeps_its_rounds_and_is_tried_again_with_fewer(slots: Slots) -> None:
    rounds = []
    for tried in range(1, TRIES + 1):
        left = slots.slot(steps=cut)
        rounds.append(int(said(slots.words["steps"], "rounds")))
        mine = slots.about("steps")
        assert (mine["tries"], mine["done"], mine["cause"], mine["exit"]) == (tried, False, "budget", CUT)
        assert mine["statuses"] == {"partial": 1}
        assert left == ["steps"] * (tried < TRIES)
    assert rounds == [8, 4, LEAST_ROUNDS]
    assert slots.end() == 1, "given up"
    assert store.read_about(slots.folder)["state"] == "interrupted"


@pytest.mark.parametrize(
    ("exit_code", "rows", "done", "ok", "cause"),
    [
        (0, [row()], True, True, ""),
        (0, [row(), row("a", "skipped", Cause.UNSUPPORTED)], True, True, ""),
        (0, [row("a", "skipped", Cause.UNSUPPORTED)], True, False, "unsupported"),
        (1, [row(), row("a", "failed", Cause.NUMERICS)], True, False, "numerics"),
        (1, [row(), row("a", "failed", Cause.DEVICE_LOST)], False, False, "error"),
        (0, [row(), row("a", "skipped", Cause.BUDGET)], False, False, "budget"),
        (
            0,
            [row("b", "skipped", Cause.BUDGET), row("a", "failed", Cause.NUMERICS)],
            False,
            False,
            "numerics",
        ),
        (CUT, [row("b", "partial"), row("a", "failed", Cause.NUMERICS)], False, False, "numerics"),
        (CUT, [row("b", "partial")], False, False, "budget"),
        (None, [row("b", "partial")], False, False, "interrupted"),
        (2, [row()], False, False, "error"),
        (7, [], False, False, "error"),
        (CUT, [], False, False, "budget"),
    ],
)
def test_what_rows_say_of_a_part(
    exit_code: int | None, rows: list[Measurement], done: bool, ok: bool, cause: str, tmp_path: Path
) -> None:
    frame: pd.DataFrame | None = None
    if rows:
        writer = store.RunWriter(tmp_path, run_id="r", sweep="s", env_id="e", env={}, about={})
        writer.append(rows)
        frame = store.read(tmp_path)
    mine = Progress(exit=exit_code)
    mine.settle(frame)
    assert (mine.done, mine.ok, mine.cause) == (done, ok, cause)
    assert bool(mine.reason) == (not ok)


def test_a_refusal_is_no_try_and_a_fault_costs_its_part_alone(slots: Slots) -> None:
    for _ in range(TRIES + 1):
        slots.slot(first=raises(UsageError("the GPU is in use")), steps=raises(RuntimeError("a bug")))
    first, steps = slots.about("first"), slots.about("steps")
    assert (first["tries"], first["exit"], first["cause"]) == (0, 2, "refused")
    assert (steps["tries"], steps["exit"], steps["cause"]) == (TRIES, 7, "error")
    assert slots.about("late")["ok"]
    slots.slot(budget=0)
    assert slots.about("first")["cause"] == "refused"
    assert slots.end() == 1
    assert slots.about("first")["ok"]


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_slot_loses_no_round(slots: Slots, ending: type[BaseException]) -> None:
    """SystemExit stands for a kill: whatever was known before the part began must do."""
    for tried in range(1, TRIES + 1):
        with pytest.raises(ending):
            slots.slot(first=raises(ending(), row(status="partial")))
        mine = slots.about("first")
        assert (mine["tries"], mine["done"], mine["cause"]) == (tried, False, "interrupted")
        assert set(store.read(Path("reports/r.parquet"))["status"]) == {"partial"}
    slots.slot()
    assert slots.begun == ["first"] * TRIES + ["steps", "late"], "given up"


def test_the_end_of_a_slot(slots: Slots, capsys: pytest.CaptureFixture[str]) -> None:
    assert slots.end(first=raises(KeyboardInterrupt())) == 2
    assert "left: first, steps, late; resume=r continues" in capsys.readouterr().out.splitlines()
    assert slots.end(budget=200) == 0, "what is left is no failure"
    assert store.read_about(slots.folder)["state"] == "interrupted"
    assert slots.end(late=stores(row("a", "skipped", Cause.UNSUPPORTED))) == 0
    assert store.read_about(slots.folder)["state"] == "finished"
    capsys.readouterr()
    assert slots.end() == 0
    assert "nothing is left" in capsys.readouterr().out
    assert len(slots.begun) == 4


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
def test_parts_that_cannot_be_are_refused(text: str, slots: Slots) -> None:
    Path("sweeps/mine.yaml").write_text(f"# Mine?\n{text}")
    with pytest.raises(UsageError, match=r"\b(a|b)\b"):
        run_sweep(["sweep=mine", "device=cpu"])
    assert not Path("results").exists()


def test_a_part_that_needs_nanogpts_text_waits_for_it(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(slots.root))
    Path("sweeps/mine.yaml").write_text(MINE.replace("model: nano", "data: shakespeare"))
    assert slots.slot() == []
    assert (slots.about("steps")["cause"], slots.about("steps")["tries"]) == ("missing", 0)
    kept = shakespeare.kept()
    kept.parent.mkdir(parents=True)
    kept.write_text("To be")
    assert slots.slot() == []
    assert said(slots.words["steps"], "data_path") == str(kept)
    Path("other.txt").write_text("To be")
    with pytest.raises(UsageError, match="is not nanoGPT's text"):
        run_sweep(["sweep=mine", "device=cpu", "data_path=other.txt"])


def test_watch_says_what_has_become_of_the_parts(slots: Slots) -> None:
    """Oracle: what the script of the second part sees while it is under way."""
    seen = []

    def second(words: Sequence[str], writer: store.RunWriter) -> int:
        seen.append(json.loads((slots.folder / "_progress.json").read_text()))
        return stores()(words, writer)

    slots.slot(steps=second)
    assert seen[0]["share"] == pytest.approx(1 / 3)
    assert seen[0]["text"] == "steps is under way; done: first"


def test_beside_another_sweep_of_its_gpu_it_is_refused_as_a_whole(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Oracle: flock(2) of another open file; its own parts pass."""
    monkeypatch.setenv(device_lock.FOLDER_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr(places, "chosen", lambda *_: [places.Gpu(0, "u1")])
    words = ["sweep=mine", "device=cpu", "report=false", "run_id=r"]
    with device_lock.held(["u1"]):
        pass
    file = os.open(tmp_path / "locks" / "gpu-u1.lock", os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="GPU u1 is in use by another sweep"):
        run_sweep(words)
    assert not slots.folder.exists()
    os.close(file)
    within_it = []

    def slot(whole: Whole) -> list[str]:
        with device_lock.held(["u1"]):
            within_it.append(watch.look(whole.folder)[0].state)
        return []

    monkeypatch.setattr(Whole, "slot", slot)
    assert run_sweep(words) == 0
    assert within_it == ["running"]


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


# Real sweeps


QUICK = """timing.min_seconds: 0.01, timing.max_seconds: 0.05, timing.min_samples: 3, timing.block_ms: 2,
    timing.warmup_min_seconds: 0.01, timing.warmup_max_seconds: 0.05, rounds: 3, isolate: false"""
TWO = f"""# Mine?
parts:
  products: {{sweep: gemm, overrides: {{axes: {{M: 32, K: 32, N: 32, role: output}}, arms: [bf16_eager, tensorwise_eager], {QUICK}}}}}
  wrong: {{sweep: cast, priority: 1, overrides: {{axes.dtype: nonsense}}}}
  casts:
    sweep: cast
    priority: -1
    overrides: {{axes.M: 64, axes.K: 64, axes.dtype: e4m3fn, axes.granularity: tensorwise, axes.src: bf16, arms: [eager, copy],
      {QUICK}}}
"""


def test_a_users_own_sweep_for_real(slots: Slots, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: what the file says. Of three parts two are measured, once, and one is refused."""
    Path("sweeps/mine.yaml").write_text(TWO)
    words = ["sweep=mine", "device=cpu", "seed=7", "quiet=true", "resume=last"]
    assert run_sweep([*words, "dry_run=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[1:4]] == ["casts", "products", "wrong"]
    assert not Path("results").exists()
    assert run_sweep(words) == 1
    (folder,) = Path("results/mine").iterdir()
    about = store.read_about(folder)
    assert about["state"] == "interrupted"  # the part that is refused may be mended
    assert {name: (p["ok"], p["cause"]) for name, p in about["parts"].items()} == {
        "casts": (True, ""),
        "products": (True, ""),
        "wrong": (False, "refused"),
    }
    rows = store.read(folder)
    assert set(rows["sweep"]) == {"cast", "gemm"}
    assert set(rows["seed"]) == {7}
    first = rows.groupby("sweep")["created_at"].min()
    assert first["cast"] < first["gemm"]
    assert (Path("reports") / f"{folder.name}.html").exists()
    out = capsys.readouterr()
    assert "nonsense" in out.err
    assert "of the bandwidth of a copy" in out.out
    assert run_sweep(words) == 1
    assert [path.name for path in Path("results/mine").iterdir()] == [folder.name], "one run, slot after slot"
    assert len(store.read(folder)) == len(rows)


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


def rounds_of(results: Path) -> dict[tuple[str, str, str], int]:
    """Rounds of every case and arm that the store has, by run."""
    found: dict[tuple[str, str, str], int] = {}
    rows = store.read(results) if any(results.rglob("*.parquet")) else None
    for r in rows_of(rows) if rows is not None else ():
        if r["metric"] in ("time_ms", "launch_us") and r["status"] in ("ok", "partial"):
            key = r["run_id"], r["case_id"], r["arm"]
            found[key] = max(found.get(key, 0), len(set(r["rounds"])))
    return found


@pytest.mark.slow
def test_the_rehearsal_killed_at_ten_random_moments(tmp_path: Path) -> None:
    """Oracle: what the store held just before each kill is still there after it, and at the end everything is done."""
    words = [sys.executable, "-m", "harness", "sweep=gpu", "device=cpu", "budget_s=3600", f"results_dir={tmp_path}", f"reports_dir={tmp_path}"]  # fmt: skip
    moments = random.Random(20261122)
    for _ in range(10):
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            before = rounds_of(tmp_path / "gpu")
            goal = sum(before.values()) + moments.randrange(1, 60)  # rounds of all arms
            while sum(before.values()) < goal and process.poll() is None:
                time.sleep(0.1)
                before = rounds_of(tmp_path / "gpu")
            time.sleep(moments.uniform(0, 0.5))  # in the midst of the next one
            before = rounds_of(tmp_path / "gpu")
            while process.poll() is None and any(
                mine["tries"] == TRIES and not mine["done"]
                for path in (tmp_path / "gpu").glob("*/_run.json")
                for mine in store.read_about(path.parent)["parts"].values()
            ):
                time.sleep(0.1)  # a part that is killed in its last try is given up
                before = rounds_of(tmp_path / "gpu")
            process.kill()
        after = rounds_of(tmp_path / "gpu")
        assert all(after.get(key, 0) >= rounds for key, rounds in before.items())
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert done.stdout.splitlines()[-1] == REHEARSAL
    (folder,) = (path.parent for path in (tmp_path / "gpu").glob("*/_run.json"))
    config = load(["sweep=gpu"], lambda device: "cpu").config
    state = store.read_about(folder)["parts"]
    assert all(state[p.name]["done"] for p in parts_of(config) if p.overrides.get("data") != "shakespeare")
    assert "partial" not in set(store.read(folder)["status"])
    assert "Measured on a CPU" in (tmp_path / f"{folder.name}.md").read_text()
