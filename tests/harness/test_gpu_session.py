"""Oracle: the contract of the GPU session - slots, order, at most eight files - with a fake runner and clock."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_fixtures import CPU, Invented, frame, linear_cases

from harness import gpu_session, store
from harness.data import shakespeare
from harness.errors import UsageError
from harness.gpu_session import REHEARSAL, STAGES, Session, predicted_layers
from harness.measurement import BUDGET, Measurement


@pytest.fixture(autouse=True)
def _quick_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session writes its page after each stage, which takes seconds; the test of what is packed has it for real."""
    if "packs" in request.node.name:
        return

    def written(runs: Sequence[Path], html: Path) -> SimpleNamespace:
        markdown = html.with_suffix(".md")
        for page in (html, markdown):
            page.write_text(f"{len(runs)} runs\n")
        return SimpleNamespace(html=html, markdown=markdown)

    monkeypatch.setattr(gpu_session, "write_report", written)


class Fake:
    """A machine on which every command takes `seconds`; sweeps write one row, or one that ran out of budget.

    `dies` is what the first sweep does after its row, before it ends.
    """

    def __init__(
        self, results: Path, seconds: float, short: int = 0, dies: type[BaseException] | None = None
    ) -> None:
        self.results, self.seconds, self.short, self.dies = results, seconds, short, dies
        self.now = 0.0
        self.commands: list[list[str]] = []
        self.timeouts: list[float] = []

    def clock(self) -> float:
        return self.now

    def run(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        self.commands.append(list(command))
        self.timeouts.append(timeout_s)
        self.now += min(self.seconds, timeout_s)
        if "pytest" in command:
            return 0, "3 passed"
        said = dict(w.split("=", 1) for w in command if "=" in w)
        folder = self.results / said["sweep"] / said["run_id"]
        name = said["sweep"]
        writer = store.RunWriter(folder, run_id=folder.name, sweep=name, env_id="e", env={}, about={})
        unfinished = self.short > 0
        self.short -= 1
        row = Measurement("cast", "c1", "eager", "{}", "time_ms", "ok", samples=(1.0,))
        missing = Measurement("cast", "c2", "eager", "{}", "time_ms", "skipped", reason=f"{BUDGET} of 1 s")
        writer.append(
            [row, missing] if unfinished else [row, Measurement(**{**as_dict(row), "case_id": "c2"})]
        )
        if self.dies is not None:
            died, self.dies = self.dies, None
            raise died
        writer.close("finished")
        return 0, f"finished\nresults  {folder}\nreport   x.html\n"


def as_dict(row: Measurement) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.__slots__}


def session(tmp_path: Path, fake: Fake, **more: Any) -> Session:
    settings = {"text": tmp_path / "input.txt"} | more
    return Session(tmp_path / "results", tmp_path / "out", runner=fake.run, clock=fake.clock, **settings)


def test_a_slot_runs_the_stages_in_order_and_packs_at_most_eight_files(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "results", seconds=15)
    made = session(tmp_path, fake)
    assert made.slot(9) == []
    assert ["pytest" in c for c in fake.commands] == [stage.name == "tests" for stage in STAGES]
    assert [w for c in fake.commands for w in c if w.startswith("sweep=")] == [
        f"sweep={stage.sweep}" for stage in STAGES if stage.name != "tests"
    ]
    files = made.pack()
    assert len(files) <= 8
    assert {f.name for f in files} == {
        "kernels.parquet", "linear.parquet", "loss.parquet", "peers.parquet", "train.parquet", "report.html",
        "report.md", "tests.txt",
    }  # fmt: skip
    kernels = store.read(tmp_path / "out" / "kernels.parquet")
    assert set(kernels["sweep"]) == {"accumulation", "cast", "ceilings", "codes", "gemm"}
    assert store.read(tmp_path / "out" / "train.parquet")["run_id"].nunique() == 4
    assert (tmp_path / "out" / "tests.txt").read_text() == "3 passed"


