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
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from harness import __main__
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
def test_a_thread_that_never_ends_does_not_keep_the_command_alive(words: list[str], code: int) -> None:
    done = ended(LEFT, words)
    assert done.returncode == code


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
    assert done.returncode == 0
