"""`gate --command` in repositories made for the test. Oracle: times that the benchmark program was told to write, exit codes of
shell lines, git, and a clock made for the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_repo import (
    FAKE,
    FEW,
    PROGRAM,
    PYTEST,
    SPIN,
    commit,
    fake_repository,
    gate,
    git,
    make_repository,
    package,
    spinning,
    verdicts,
)  # fmt: skip

from harness.__main__ import main
from harness.gate import command as command_module
from harness.gate.command import run_shell
from harness.gate.runner import Session
from harness.store.private import public

SOURCE = "src/pkg/__init__.py"
SLOWER = {SOURCE: package(a=0.012, b=0.02)}
BROKEN = {SOURCE: "def times(:\n"}
WORDS = {"README.md": "words\n"}
HERE = Path(command_module.__file__).resolve().parents[2]
ONCE = ("--pairs", "1", "--even-if-equal")  # one round decides no time
UNPROVEN = ("--unproven-tree", "ok", "--even-if-equal")
LOOSE = "metrics:\n  time_ms: {rule: timed, tolerance: 9.0}\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fake_repository(tmp_path / "repo")


def run(root: Path, *words: str, command: str = FAKE, **env: str) -> tuple[int, str, dict[str, Any]]:
    ended = gate(root, "--command", command, *FEW, "--even-if-equal", *words, **env)
    assert len(git(root, "worktree", "list").splitlines()) == 1
    return ended


# Verdicts


@pytest.mark.parametrize("hidden", [False, True])
def test_what_is_not_committed_is_measured_as_it_is(root: Path, hidden: bool) -> None:
    if hidden:
        git(root, "update-index", "--assume-unchanged", SOURCE)
    commit(root, {"bench/old.py": ""})
    (root / "bench" / "old.py").unlink()
    (root / "src" / "pkg" / "new.py").write_text("NAME = 'bench.py::new'\n")  # untracked, and imported
    renamed = package(a=0.01, b=0.02).replace("'bench.py::a'", "NAME")
    (root / SOURCE).write_text(f"from pkg.new import NAME\n\n{renamed}")
    code, said, document = gate(root, "--command", FAKE, *ONCE)
    assert (code, verdicts(document)["a"]) == (1, "REGRESSED"), said  # it is lost
    assert "only on the candidate (new, and not judged): bench.py::new" in document["notes"]
    assert f"candidate {git(root, 'rev-parse', 'HEAD')[:10]}+" in said
    assert git(root, "status", "--porcelain").splitlines() == [
        "D bench/old.py",
        *([] if hidden else [f" M {SOURCE}"]),
        "?? src/pkg/new.py",
    ]


def test_equal_trees_are_ok_without_measuring(root: Path) -> None:
    code, said, _ = gate(root, "--command", FAKE)
    assert (code, said[:35]) == (0, "OK (exit 0): all files are the same")
    assert run(root)[2]["verdict"] == "OK"
    (root / ".git" / "info" / "exclude").write_text("local.txt\n")
    (root / "local.txt").write_text("a file that no tree holds may be looked for")
    assert "COULD NOT JUDGE" in gate(root, "--command", FAKE, "--pairs", "1")[1]


def test_a_renamed_benchmark_is_listed_on_both_sides(root: Path) -> None:
    commit(root, {SOURCE: package(c=0.01, b=0.02)})
    code, said, document = run(root)
    assert (code, verdicts(document)) == (1, {"a": "REGRESSED", "b": "OK"}), said
    assert "only on the baseline (lost): bench.py::a" in document["notes"]
    assert "only on the candidate (new, and not judged): bench.py::c" in document["notes"]
    policy = root.parent / "policy.yaml"  # one within the repository would be the change's own
    policy.write_text("allow:\n  - {match: {case: 'bench.py::a'}, until: 2999-01-01, reason: renamed to c}\n")
    assert run(root, "--policy", str(policy))[0] == 0


LESS = {"bench/program.py": PROGRAM.replace("seconds *", "0.6 * seconds *")}
OTHER = {"bench/program.py": PROGRAM.replace("pkg.times()", "pkg.new_times()")}
NEW = {SOURCE: package(a=0.01, b=0.02).replace("times", "new_times")}


@pytest.mark.parametrize(
    ("change", "words", "code", "verdict"),
    [
        ({**LESS, **SLOWER}, ("--accept-changed-benchmark",), 0, "OK"),
        ({**OTHER, **NEW}, (), 6, "no verdict (exit 6)"),  # the base commit's does not run there
        ({**OTHER, **NEW}, ("--accept-changed-benchmark",), 0, "OK"),
        ({**OTHER, **BROKEN}, (), 1, "BROKEN"),  # neither does its own
        (
            {"bench/program.py": PROGRAM + "import program\n"},
            (),
            6,
            "no verdict (exit 6)",
        ),  # or is it the code?
    ],
)
def test_the_benchmark_is_the_base_commits(
    root: Path, change: dict[str, str], words: tuple[str, ...], code: int, verdict: str | None
) -> None:
    commit(root, change)
    ended, said, document = gate(root, "--command", FAKE, *FEW, *words)
    assert (ended, document.get("verdict")) == (code, verdict), said


# Failing runs


def test_a_baseline_that_does_not_import_is_none_and_neither_side_is_refused(tmp_path: Path) -> None:
    """A change that mends it was compared with nothing."""
    root = make_repository(tmp_path / "repo", {"bench/program.py": PROGRAM, **BROKEN})
    commit(root, WORDS)
    code, said, _ = run(root)
    assert (code, said.count("SyntaxError")) == (2, 2)
    commit(root, {SOURCE: package(a=0.01)})
    assert run(root)[0] == 5


def test_a_candidate_that_fails_is_a_finding(root: Path) -> None:
    """A partial file, and an exit code; without that: command_situations.py."""
    commit(root, {SOURCE: package(a=0.01) + "CODE = 3\n"})
    code, said, document = run(root)
    assert (code, document["verdict"], document["mode"]) == (1, "BROKEN", "broken"), said
    assert "exit code 3" in said
    assert [f["case"] for f in document["findings"]] == [public(FAKE)]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("ls | grep -q READ || exit 125", 5),
        ("ls | grep -q READ || no-such-program", 6),
        ("ls | grep -q READ || kill -9 $$", 6),
        ("! test -e README.md || exit 137", 6),
    ],
)
def test_a_baseline_that_fails_is_none_and_a_side_that_was_ended_is_not_judged(
    root: Path, line: str, code: int
) -> None:
    commit(root, WORDS)
    ended, said, _ = gate(root, "--command", line, *UNPROVEN)
    assert ended == code, said


def test_a_baseline_that_had_worked_is_not_judged(root: Path, tmp_path: Path) -> None:
    """It fills the caches, and fails in the first round."""
    commit(root, WORDS)
    code, said, _ = gate(root, "--command", f"ls | grep -q READ || mkdir {tmp_path}/seen", *UNPROVEN)
    assert code == 6, said
    assert "after it had worked" in said


@pytest.mark.parametrize(
    ("setup", "code", "verdict"),
    [
        ("echo no such thing; exit 4", 2, None),
        ("! test -e README.md", 1, "BROKEN"),
        ("test -e README.md", 5, None),
        ("test -e README.md || exit 137", 6, None),
    ],
)
def test_a_set_up_that_fails(root: Path, setup: str, code: int, verdict: str | None) -> None:
    commit(root, WORDS)
    ended, said, document = gate(root, "--command", "true", *UNPROVEN, "--setup", setup)
    assert ended == code, said
    if verdict:  # nothing is said of a command that was not run
        assert [f["case"] for f in document["findings"]] == [setup]
        assert document["notes"] == ["the candidate does not run; no time was judged"]
    else:
        assert "findings" not in document


def test_a_folder_that_is_not_in_the_base_commit_is_no_baseline(root: Path) -> None:
    commit(root, {"new/bench.py": ""})
    assert gate(root / "new", "--command", "true", *UNPROVEN)[0] == 5


# Which code, which policy


def test_an_environment_a_tree_is_measured(root: Path) -> None:
    """The way out of an editable install, for which see command_situations.py."""
    commit(root, {**SLOWER, ".gitignore": "results\nsite\n"})
    command = FAKE.replace("src:", "site:")
    code, said, document = run(root, "--setup", "mkdir site && cp -r src/pkg site", command=command)
    assert (code, verdicts(document)) == (1, {"a": "REGRESSED", "b": "OK"}), said


@pytest.mark.parametrize(("named", "code"), [("p.yaml", 1), ("../p.yaml", 0)], ids=["brought", "elsewhere"])
def test_no_policy_of_the_change_judges_it(root: Path, named: str, code: int) -> None:
    """The others: test_gate_base.py."""
    commit(root, {**SLOWER, "p.yaml": LOOSE})
    (root.parent / "p.yaml").write_text(LOOSE)
    ended, said, _ = run(root, "--policy", named)
    assert (ended, "JUDGE CHANGED" in said) == (code, bool(code)), said


def test_what_a_gate_wrote_is_no_change_of_the_next_one(tmp_path: Path) -> None:
    """`results` and the verdict lie in the repository and are not ignored; neither tree holds them."""
    root = make_repository(tmp_path / "repo", {"bench/program.py": PROGRAM, SOURCE: package(a=0.01)})
    (root / "README.md").write_text("words\n")
    out = ("--markdown", "gate.md", "--junit", "gate.xml", "--comment", "comment.md")
    command = f"! test -e results && ! test -e gate.md && {FAKE}"
    for _ in range(2):
        code, said, _ = gate(root, "--command", command, *ONCE, *out)
        assert code == 6, said
    (root / "README.md").unlink()
    assert gate(root, "--command", command, *out)[1].startswith("OK (exit 0): all files are the same")


# Where it may be typed


def test_another_repository_takes_a_command_and_no_repository_has_a_baseline(
    root: Path, tmp_path: Path
) -> None:
    """Without a command it judged the harness's own checkout and said OK."""
    assert gate(root)[0] == 2
    assert gate(tmp_path)[0] == gate(tmp_path, "--command", "true")[0] == 5


