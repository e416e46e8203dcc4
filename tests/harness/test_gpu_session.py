"""Oracle: the contract of the GPU session - slots, order, at most eight files - with a fake runner and clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import gpu_session, store
from harness.config import load
from harness.errors import UsageError
from harness.gpu_session import STAGES, Session
from harness.measurement import BUDGET, Measurement
from harness.plan import make_plan
from harness.suites import train
from harness.timing_session import METERED_S


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
    """A machine on which every command takes `seconds`; sweeps write one row, or one that ran out of budget."""

    def __init__(self, results: Path, seconds: float, short: int = 0) -> None:
        self.results, self.seconds, self.short = results, seconds, short
        self.now = 0.0
        self.commands: list[list[str]] = []

    def clock(self) -> float:
        return self.now

    def run(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        self.commands.append(list(command))
        self.now += min(self.seconds, timeout_s)
        if "pytest" in command:
            return 0, "3 passed"
        name = next(w for w in command if w.startswith("sweep=")).removeprefix("sweep=")
        model = next((w for w in command if w.startswith("model=")), "").removeprefix("model=")
        folder = self.results / name / f"run-{name}{model}"
        writer = store.RunWriter(folder, run_id=folder.name, sweep=name, env_id="e", env={}, about={})
        unfinished = self.short > 0
        self.short -= 1
        row = Measurement("cast", "c1", "eager", "{}", "time_ms", "ok", samples=(1.0,))
        missing = Measurement("cast", "c2", "eager", "{}", "time_ms", "skipped", reason=f"{BUDGET} of 1 s")
        writer.append(
            [row, missing] if unfinished else [row, Measurement(**{**as_dict(row), "case_id": "c2"})]
        )
        writer.close("finished")
        return 0, f"finished\nresults  {folder}\nreport   x.html\n"


def as_dict(row: Measurement) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.__slots__}


def session(tmp_path: Path, fake: Fake) -> Session:
    return Session(tmp_path / "results", tmp_path / "out", fake.run, fake.clock)


def test_the_stages_fit_in_25_minutes() -> None:
    assert sum(stage.minutes for stage in STAGES) <= 25


def test_a_slot_runs_tests_then_sweeps_in_order_and_packs_at_most_eight_files(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "results", seconds=15)
    made = session(tmp_path, fake)
    assert made.slot(9) == []
    assert ["pytest" in c for c in fake.commands] == [True] + 10 * [False]
    assert [w for c in fake.commands for w in c if w.startswith("sweep=")] == [
        f"sweep={name}"
        for name in [
            "ceilings",
            "cast",
            "gemm",
            "codes",
            "accumulation",
            "linear",
            "peers",
            "train",
            "train",
            "train",
        ]
    ]
    files = made.pack()
    assert len(files) <= 8
    assert {f.name for f in files} == {
        "kernels.parquet", "linear.parquet", "peers.parquet", "train.parquet", "report.html", "report.md", "tests.txt",
    }  # fmt: skip
    kernels = store.read(tmp_path / "out" / "kernels.parquet")
    assert set(kernels["sweep"]) == {"accumulation", "cast", "ceilings", "codes", "gemm"}
    assert store.read(tmp_path / "out" / "train.parquet")["run_id"].nunique() == 3
    assert (tmp_path / "out" / "tests.txt").read_text() == "3 passed"


def test_a_slot_stops_when_its_minutes_are_spent_and_the_next_goes_on(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "results", seconds=80)
    left = [stage.name for stage in STAGES]
    assert session(tmp_path, fake).slot(4) == left[3:]
    assert session(tmp_path, fake).slot(9) == ["train_llama3_8b"]
    assert session(tmp_path, fake).slot(9) == []
    assert sum("pytest" in c for c in fake.commands) == 1


def test_a_stage_of_one_case_begins_only_where_it_has_its_minutes(tmp_path: Path) -> None:
    """Cut, it would leave nothing: a smaller one goes first, and the next slot begins with it."""
    fake = Fake(tmp_path / "results", seconds=20)
    made = session(tmp_path, fake)
    assert made.slot(6.4) == ["train_llama3_8b"]
    fake.commands.clear()
    assert made.slot(6.5) == []
    (command,) = fake.commands
    assert {"model=llama3_8b", "axes.layers=4", "timing.block_ms=2500", "rounds=5"} <= set(command)


def test_the_training_stages_are_commands_that_the_plan_accepts() -> None:
    """Oracle: the plan itself, which knows every key, axis, arm and the length of a model; and the energy meter's block."""
    for stage in STAGES:
        if stage.file == "train":
            request = load([*stage.words, "device=cuda"], lambda device: device)
            (case,) = make_plan(request.config | {"device": "cuda"}, {"train": train}).cases
            assert case.case["model"] == stage.words[1].removeprefix("model=")
            assert request.timing.block_ms > 1000 * METERED_S
            assert request.timing.max_seconds >= request.timing.min_rounds * request.timing.block_ms / 1000


def test_a_sweep_that_ran_out_of_time_is_resumed_by_its_run_id(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "results", seconds=15, short=1)
    assert "ceilings" in session(tmp_path, fake).slot(9)
    assert not any(word.startswith("resume=") for command in fake.commands for word in command)
    fake.commands.clear()
    assert session(tmp_path, fake).slot(9) == []
    assert "resume=run-ceilings" in fake.commands[0]


def test_a_file_over_the_limit_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path / "results", seconds=30)
    made = session(tmp_path, fake)
    made.slot(9)
    monkeypatch.setattr(gpu_session, "MAX_FILE_BYTES", 10)
    with pytest.raises(UsageError, match=r"kernels.parquet is .* over 16 MiB"):
        made.pack()


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="cuda"):
        gpu_session.main([])
    with pytest.raises(UsageError, match=r"unknown key 'minute' \(nearest: minutes\)"):
        gpu_session.main(["minute=3"])


def test_a_command_that_runs_too_long_is_stopped() -> None:
    import sys

    code, _ = gpu_session.run_command([sys.executable, "-c", "import time; time.sleep(600)"], 0.3)
    assert code == 124
