"""`gate --command` where a run fails, or the change brings its own judge. Oracle: exit codes of shell lines, and git."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_repo import FAKE, FEW, PROGRAM, commit, fake_repository, gate, git, make_repository, package

from harness.gate.render import MODES

OK = ("--command", "true", "--unproven-tree", "ok")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = fake_repository(tmp_path / "repo")
    commit(root, {"README.md": "words\n"})
    return root


# Failing runs -------------------------------------------------------------------------------------------------------


def test_a_set_up_that_fails(root: Path) -> None:
    """On the candidate it is a finding, on the baseline the change mends it, on both it is a refusal."""
    assert gate(root, *OK, "--setup", "echo no such thing; exit 4")[0] == 2
    code, said, document = gate(root, *OK, "--setup", "! test -e README.md")
    assert (code, document["verdict"], document["mode"]) == (1, "REGRESSED", "broken")
    assert document["findings"][0]["suite"] == "set-up"
    assert "the set-up fails on the candidate and works on the baseline: --setup: exit code 1" in said
    code, said, document = gate(root, *OK, "--setup", "test -e README.md")
    assert (code, document["verdict"], document["mode"]) == (0, "OK, no time judged", "broken")
    assert "it and the command work on the candidate" in said
    assert MODES["paired"] not in said


def test_a_mended_set_up_is_no_pass_where_the_command_fails(root: Path) -> None:
    """The command was never run, and its exit code 3 was "works on the candidate"."""
    words = ("--unproven-tree", "ok", "--setup", "test -e README.md")
    code, said, document = gate(root, "--command", "exit 3", *words)
    assert (code, document["exit_code"], document.get("findings")) == (2, 2, None)
    assert "candidate: exit code 3" in said
    assert "IMPROVED" not in said


def test_a_set_up_that_fails_once_is_run_again_in_a_fresh_tree(root: Path, tmp_path: Path) -> None:
    line = f"test -e README.md || (mkdir made && ! mkdir {tmp_path}/seen)"
    code, said, document = gate(root, "--command", FAKE, *FEW, "--setup", line)
    assert (code, document["verdict"]) == (0, "OK"), said


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("exit 3", 0, "the command failed on the baseline, twice, and works on the candidate: exit code 3"),
        ("exit 125", 0, "twice"),
        ("exit 126", 6, "exit code 126"),
        ("no-such-program", 6, "exit code 127"),
        ("exit 137", 6, "exit code 137"),
        ("kill -9 $$", 6, "exit code -9"),
        ("! mkdir {seen}", 6, "worked there when it was run again"),
        ("{python} bench/new.py", 5, "bench/new.py is not in the base commit"),
        (
            "true --rootdir=./bench/new.py && test -e bench/new.py",
            5,
            "./bench/new.py is not in the base commit",
        ),
    ],
)
def test_a_baseline_that_fails(root: Path, tmp_path: Path, line: str, code: int, words: str) -> None:
    """Exit 0 only where it fails twice, by a code of the program's own, in what the base commit has too."""
    commit(root, {"bench/new.py": ""})
    command = line.format(seen=tmp_path / "seen", python=sys.executable)
    if "new.py" not in line:
        command = f"ls | grep -q READ || {command}"  # a path in full would be one that the base commit lacks
    ended, said, _ = gate(root, "--command", command, "--unproven-tree", "ok")
    assert ended == code, said
    assert words in said


def test_a_baseline_that_had_worked_is_not_mended(root: Path, tmp_path: Path) -> None:
    """It fills the caches, fails in the first round and when that is repeated: one run of three worked."""
    command = f"ls | grep -q READ || mkdir {tmp_path}/seen"
    code, said, _ = gate(root, "--command", command, "--unproven-tree", "ok")
    assert code == 6, said
    assert "failed on the baseline after it had worked there" in said


def test_a_folder_that_is_not_in_the_base_commit_is_no_baseline(root: Path) -> None:
    commit(root, {"new/bench.py": ""})
    code, said, _ = gate(root / "new", *OK)
    assert code == 5
    assert "new is not in the base commit" in said
    assert gate(root / "new", *OK, "--setup", "true")[0] == 5


def test_a_candidate_that_was_killed_is_not_judged(root: Path) -> None:
    assert gate(root, "--command", "! test -e README.md || exit 137", "--unproven-tree", "ok")[0] == 6
    code, said, document = gate(root, "--command", "! test -e README.md", "--unproven-tree", "ok")
    assert (code, document["findings"][0]["suite"]) == (1, "command")
    assert "the command fails on the candidate and works on the baseline" in said


# The policy ---------------------------------------------------------------------------------------------------------

SLOWER = {"src/pkg/__init__.py": package(a=0.012, b=0.02)}
LOOSE = "metrics:\n  time_ms: {rule: timed, tolerance: 9.0}\n"


def test_a_policy_that_the_change_loosens_does_not_judge(tmp_path: Path) -> None:
    root = fake_repository(tmp_path / "repo")
    git(root, "checkout", "-q", "main")
    commit(root, {"p.yaml": LOOSE.replace("9.0", "0.03")})
    git(root, "checkout", "-q", "-B", "change")
    commit(root, {**SLOWER, "p.yaml": LOOSE})
    code, said, _ = gate(root, "--command", FAKE, *FEW, "--policy", "p.yaml")
    assert code == 1, said
    assert "JUDGE CHANGED: this change touches its policy p.yaml; the base commit's judges" in said


def test_a_policy_that_the_change_brings_does_not_judge_and_one_from_elsewhere_does(tmp_path: Path) -> None:
    root = fake_repository(tmp_path / "repo")
    commit(root, {**SLOWER, "p.yaml": LOOSE})
    code, said, _ = gate(root, "--command", FAKE, *FEW, "--policy", "p.yaml")
    assert code == 1, said
    assert "JUDGE CHANGED: p.yaml is not in the base commit" in said
    (tmp_path / "p.yaml").write_text(LOOSE)
    code, said, _ = gate(root, "--command", FAKE, *FEW, "--policy", str(tmp_path / "p.yaml"))
    assert code == 0, said
    assert "JUDGE CHANGED" not in said


# What the gate writes, and scripts ----------------------------------------------------------------------------------


def test_what_a_gate_wrote_is_no_change_of_the_next_one(tmp_path: Path) -> None:
    """`results` and the verdict lie in the repository and are not ignored; neither tree holds them."""
    files = {"bench/program.py": PROGRAM, "src/pkg/__init__.py": package(a=0.01)}
    root = make_repository(tmp_path / "repo", files)
    (root / "README.md").write_text("words\n")
    out = ("--markdown", "gate.md", "--junit", "gate.xml", "--comment", "comment.md")
    command = f"! test -e results && ! test -e gate.md && {FAKE}"
    assert gate(root, "--command", command, *FEW, *out)[0] == 0
    assert (root / "results" / "gate").is_dir()
    code, said, _ = gate(root, "--command", command, *FEW, *out)
    assert code == 0, said
    (root / "README.md").unlink()
    code, said, _ = gate(root, "--command", command, *FEW, *out)
    assert said.startswith("OK (exit 0): all files are the same"), said
