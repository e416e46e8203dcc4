"""`gate --command`: proof of the tree, wall time, budget, ends. Oracle: files put in place by hand, git, and a clock made for the test."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from command_repo import (
    FEW,
    PYTEST,
    SPIN,
    TIMER,
    commit,
    fake_repository,
    gate,
    git,
    make_repository,
    spinning,
    verdicts,
)

from harness.__main__ import main
from harness.gate import command_session, drive
from harness.gate.shell import run_shell


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = fake_repository(tmp_path / "repo")
    commit(root, {"README.md": "words\n"})
    return root


# Where it may be typed ----------------------------------------------------------------------------------------------


def test_another_repository_without_a_command_is_refused(root: Path) -> None:
    """It judged the harness's own checkout and said OK."""
    code, said, _ = gate(root)
    assert code == 2
    assert f"{root} is not the checkout that this harness runs from" in said
    assert "--command 'pytest bench/ --benchmark-json={out}'" in said


def test_outside_of_a_repository_there_is_no_baseline(tmp_path: Path) -> None:
    assert gate(tmp_path)[0] == 5
    code, said, _ = gate(tmp_path, "--command", "true")
    assert code == 5
    assert "is in no git work tree" in said


@pytest.mark.parametrize(
    "words",
    [
        ["--against", "main", "--setup", "true"],
        ["--against", "main", "--unproven-tree", "ok"],
        ["--against", "main", "--command", " "],
        ["--against", "main", "--command", "true", "sweep=cast"],
        ["--against", "main", "--command", "true", "--machine-free"],
        ["--against", "main", "--command", "true", "--dry-run"],
        ["--against", "main", "--command", "true", "--blocks", "3"],
        ["--against", "main", "--command", "true", "--alone"],
        ["--measure", "--command", "true"],
        ["--against", "main", "--command", "true", "--unproven-tree", "maybe"],
    ],
    ids=" ".join,
)
def test_words_that_do_not_go_together_are_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_runs_in_the_folder_where_it_was_typed(tmp_path: Path) -> None:
    program = {
        "deep/er/b.py": "import sys\nsys.exit(0 if sys.argv[1] == open('here').read() else 3)\n",
        "deep/er/here": "x",
    }
    root = make_repository(tmp_path / "repo", program)
    commit(root, {"README.md": "words\n"})
    code, said, _ = gate(root / "deep" / "er", "--command", f"{sys.executable} b.py x", "--pairs", "1")
    assert (code, "COULD NOT JUDGE 1 of 1" in said) == (6, True), said  # one round decides nothing


# Wall time and budget -----------------------------------------------------------------------------------------------


