"""An exception anywhere in the parent ends the command, soon. Oracles: the exit codes of the contract, and the process table."""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy import as_module
from unruly import Unruly

from harness import store
from harness.__main__ import main
from harness.cli import run
from harness.engine.runlog import notes

SWEEP = """\
# Does the toy pay?
suite: toy
axes: {n: [1, 2, 3]}
timing: {min_rounds: 3, max_rounds: 3, min_samples: 1, min_seconds: 0.0, warmup_min_iterations: 1,
         warmup_min_seconds: 0.0, warmup_max_seconds: 0.1, checkpoint_s: 0.0}
"""
# Where a function of the parent raises, in which of its calls, and what _run.json has then: None where there is none yet.
POINTS = {
    "engine.runlog.ProgressFile.write": (1, "failed"),
    "engine.executor._Run.store": (2, "failed"),
    "store.parquet.RunWriter._compact": (1, "failed"),
    "cli.measure.write_report": (1, "finished"),
}
WORDS = ["sweep=toy", "device=cpu", "run_id=r1"]


class PlantedError(Exception):
    """No error that any handler knows."""


@pytest.fixture(autouse=True)
def here(enter_folder_with_sweep: Callable[[str, str], None]) -> None:
    enter_folder_with_sweep("toy", SWEEP)


def plant(point: str, call: int, put: Callable[[Any, str, Any], None]) -> None:
    """Has a function of the harness raise in one of its calls."""
    room, module, *path, name = point.split(".")
    owner: Any = importlib.import_module(f"harness.{room}.{module}")
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), [0]

    def planted(*args: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise PlantedError(f"in {point}")
        return real(*args, **named)

    put(owner, name, planted)


@pytest.mark.parametrize("point", POINTS)
def test_an_exception_of_the_parent_ends_its_workers_and_is_recorded(
    point: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an interpreter waits for before it exits are the processes that `multiprocessing` has started."""
    call, state = POINTS[point]
    monkeypatch.setitem(run.SUITES, "toy", as_module(Unruly()))
    plant(point, call, monkeypatch.setattr)
    assert main(WORDS) == 7
    assert multiprocessing.active_children() == []
    err = capsys.readouterr().err
    assert f"error: internal error: PlantedError: in {point}; " in err.splitlines()[-1]
    assert "Traceback" in err
    assert store.read_about(Path("results/toy/r1")).get("state") == state
    assert not list(Path("results").rglob("_writer.lock"))


@pytest.mark.parametrize("act", ["detach", "detach_bare"])
@pytest.mark.parametrize("isolate", ["true", "false"])
def test_what_a_case_started_in_a_session_of_its_own_ends_with_the_command(
    isolate: str, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = (isolate, act) == ("true", "detach")  # a dead worker's processes are known by their mark alone
    bystander = subprocess.Popen(["/bin/sleep", "600"], env={})  # of who called the command, before it
    monkeypatch.setitem(
        run.SUITES, "toy", as_module(Unruly(acts={1: act, 2: "die_detached" if dies else act}))
    )
    assert main(["sweep=toy", "device=cpu", f"isolate={isolate}"]) == (1 if dies else 0)
    pids = [int(path.read_text()) for path in Path().glob("detached-*")]
    assert len(pids) >= 2
    gone = time.monotonic() + 60
    while any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids
    ):
        assert time.monotonic() < gone
        time.sleep(0.02)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


@pytest.mark.parametrize("point", ["_print_findings", "write_report"])
def test_an_interrupt_after_the_last_row_names_the_command_that_makes_the_report(
    point: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while the rows are judged or the report is written: they are stored, and the run has finished."""

    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setitem(run.SUITES, "toy", as_module(Unruly()))
    with monkeypatch.context() as patch:
        patch.setattr(f"harness.cli.measure.{point}", interrupted)
        assert main([*WORDS, "isolate=false"]) == 2
    assert "python -m harness report results/toy/r1" in capsys.readouterr().err
    assert store.read_about(Path("results/toy/r1"))["state"] == "finished"
    assert [note.state for note in notes(Path("results/toy/r1"))] == ["finished"]
    assert main(["report", "results/toy/r1"]) == 0


@pytest.mark.parametrize("isolate", ["true", "false"])
def test_an_interrupted_command_waits_for_its_helpers_once_its_state_is_written(
    isolate: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher kills what makes it wait. Oracle: what _run.json had and what had been said, each time that one was waited for."""
    seen = []

    def join(process: BaseProcess, timeout: float | None = None) -> None:
        if timeout != 0.0:
            seen.append((store.read_about(Path("results/toy/r1"))["state"], capsys.readouterr().err[-40:]))
        real(process, timeout)

    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    real = BaseProcess.join
    monkeypatch.setitem(run.SUITES, "toy", as_module(Unruly()))
    monkeypatch.setattr("harness.engine.executor._Run.store", interrupted)
    monkeypatch.setattr(BaseProcess, "join", join)
    beside = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
    beside.start()  # as a helper of this process
    assert main([*WORDS, f"isolate={isolate}", "report=false"]) == 2
    assert seen
    assert {state for state, _ in seen} == {"interrupted"}
    assert "resume=r1 continues it" in seen[0][1]
    assert multiprocessing.active_children() == []
