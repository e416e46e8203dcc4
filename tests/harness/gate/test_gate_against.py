"""Oracle: git itself, in a repository made for the test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_repo import git

from harness.__main__ import main
from harness.gate import trees
from harness.gate.options import Exit, GateError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two commits; the second one changes the documentation only."""
    root = tmp_path / "repo"
    (root / "fp8core").mkdir(parents=True)
    (root / "fp8core" / "cast.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q", "repo")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "one")
    (root / "README.md").write_text("words\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "two")
    return root


def test_a_file_that_became_a_folder_or_a_link_is_copied_as_it_is(root: Path, tmp_path: Path) -> None:
    """Oracle: the work tree itself. Nothing behind a link is touched."""
    for name in ("plain", "folder/a", "folder/b", "linked/a", "gone/a"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(name)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "three")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a").write_text("kept")
    git(root, "rm", "-q", "-r", "plain", "folder", "linked", "gone")
    (root / "plain").mkdir()
    (root / "plain" / "new").write_text("new")
    (root / "folder").write_text("a file")
    (root / "linked").symlink_to(elsewhere)
    git(root, "add", "linked")
    with trees.work_tree(root, git(root, "rev-parse", "HEAD")) as tree:
        trees.copy_changes(root, tree)
        assert (tree / "plain" / "new").read_text() == "new"
        assert (tree / "folder").read_text() == "a file"
        assert (tree / "linked").is_symlink()
        assert not (tree / "gone" / "a").exists()
    assert (elsewhere / "a").read_text() == "kept"


def test_a_git_that_fails_is_no_unchanged_tree(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence would be: nothing is new, so nothing of it is judged."""
    (root / "new.py").write_text("")
    real = trees._git

    def failing(where: Path, *words: str) -> subprocess.CompletedProcess[str]:
        if words[0] == "ls-files":
            return subprocess.CompletedProcess(words, 128, "", "fatal: index file corrupt")
        return real(where, *words)

    monkeypatch.setattr(trees, "_git", failing)
    with pytest.raises(GateError, match=r"git ls-files failed.*index file corrupt"):
        trees.copy_changes(root, tmp_path)


def test_a_shallow_clone_says_how_to_deepen_it(root: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{root}", "shallow")
    with pytest.raises(GateError, match="git fetch --unshallow"):
        trees.commit_to_compare(tmp_path / "shallow", "HEAD~1", tip=True)


def test_what_the_other_branch_has_added_is_not_judged(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A documentation branch, and a main that has gained an arm since: against its tip the arm would be a lost case."""
    git(root, "branch", "docs")
    (root / "fp8core" / "arm.py").write_text("y = 1\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "an arm")
    git(root, "branch", "trunk")
    git(root, "checkout", "-q", "docs")
    tip, base = (trees.commit_to_compare(root, "trunk", tip=tip) for tip in (True, False))
    assert base == git(root, "rev-parse", "docs")
    monkeypatch.setattr(trees, "project_root", lambda: root)
    assert main(["gate", "--against", "trunk"]) == 0
    assert f"the same in {base[:10]}" in capsys.readouterr().out
    git(root, "checkout", "-q", "trunk", "--", "fp8core")
    assert main(["gate", "--against", "trunk", "--tip"]) == 0
    assert f"the same in {tip[:10]}" in capsys.readouterr().out


def test_histories_that_never_met_are_a_missing_baseline(root: Path) -> None:
    trunk = git(root, "rev-parse", "--abbrev-ref", "HEAD")
    git(root, "checkout", "-q", "--orphan", "other")
    git(root, "commit", "-qm", "alone")
    git(root, "branch", "-q", "elsewhere")
    git(root, "checkout", "-q", trunk)
    with pytest.raises(GateError, match="no common ancestor; --tip") as caught:
        trees.commit_to_compare(root, "elsewhere", tip=False)
    assert caught.value.code is Exit.NO_BASELINE
