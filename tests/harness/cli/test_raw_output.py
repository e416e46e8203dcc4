"""What libraries write by themselves reaches the log of the run, and not the terminal. Oracle: lines planted here."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.machine import raw_output
from harness.store.errors import UsageError

PLANTED = ("planted warning", "planted torch log", "planted line")
SWEEP = """\
# Does the toy pay?
suite: toy
axes: {n: [1, 3]}
timing: {min_rounds: 3, max_rounds: 3, min_samples: 1, min_seconds: 0.0, warmup_min_iterations: 1,
         warmup_min_seconds: 0.0, warmup_max_seconds: 0.1}
"""
CHILD = """
import sys
from harness.__main__ import main
from harness.cli import run
from toy import as_module
from unruly import Muttering
if __name__ == "__main__":
    run.SUITES["toy"] = as_module(Muttering(acts={1: "mutter", 3: "exits"}))
    sys.exit(main(sys.argv[1:]))
"""


def swept(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A sweep in a process of its own, and the lines of its log."""
    (folder / "sweeps").mkdir()
    (folder / "sweeps/toy.yaml").write_text(SWEEP)
    (folder / "child.py").write_text(CHILD)
    done = subprocess.run(
        [sys.executable, "child.py", "sweep=toy", "device=cpu", "run_id=r1", "report=false", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "always"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done, (folder / "results/toy/r1/_run.log").read_text().splitlines()


@pytest.mark.slow
def test_a_worker_and_its_parent_mutter_into_the_log(tmp_path: Path) -> None:
    """The lines of an arm name case and arm; the terminal has the reason of one that left."""
    done, log = swept(tmp_path)
    shown = done.stdout + done.stderr
    for text in PLANTED:
        assert text not in shown
        assert any("the sweep printed: " in line and f"{text} in the parent" in line for line in log), text
        of_arm = [line for line in log if f"{text} in the worker" in line]
        assert of_arm, text
        assert all("toy[n=1] printed: " in line for line in of_arm), of_arm
    assert done.returncode == 1
    assert "other: SystemExit: 3" in done.stdout
    assert any("toy[n=3] printed: last words" in line for line in log)
    assert "[1/2] toy[n=1]" in done.stderr


def test_a_sweep_in_one_process_mutters_into_the_log(tmp_path: Path) -> None:
    done, log = swept(tmp_path, "isolate=false", "axes.n=[1]")
    assert done.returncode == 0, done.stderr
    for text in PLANTED:
        assert text not in done.stdout + done.stderr
        assert any(
            "toy[n=1] building other printed: " in line and f"{text} in the worker" in line for line in log
        )


WHY = """\
import os
from harness.machine import raw_output
from harness.store.errors import UsageError
with raw_output.captured():
    os.write(2, b'why\\n')
"""


def in_a_child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_an_error_of_the_harness_stays_on_the_terminal() -> None:
    """Whatever ends the block, what no log has read is shown; nothing else is."""
    for error in ("RuntimeError('bug')", "UsageError('no')", "KeyboardInterrupt"):
        ended = in_a_child(f"{WHY}    raise {error}").stderr
        assert ended.startswith("why\n"), ended
        assert ended.count("why") == 1
        assert error[:10] in ended.splitlines()[-1]
    assert "why" not in in_a_child(f"{WHY}    raw_output.lines()\n    raise UsageError('no')").stderr
    assert in_a_child(f"{WHY}    raw_output.stream().write('for people')").stderr == "for people"


def test_the_stream_of_people_is_the_one_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, or under a test, `sys.stderr` is no descriptor; it is given back afterwards."""
    people = io.StringIO()
    monkeypatch.setattr(sys, "stderr", people)
    with raw_output.captured():
        assert raw_output.stream() is people
        with raw_output.captured():
            sys.stderr.write("of a library\n")
        os.write(2, b"of C++\n")
        assert raw_output.lines() == ["of a library", "of C++"]
        assert raw_output.lines() == []
        raw_output.stream().write("for people\n")
    assert sys.stderr is people
    assert people.getvalue() == "for people\n"
    with pytest.raises(UsageError), raw_output.captured():
        raise UsageError("no")
    assert sys.stderr is people


def test_a_full_disk_behind_standard_error_ends_nothing() -> None:
    """Oracle: exit codes; standard output has what the command says."""
    code = """
import sys
from harness import __main__
from harness.machine import raw_output
def command(rest):
    with raw_output.captured():
        raw_output.stream().write("a bar\\n")
        raw_output.notify("warning: w\\n")
    print("measured")
    sys.stderr.write("of a library\\n")
    if rest[0] == "bug":
        raise RuntimeError
    if rest[0] == "refused":
        raise __main__.UsageError("no")
    return int(rest[0])
__main__.commands = lambda: {"try": command}
sys.exit(__main__.console())
"""
    for word, expected in {"0": 0, "1": 1, "refused": 2, "bug": 7}.items():
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-c", code, "try", word], stdout=subprocess.PIPE, stderr=full, check=False
            )
        assert (done.returncode, done.stdout) == (expected, b"measured\n"), word


def test_a_thread_that_alone_hears_of_a_full_disk_does_not_make_the_command_a_success() -> None:
    """Oracle: the output, which is not there. The thread's error ends the thread."""
    code = """if True:
        import sys, threading
        from harness import __main__

        def command(rest):
            thread = threading.Thread(target=lambda: print("measured", flush=True))
            thread.start()
            thread.join()
            return 0
        __main__.commands = lambda: {"try": command}
        sys.exit(__main__.console())
    """
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "try"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
