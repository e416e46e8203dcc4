"""What libraries write by themselves reaches the log of the run, and not the terminal. Oracle: lines planted here."""

from __future__ import annotations

import ast
import io
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.__main__ import main
from harness.engine import interpreter_state
from harness.machine import raw_output, streams
from harness.store.errors import UsageError

ROOT = Path(__file__).parents[3]
PLANTED = ("planted warning", "planted torch log", "planted line")
SWEEP = """\
# Does the toy pay?
suite: toy
axes: {n: [1, 3]}
timing: {min_rounds: 3, max_rounds: 3, min_samples: 1, min_seconds: 0.0, warmup_min_iterations: 1,
         warmup_min_seconds: 0.0, warmup_max_seconds: 0.1}
"""
CHILD = """
import multiprocessing, sys
import unruly
from harness.__main__ import main
from harness.cli import run

class Muttering(unruly.Unruly):
    def unsupported(self, case, arm, device):
        if multiprocessing.parent_process() is None:  # while the sweep is planned
            unruly.mutter(case, "parent")
        return None

run.SUITES["toy"] = Muttering(acts={1: "mutter", 3: "exits"})
if __name__ == "__main__":
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


def test_a_worker_and_its_parent_mutter_into_the_log(tmp_path: Path) -> None:
    """The worker's lines name case and arm; a case whose process ended says its last words on the terminal."""
    done, log = swept(tmp_path)
    shown = done.stdout + done.stderr
    for text in PLANTED:
        assert text not in shown
        assert any("the sweep printed: " in line and f"{text} in the parent" in line for line in log), text
        of_arm = [line for line in log if f"{text} in the worker" in line]
        assert of_arm, text
        assert all("toy[n=1] printed: " in line for line in of_arm), of_arm
    assert done.returncode == 1
    assert "failed: toy[n=3], other: its process died twice" in done.stdout
    assert "last words" in done.stdout
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


def test_the_last_words_of_a_crash_are_shown() -> None:
    """What a library writes before it ends this process; what the log has read is not shown again."""
    ends = {
        "os.abort()": signal.SIGABRT,
        "ctypes.string_at(0)": signal.SIGSEGV,
        "os.kill(0, 9)": signal.SIGKILL,
    }
    for end, number in ends.items():
        code = f"import os, ctypes\nos.setsid()\n{WHY}    raw_output.lines()\n    os.write(2, b'last words\\n')\n    {end}"
        crashed = in_a_child(code)
        assert crashed.returncode == -number
        assert crashed.stderr.count("last words\n") == 1, crashed.stderr
        assert "why" not in crashed.stderr
        assert ("Fatal Python error" in crashed.stderr) == (number != signal.SIGKILL)


def test_a_refusal_within_another_sweep_shows_why() -> None:
    """A part of a sweep of sweeps: its caller goes on."""
    code = """
    try:
        with raw_output.captured():
            raise UsageError("no")
    except UsageError:
        raw_output.say("error: no\\n")
"""
    assert in_a_child(WHY + code).stderr == "why\nerror: no\n"


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


def test_a_child_that_opens_standard_error_anew() -> None:
    """`>` cuts the file off: what comes after it is read from its beginning."""
    with raw_output.captured():
        os.write(2, b"a line that is longer than what follows it\n")
        raw_output.lines()
        subprocess.run(["sh", "-c", "echo of a child > /dev/stderr"], check=True)
        os.write(2, b"after it\n")
        assert raw_output.lines() == ["of a child", "after it"]


def test_a_file_that_cannot_be_read_costs_the_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with raw_output.captured():
        os.write(2, b"a line\n")
        with monkeypatch.context() as broken:
            broken.setattr(os, "pread", refuse)
            assert raw_output.lines() == []


def test_a_full_disk_behind_standard_error_ends_nothing() -> None:
    """Oracle: exit codes; standard output has what the command says."""
    code = """
import sys
from harness import __main__
from harness.machine import raw_output
def command(rest):
    with raw_output.captured():
        raw_output.stream().write("a bar\\n")
        raw_output.say("warning: w\\n")
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


def test_a_reader_of_the_output_that_leaves() -> None:
    """`| head -1`: the command goes on to its end, and its exit code is its outcome."""
    code = "import sys\nfrom harness import __main__\n__main__.main = lambda _: print('x' * 99_999, 'y') or 3\nsys.exit(__main__.console())"
    for words in (["-c", code], ["-u", "-c", code]):
        read, write = os.pipe()
        os.close(read)
        try:
            done = subprocess.run(
                [sys.executable, *words], stdout=write, stderr=subprocess.PIPE, text=True, check=False
            )
        finally:
            os.close(write)
        assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("word", ["--help", "--version"])  # longer than a buffer, and shorter
def test_a_full_disk_behind_the_output_is_an_error(word: str) -> None:
    """Whoever reads the file is to know that it lacks something; the harness is not at fault."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "harness", word],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: standard output takes no more: No space left on device; write it to a place with room"
    ]


def test_an_output_that_is_closed_is_asked_for_by_nobody() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m harness list sweeps >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_warnings_of_the_harness_are_for_people(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.store.extensions.names", lambda _: ["broken"])
    monkeypatch.setattr("harness.suites.extended.faults", lambda: {"broken": "broken is no suite"})
    words = ["axes.M=16", "axes.K=32", "axes.N=32", "arms=[bf16_eager]", "device=cpu", "dry_run=true"]
    assert main(["sweep=gemm", *words]) == 0
    assert "warning: broken is no suite\n" in capfd.readouterr().err


def test_no_module_of_a_sweep_writes_to_sys_stderr() -> None:
    """A sweep captures it. Oracle: the imports of each file, those within functions too."""
    own = {raw_output.__name__, streams.__name__, interpreter_state.__name__}  # the last one puts it back
    names, seen = ["harness.cli.sweep", "harness.machine.torchrun"], dict[str, bool]()
    names += [
        f"harness.{room}.{file.stem}"
        for room in ("suites", "peers")
        for file in ROOT.glob(f"harness/{room}/*.py")
    ]
    while names:
        name = names.pop()
        file = ROOT / name.replace(".", "/")
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        if name in seen or not name.startswith("harness") or not file.exists():
            continue
        nodes = list(ast.walk(ast.parse(file.read_text())))
        for node in nodes:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom) and node.module:
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        seen[name] = any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.stderr" for node in nodes
        )
    assert {"harness.cli.run", "harness.machine.torchrun", "harness.suites.gemm"} < seen.keys()
    assert {name for name, writes in seen.items() if writes} <= own