def test_a_slot_stops_when_its_minutes_are_spent_and_the_next_goes_on(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "results", seconds=55)
    names = [stage.name for stage in STAGES]
    assert session(tmp_path, fake).slot(2) == ["train_llama3_8b", *names[3:]]  # which has not its 8 minutes
    assert session(tmp_path, fake).slot(9) == [
        "train_llama3_1b"
    ]  # a minute and a half; a smaller one went first
    assert session(tmp_path, fake).slot(9) == []
    assert sum("pytest" in c for c in fake.commands) == 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_advised_is_advised_by_the_ceilings_measured_here(tmp_path: Path, device: str) -> None:
    """A CPU is advised nothing, so it is given no rates."""
    fake = Fake(tmp_path / "results", seconds=5)
    made = session(tmp_path, fake, device=device)
    made.slot(20)
    (run,) = (tmp_path / "results" / "ceilings").iterdir()
    (command,) = (c for c in fake.commands if "axes.convert=advised" in c)
    assert [w for w in command if w.startswith("ceilings=")] == (
        [f"ceilings={run}"] if device == "cuda" else []
    )


def test_a_stage_of_one_case_begins_only_where_it_has_its_minutes(tmp_path: Path) -> None:
    """Cut, it would leave nothing: a smaller one goes first, and the next slot begins with it."""
    fake = Fake(tmp_path / "results", seconds=20)
    made = session(tmp_path, fake)
    assert made.slot(7.9) == ["train_llama3_8b"]
    fake.commands.clear()
    assert made.slot(8) == []
    (command,) = fake.commands
    assert {"model=llama3_8b", "axes.layers=4", "timing.block_ms=2500", "rounds=4"} <= set(command)


def test_a_stage_of_one_case_may_have_the_rest_of_its_slot(tmp_path: Path) -> None:
    """Others are cut when their own minutes end."""
    fake = Fake(tmp_path / "results", seconds=7 * 60)
    assert "train_llama3_8b" not in session(tmp_path, fake).slot(9)
    assert fake.timeouts == [540, 120]  # all of 9 minutes; and of what it left the tests' own


def test_a_stage_is_not_begun_for_a_case_it_could_not_start(tmp_path: Path) -> None:
    """Oracle: of the loss, runs start until 90 s before its end; it begins where it could use 20 s beside them."""
    spent = {"train_llama3_8b": 480.0, "tests": 120.0, "ceilings": 60.0}
    for seconds, begins in ((109, False), (111, True)):
        fake = Fake(tmp_path / f"{seconds}", seconds=5)
        made = session(tmp_path / f"{seconds}", fake)
        made.state = {name: {"done": True, "seconds": used} for name, used in spent.items()}
        made.slot(seconds / 60)
        assert any("sweep=nanogpt_char" in command for command in fake.commands) == begins


def test_what_ran_out_of_time_goes_on_with_its_own_run(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "results", seconds=15, short=1)
    made = session(tmp_path, fake)
    assert made.slot(9) == ["train_llama3_8b"]
    assert made.told(STAGES[0]) == "unfinished"
    first = fake.commands[0]
    fake.commands.clear()
    assert session(tmp_path, fake).slot(9) == []
    (again,) = fake.commands
    assert run_id(again) == run_id(first)


def test_a_stage_whose_minutes_are_spent_is_not_asked_for_again(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "results", seconds=60, short=100)
    made = session(tmp_path, fake)
    for _ in range(9):
        left = made.slot(9)
    assert left == []
    assert made.told(next(s for s in STAGES if s.name == "gemm")) == "cut: its minutes are spent"


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_slot_loses_nothing(tmp_path: Path, ending: type[BaseException]) -> None:
    """SystemExit stands for a kill: whatever the session knew before the sweep began must do."""
    fake = Fake(tmp_path / "results", seconds=15, dies=ending)
    with pytest.raises(ending):
        session(tmp_path, fake).slot(9)
    assert len(store.read(tmp_path / "out" / "train.parquet")) == 2
    first = fake.commands[-1]
    fake.commands.clear()
    assert session(tmp_path, fake).slot(9) == []
    assert run_id(fake.commands[0]) == run_id(first)
    assert len(fake.commands) == len(STAGES)


def run_id(command: Sequence[str]) -> str:
    return next(word for word in command if word.startswith("run_id="))


def test_without_the_text_the_loss_is_passed_over_and_says_what_it_wants(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "results", seconds=15)
    made = session(tmp_path, fake, text=None)
    assert made.slot(9) == []
    stage = next(stage for stage in STAGES if stage.reads_text)
    assert made.told(stage).startswith("passed over: no text here")
    assert "text=input.txt" in made.told(stage)
    assert not any("sweep=nanogpt_char" in command for command in fake.commands)
    assert session(tmp_path, fake).slot(9) == []  # and is run once there is one
    assert f"data_path={tmp_path / 'input.txt'}" in fake.commands[-1]


