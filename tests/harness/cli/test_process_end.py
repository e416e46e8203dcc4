"""What keeps an interpreter alive does not keep the command alive. Oracle: real processes that would never end by themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toy import SWEEP

from harness.store import run_files

COMMAND = """
import atexit, sys, threading
from concurrent.futures import ThreadPoolExecutor
from harness import __main__
from harness.cli import process_end
never = threading.Event()
{plant}
sys.argv = ["harness", *{words}]
sys.exit(__main__.console())
"""
LEFT = "threading.Thread(target=never.wait, name='left behind').start()"


def ended(plant: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    code = COMMAND.format(plant=plant, words=words)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["sweep=no_such_sweep"], 2)])
def test_a_thread_that_never_ends_is_named_and_the_command_ends_with_its_code(
    words: list[str], code: int
) -> None:
    done = ended(
        f"atexit.register(print, 'cleaned up'); {LEFT.replace('never.wait', 'lambda: never.wait()')}", words
    )
    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == "cleaned up"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert "'left behind'" in line


SUITE = """
sys.path.insert(0, {folder!r})
from harness.cli import run
from harness.timing.workload import Numerics, Workload
from toy import SWEEP, ToySuite, nothing
def build(case):
    threading.Thread(target=lambda: never.wait(), name="of an arm").start()
    return Workload(run=nothing, check=lambda: Numerics({{"sqnr_db": 28.5}}))
run.SUITES["toy"] = ToySuite(behaviour={{"base": build}})
"""


def test_a_thread_of_an_arm_does_not_keep_a_sweep_of_this_process_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "toy.yaml").write_text(SWEEP % [1])
    monkeypatch.chdir(tmp_path)
    done = ended(SUITE.format(folder=str(Path(__file__).parents[1])), ["sweep=toy", "device=cpu", "run_id=r"])
    assert json.loads((tmp_path / "results/toy/r" / run_files.ABOUT).read_text())["state"] == "finished"
    assert done.returncode == 1  # such an arm needs a process of its own
    assert "'of an arm'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "plant",
    ["atexit.register(never.wait)", "pool = ThreadPoolExecutor(1); pool.submit(never.wait)"],
)
def test_what_never_ends_as_the_interpreter_exits_is_cut_off(plant: str) -> None:
    done = ended(f"process_end.EXIT_S = 0.5; {plant}", ["--version"])
    assert done.returncode == 0
    assert done.stdout.startswith("fp8-harness ")
    assert "registered with atexit, or a pool, has not ended within 0.5 s" in done.stderr


def test_an_idle_pool_and_a_thread_that_ends_are_not_mentioned() -> None:
    plant = (
        "pool = ThreadPoolExecutor(1); pool.submit(print).result(); threading.Thread(target=print).start()"
    )
    done = ended(plant, ["--version"])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_that_called_the_command_goes_on() -> None:
    """The process ends when its main thread does, however long ago the command returned, and with its own exit code."""
    plant = "process_end.EXIT_S = 0.5"
    code = COMMAND.format(plant=plant, words=["--version"]).replace(
        "sys.exit(__main__.console())", "__main__.console()"
    )
    later = "threading.Event().wait(1.5)\nprint('went on')\nsys.exit(5)\n"
    done = subprocess.run(
        [sys.executable, "-c", code + later], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (5, "went on")