@pytest.fixture
def walls(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Seconds by side that each run is said to take, and the clock that they move on."""
    seconds = {"main": 10.0, "change": 10.0, "clock": 0.0, "runs": 0}

    def run(line: str, folder: Path, *_: object) -> tuple[float, None]:
        side = "change" if (folder / "README.md").exists() else "main"
        seconds["clock"] += seconds[side]
        seconds["runs"] += 1
        return seconds[side], None

    monkeypatch.setattr(command_session, "run_shell", run)
    opened = drive.open_session
    clock = lambda: seconds["clock"]  # noqa: E731
    monkeypatch.setattr(drive, "open_session", lambda *a: dataclasses.replace(opened(*a), clock=clock))
    monkeypatch.chdir(root)
    return seconds


def wall(*words: str) -> int:
    return main(["gate", "--against", "main", "--command", "make bench", "--unproven-tree", "ok", *words])


@pytest.mark.parametrize(("slower", "exit_code"), [(1.0, 0), (1.05, 1), (1.2, 1)])
def test_without_out_the_wall_time_is_judged(
    walls: dict[str, float], slower: float, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    walls["change"] *= slower
    assert wall("--budget-s", "0", *FEW) == exit_code
    said = capsys.readouterr().out
    assert "wall time" in said
    assert "not proven that each side ran its own tree (--unproven-tree ok)" in said
    assert walls["runs"] == 2 * (1 + 5 + (8 if exit_code else 0))  # one of each side fills the caches


def test_a_budget_that_cannot_hold_a_decision_is_refused_after_one_round(
    walls: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """13 rounds of two times 10 s do not fit into 200 s."""
    assert wall("--budget-s", "200") == 2
    assert "which 200 s cannot hold" in capsys.readouterr().err
    assert walls["runs"] == 4


def test_a_command_that_outlives_its_time_is_ended_with_what_it_started(tmp_path: Path) -> None:
    line = "sleep 600 & echo $!; wait"
    with pytest.raises(subprocess.TimeoutExpired):
        run_shell(line, tmp_path, 2.0, tmp_path / "output", dict(os.environ))
    pid = (tmp_path / "output").read_text().strip()
    assert pid
    _wait(lambda: not _alive(int(pid)))


# Ends ---------------------------------------------------------------------------------------------------------------


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait(condition: Callable[[], object], limit_s: float = 120) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


HEEDS_CTRL_C = """
import signal, sys
from harness.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" hands it down as ignored
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_gate_that_is_ended_leaves_no_process_and_no_work_tree(
    root: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """After kill -9 the next gate removes the trees; the command is gone at once, in a session of its own too."""
    (tmp_path / "tmp").mkdir()
    pids = tmp_path / "pids"
    line = f"setsid {sys.executable} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(600)' > {pids}.new"
    command = f"mv {pids}.new {pids} 2>/dev/null; ({line}) & while ! [ -s {pids}.new ]; do :; done; mv {pids}.new {pids}; wait"
    here = Path(command_session.__file__).resolve().parents[2]
    started = subprocess.Popen(
        [sys.executable, "-c", HEEDS_CTRL_C, "gate", "--against", "main", "--command", command],
        cwd=root, env={**os.environ, "PYTHONPATH": str(here), "TMPDIR": str(tmp_path / "tmp")}, stderr=subprocess.PIPE,
    )  # fmt: skip
    _wait(pids.exists)
    pid = int(pids.read_text())
    assert _alive(pid)
    assert len(git(root, "worktree", "list").splitlines()) == 3
    started.send_signal(how)
    assert started.communicate(timeout=120) is not None
    _wait(lambda: not _alive(pid))
    if how is signal.SIGKILL:
        assert (
            gate(
                root,
                "--command",
                "true",
                "--unproven-tree",
                "ok",
                "--pairs",
                "1",
                TMPDIR=str(tmp_path / "tmp"),
            )[0]
            == 6
        )
    assert len(git(root, "worktree", "list").splitlines()) == 1
    assert not list((tmp_path / "tmp").glob("harness-gate-*"))


# pytest-benchmark itself --------------------------------------------------------------------------------------------


def test_a_real_suite_of_pytest_benchmark_is_read_and_proven(tmp_path: Path) -> None:
    """One round: each benchmark is found by its name, and nothing is decided."""
    root = spinning(tmp_path / "repo")
    commit(root, {"pkg.py": SPIN.format(factor=1.2)})
    code, said, document = gate(root, "--command", PYTEST, "--pairs", "1")
    assert (code, document.get("verdict")) == (6, "COULD NOT JUDGE 2 of 2"), said
    names = {f"bench/test_bench.py::test_{name}" for name in ("work[20]", "work[40]")}
    assert set(verdicts(document)) == names
    assert any(note.startswith("each side imported modules") for note in document["notes"])


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.05, 1), (1.2, 1)])
def test_a_real_suite_with_a_spin_is_judged(tmp_path: Path, factor: float, code: int) -> None:
    """A spin by processor time, timed by processor time: it takes so long whatever the load."""
    root = spinning(tmp_path / "repo")
    commit(root, {"pkg.py": SPIN.format(factor=factor), "README.md": "words\n"})
    ended, said, document = gate(root, "--command", PYTEST, *FEW)
    assert ended == code, said
    assert set(verdicts(document).values()) == {"REGRESSED" if code else "OK"}, said


@pytest.mark.slow
def test_a_real_editable_install_is_refused_and_an_environment_a_tree_is_measured(tmp_path: Path) -> None:
    """A `.pth` file, which is what an editable install of this layout leaves, in an environment that both sides share."""
    root = spinning(tmp_path / "repo")
    commit(root, {"pkg.py": SPIN.format(factor=1.2), ".gitignore": ".venv\nresults\n"})
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    (site,) = env.glob("lib/python3*/site-packages")
    import pytest_benchmark

    packages = Path(pytest_benchmark.__file__).parents[1]
    (site / "editable.pth").write_text(f"{root}\n{packages}\n")
    line = "{} -P -m pytest -q -p no:cacheprovider bench --benchmark-json={{out}} " + TIMER
    code, said, _ = gate(root, "--command", line.format(env / "bin" / "python"), *FEW)
    assert (code, "original checkout" in said) == (3, True), said
    own = (
        f"{sys.executable} -m venv --without-pip .venv && "
        f"printf '%s\\n' \"$PWD\" {packages} > $(echo .venv/lib/python3*/site-packages)/editable.pth"
    )
    code, said, _ = gate(root, "--setup", own, "--command", line.format(".venv/bin/python"), *FEW)
    assert code == 1, said