def test_the_text_is_the_one_that_is_named_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert gpu_session.text_of("") is None
    other = tmp_path / "other.txt"
    other.write_text("To be")
    with pytest.raises(UsageError, match="is not nanoGPT's text: 5 bytes"):
        gpu_session.text_of(str(other))
    with pytest.raises(UsageError, match="no file"):
        gpu_session.text_of(str(tmp_path / "missing.txt"))
    shakespeare.kept().parent.mkdir(parents=True)
    shakespeare.kept().write_text("To be")
    assert gpu_session.text_of("") == shakespeare.kept()


def test_a_rehearsal_is_the_same_session_on_a_cpu(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "results", seconds=1)
    assert session(tmp_path, fake, device="cpu").slot(9) == []
    assert len(fake.commands) == len(STAGES)
    (tests,) = (command for command in fake.commands if "pytest" in command)
    assert all("device=cpu" in command for command in fake.commands if command is not tests)
    assert set(next(stage.small for stage in STAGES if stage.name == "tests")) <= set(tests)


def test_a_file_over_the_limit_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path / "results", seconds=30)
    made = session(tmp_path, fake)
    made.slot(9)
    monkeypatch.setattr(gpu_session, "MAX_FILE_BYTES", 10)
    with pytest.raises(UsageError, match=r"train.parquet is .* over 16 MiB"):
        made.pack()


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"sees no GPU.*device=cpu is a rehearsal"):
        gpu_session.main([])
    with pytest.raises(UsageError, match=r"unknown key 'minute' \(nearest: minutes\)"):
        gpu_session.main(["minute=3"])
    with pytest.raises(UsageError, match="device='tpu': expected cuda, or cpu for a rehearsal"):
        gpu_session.main(["device=tpu"])


def test_a_command_that_runs_too_long_is_stopped() -> None:
    code, _ = gpu_session.run_command([sys.executable, "-c", "import time; time.sleep(600)"], 0.3)
    assert code == 124


def test_a_command_ends_when_the_session_is_killed(tmp_path: Path) -> None:
    """Oracle: the kernel's list of processes. What the command wrote before is all that is left of it."""
    pid = tmp_path / "pid"
    command = (
        f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    session = f"import sys; from harness.gpu_session import run_command; run_command([sys.executable, '-c', {command!r}], 600)"
    with subprocess.Popen([sys.executable, "-c", session]) as parent:
        _until(lambda: pid.exists() and pid.read_text() != "")
        parent.kill()
    _until(lambda: not Path(f"/proc/{pid.read_text()}").exists())


def _until(true: Callable[[], bool]) -> None:
    for _ in range(600):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("waited for a minute")


def test_layers_are_predicted_where_the_peak_is_known(tmp_path: Path) -> None:
    """Oracle: the rows: each FP8 layer of ours, isolated, has a prediction, and those of a CPU have none."""
    invented = Invented()
    rows = [row for case in linear_cases(invented, 700.0) for row in case]
    known = predicted_layers(frame(tmp_path / "gpu", rows))
    ours = {
        (r.case_id, r.arm) for r in rows if r.metric == "time_ms" and r.status == "ok" and "bf16" not in r.arm
    }
    assert len(known) == len({(check.case, check.arm) for check in known}) > 0
    assert len(known) <= len(ours)
    assert all(0.3 < check.predicted / check.measured < 3 for check in known)
    assert predicted_layers(frame(tmp_path / "cpu", rows, env=CPU)) == []


@pytest.mark.slow
def test_the_rehearsal_for_real(tmp_path: Path) -> None:
    """Oracle: what the command promises: every stage, eight files, twenty lines between two that say what it is."""
    words = [sys.executable, "-m", "harness", "gpu", "device=cpu", "minutes=60", f"results_dir={tmp_path}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert lines[0] == lines[-1] == REHEARSAL
    files = sorted(path.name for path in (tmp_path / "gpu").iterdir())
    assert len(files) <= 8
    first = next(i for i, line in enumerate(lines) if line.startswith("tests: "))
    summary = lines[first:-1]
    assert 10 <= len(summary) <= 20
    told = {line.split()[0]: line for line in lines[:first] if line.startswith(tuple(s.name for s in STAGES))}
    for stage in STAGES:
        assert told[stage.name].endswith("done") or (stage.reads_text and "passed over" in told[stage.name])
    assert "Measured on a CPU" in (tmp_path / "gpu" / "report.md").read_text()
