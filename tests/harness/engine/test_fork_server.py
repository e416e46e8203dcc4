"""Where an arm's process comes from. Oracles: what it computes, the kernel's table of processes, and who is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import toy

from harness import store
from harness.machine import environment
from harness.timing.device_memory import free_bytes

HERE = Path(__file__).resolve()
PATH = os.pathsep.join([str(HERE.parents[1]), str(HERE.parents[3])])
SCRIPT = """
import json
import parallel_import
from harness.engine import arms
from harness.engine.arm_process import Conditions
if __name__ == "__main__":
    said = []
    arms.start_server([parallel_import])
    with arms.ArmPool(Conditions.here(), arms.TimeLimits(silence_s=30.0), "cpu", said.append) as arm_pool:
        arm_pool.begin(["a", "b"])
        found = [arm_pool.of(arm).call(parallel_import.computed) for arm in "ab"]
    print(json.dumps([found, said]))
"""


def ran(script: str, **variables: str) -> list[object]:
    env = {**os.environ, "PYTHONPATH": PATH, **variables}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("at_import", [pytest.param("operation", marks=pytest.mark.slow), "pool"])
def test_an_import_that_starts_threads_hangs_no_arm_and_is_named(at_import: str) -> None:
    """A fork takes over one thread: what waits for another of them waits for ever."""
    found, said = ran(SCRIPT, AT_IMPORT=at_import, OMP_NUM_THREADS="2")
    assert found == [[512.0 * 512, 3]] * 2
    ((line,),) = said
    assert "importing parallel_import starts threads" in line


ENTRIES = {
    "a suite": (
        "[fp8_harness.suites]\nthreaded = parallel_import",
        toy.SWEEP.replace("toy", "threaded") % [1, 2],
    ),
    "a peer that nobody asked for": (
        "[fp8_harness.peers]\nparallel = parallel_import:PEER",
        "# Does it pay?\nsuite: gemm\naxes: {M: [64], K: [64], N: [64]}\narms: [bf16_eager]\n"
        "timing: {min_rounds: 3, max_rounds: 3, min_samples: 1, min_seconds: 0.0}\n",
    ),
}


@pytest.mark.parametrize("at_import", ["operation", "pool"])
@pytest.mark.parametrize("what", ENTRIES)
@pytest.mark.slow
def test_a_package_whose_import_starts_threads_is_measured_and_named(
    what: str, at_import: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command. Oracle: the rows, and the only module that starts threads."""
    monkeypatch.chdir(tmp_path)
    entries, sweep = ENTRIES[what]
    info = tmp_path / "site/parallel-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parallel\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(entries)
    (tmp_path / "own.yaml").write_text(sweep)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{PATH}"}
    env |= {"AT_IMPORT": at_import, "OMP_NUM_THREADS": "2"}
    words = [
        "sweep=./own.yaml",
        "device=cpu",
        "run_id=r",
        "report=false",
        "isolate=true",
        "case_timeout_s=60",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words], env=env, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(store.read(Path("results/own/r"))["status"]) == {"ok"}
    assert "importing parallel_import starts threads" in Path("results/own/r/_run.log").read_text()


def test_a_long_name_of_the_folder_for_temporary_files_is_used_and_no_import_is_named(tmp_path: Path) -> None:
    """A socket's path has 108 bytes (unix(7)); folders of jobs are that long. This import starts no threads."""
    folder = tmp_path / ("j" * 120)
    folder.mkdir()
    found, said = ran(SCRIPT, TMPDIR=str(folder), AT_IMPORT="", OMP_NUM_THREADS="2")
    assert (found, said) == ([[512.0 * 512, 3]] * 2, [])


def test_where_the_system_does_not_say_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may hide /proc/meminfo."""

    def hidden() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", hidden)
    assert environment.fingerprint("cpu")["memory_gib"] is None
    assert environment.snapshot()["memory_available_gib"] is None
    assert free_bytes("cpu") > 2**40


STOPPED = """
import os, signal, sys
from multiprocessing import forkserver
import toy
from harness import __main__
from harness.cli import measure, run
from harness.engine import executor
if __name__ == "__main__":
    when, then = sys.argv.pop(), int(sys.argv.pop())
    owner, name = {"rows": (executor._Run, "store"), "end": (measure, "_finish")}[when]
    def stop(*given, real=getattr(owner, name)):
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
        if then:
            os.kill(os.getpid(), then)
        return real(*given)
    setattr(owner, name, stop)
    run.SUITES["toy"] = toy.as_module(toy.ToySuite())
    sys.argv = ["harness", "sweep=toy", "device=cpu", "run_id=r", "isolate=true", "report=false"]
    sys.exit(__main__.console())
"""


@pytest.mark.parametrize(
    ("when", "then", "state"),
    [
        pytest.param("end", 0, "finished", marks=pytest.mark.slow),
        ("rows", 0, "finished"),
        pytest.param("rows", int(signal.SIGINT), "interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_is_stopped_for_ever_keeps_no_command(
    when: str, then: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last row, in the middle of the run, and as the command is interrupted."""
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "toy.yaml").write_text(toy.SWEEP % [1, 2])
    monkeypatch.chdir(tmp_path)
    env = {**os.environ, "PYTHONPATH": PATH}
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, str(then), when],
        env=env,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (2 if then else 0), done.stderr
    assert store.read_about(Path("results/toy/r"))["state"] == state
    assert not list(Path("results").rglob("_writer.lock"))