def test_the_command_runs_in_the_folder_where_it_was_typed(tmp_path: Path) -> None:
    program = "import sys\nsys.exit(0 if sys.argv[1] == open('here').read() else 3)\n"
    root = make_repository(tmp_path / "repo", {"deep/er/b.py": program, "deep/er/here": "x"})
    commit(root, WORDS)
    code, said, document = gate(
        root / "deep" / "er", "--command", f"{sys.executable} b.py x", "--pairs", "1", *UNPROVEN
    )
    assert (code, document["verdict"]) == (6, "COULD NOT JUDGE 1 of 1"), said  # one round decides nothing


# Wall time and budget


@pytest.fixture
def walls(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Seconds by side that each run is said to take, and the clock that they move on."""
    commit(root, WORDS)
    seconds = {"main": 10.0, "change": 10.0, "clock": 0.0, "runs": 0}

    def run(line: str, folder: Path, *_: object) -> tuple[float, None]:
        side = "change" if (folder / "README.md").exists() else "main"
        seconds["clock"] += seconds[side]
        seconds["runs"] += 1
        return seconds[side] * (1 + 1e-6 * seconds["runs"]), None

    monkeypatch.setattr(command_module, "run_shell", run)
    opened = partialmethod(Session.__init__, clock=lambda: seconds["clock"])
    monkeypatch.setattr(Session, "__init__", opened)
    monkeypatch.chdir(root)
    return seconds


@pytest.mark.parametrize(
    ("slower", "words", "code", "runs"),
    [
        (1.0, ("--budget-s", "0", *FEW), 0, 2 * (1 + 5)),  # one of each side fills the caches
        (1.05, ("--budget-s", "0", *FEW), 1, 2 * (1 + 5 + 8)),
        (1.0, ("--budget-s", "200"), 2, 4),  # 13 rounds of two times 10 s do not fit
    ],
)
def test_without_out_the_wall_time_is_judged(
    walls: dict[str, float], slower: float, words: tuple[str, ...], code: int, runs: int
) -> None:
    walls["change"] *= slower
    assert main(["gate", "--against", "main", "--command", "make bench", *UNPROVEN, *words]) == code
    assert walls["runs"] == runs


# Ends


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


def test_a_command_that_outlives_its_time_is_ended_with_what_it_started(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_shell("sleep 600 & echo $!; wait", tmp_path, 2.0, tmp_path / "output", dict(os.environ))
    pid = int((tmp_path / "output").read_text())
    _wait(lambda: not _alive(pid))


HEEDS_CTRL_C = """
import signal, sys
from harness.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" hands it down as ignored
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_gate_that_is_ended_leaves_no_process_and_no_work_tree(
    root: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """After kill -9 the next gate removes the trees; the command is gone at once, in a session of its own too."""
    commit(root, WORDS)
    (tmp_path / "tmp").mkdir()
    pids = tmp_path / "pids"
    line = f"setsid {sys.executable} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(600)' > {pids}.new"
    command = f"({line}) & while ! [ -s {pids}.new ]; do :; done; mv {pids}.new {pids}; wait"
    started = subprocess.Popen(
        [sys.executable, "-c", HEEDS_CTRL_C, "gate", "--against", "main", "--command", command, "--even-if-equal"],
        cwd=root, env={**os.environ, "PYTHONPATH": str(HERE), "TMPDIR": str(tmp_path / "tmp")}, stderr=subprocess.PIPE,
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
            gate(root, "--command", "true", *UNPROVEN, "--pairs", "1", TMPDIR=str(tmp_path / "tmp"))[0] == 6
        )
    assert len(git(root, "worktree", "list").splitlines()) == 1
    assert not list((tmp_path / "tmp").glob("harness-gate-*"))


def test_two_gates_at_once_take_nothing_from_each_other(root: Path, tmp_path: Path) -> None:
    """Two verdicts, two sessions of both sides, no tree left."""
    commit(root, WORDS)
    (tmp_path / "tmp").mkdir()
    words = ["gate", "--against", "main", "--command", "sleep 0.5", *UNPROVEN, "--pairs", "1"]
    env = {**os.environ, "PYTHONPATH": str(HERE), "TMPDIR": str(tmp_path / "tmp")}
    gates = [subprocess.Popen([sys.executable, "-m", "harness", *words], cwd=root, env=env) for _ in range(2)]
    assert [each.wait() for each in gates] == [6, 6]  # one round decides nothing
    assert len(list(root.glob("results/gate/*/*/stage1/_run.json"))) == 4
    assert not list((tmp_path / "tmp").glob("harness-gate-*"))


# pytest-benchmark itself


def test_a_real_suite_of_pytest_benchmark_is_read_and_proven(tmp_path: Path) -> None:
    """One round: each benchmark is found by its name, and nothing is decided."""
    root = spinning(tmp_path / "repo")
    commit(root, {"pkg.py": SPIN.format(factor=1.2)})
    code, said, document = gate(root, "--command", PYTEST, "--pairs", "1")
    assert (code, document.get("verdict")) == (6, "COULD NOT JUDGE 2 of 2"), said
    assert set(verdicts(document)) == {f"bench/test_bench.py::test_work[{n}]" for n in (20, 40)}
    assert "of the change these files were read: pkg.py" in document["notes"]
