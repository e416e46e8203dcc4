"""Oracle: trees that a test writes: a loosened policy, a clock that lies, a clock that lacks what is asked of it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from command_repo import git

from harness.__main__ import main
from harness.gate import runner, sweeping
from harness.gate import trees as work_trees
from harness.gate.options import Exit, GateError
from harness.gate.sweeping import Sweep, Sweeping
from harness.gate.trees import POLICY, Base

ROOT = Path(sweeping.__file__).resolve().parents[2]
WORDS = ["sweep=cast", "axes.M=16", "axes.K=16", "axes.dtype=e4m3fn", "axes.granularity=tensorwise",
         "axes.src=bf16", "arms=[eager]", "device=cpu", "timing.block_ms=1"]  # fmt: skip
LIES = ("tuple(run.samples)", "tuple(1e-9 for _ in run.samples)")


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """(candidate, base): two checkouts of one commit, with a judge and a policy of their own."""
    root = tmp_path / "root"
    (root / "harness" / "gate").mkdir(parents=True)
    (root / "harness" / "timing").mkdir()
    (root / "harness" / "timing" / "rounds.py").write_text("def measure(): ...\n")
    (root / "harness" / "user.py").write_text("from harness.timing.rounds import measure\n")
    shutil.copy(ROOT / POLICY, root / POLICY)
    (root / "ci.yaml").write_text("pairs: 5\n")
    git(tmp_path, "init", "-q", "root")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "one")
    git(root, "worktree", "add", "-q", str(tmp_path / "base"), "HEAD", "--detach")
    return root, tmp_path / "base"


def base_of(root: Path, tree: Path, named: Path | None) -> Base:
    return work_trees.base_of(root, tree, named, root / POLICY, work_trees.JUDGES)


def loosen(path: Path) -> None:
    text = path.read_text()
    assert "  ms: {rule: timed, tolerance: " in text
    path.write_text(text.replace("  ms: {rule: timed, tolerance: ", "  ms: {rule: timed, tolerance: 9"))


def tolerance(found: Base) -> float:
    return found.policy.units["ms"].tolerance


def test_the_policy_of_the_command_line_is_the_base_commits_too(trees: tuple[Path, Path]) -> None:
    (trees[0] / "ci.yaml").write_text("pairs: 1\nunits: {ms: {rule: ignore}}\n")
    found = base_of(*trees, trees[0] / "ci.yaml")
    assert (found.policy.pairs, found.policy.units["ms"].rule) == (5, "timed")
    assert "(ci.yaml)" in found.notes[0]
    (trees[0] / "new.yaml").write_text("pairs: 2\nunits: {ms: {rule: ignore}}\n")
    found = base_of(*trees, trees[0] / "new.yaml")
    assert found.policy == base_of(*trees, None).policy  # as gate --command: none that the change brings
    assert any("new.yaml is not in the base commit" in note for note in found.notes)


def test_a_policy_that_this_gate_cannot_read_is_no_baseline(trees: tuple[Path, Path]) -> None:
    (trees[1] / POLICY).write_text("a_key_of_before: 1\n")
    with pytest.raises(
        GateError, match=r"cannot read the policy of the base commit.*land that change"
    ) as caught:
        base_of(*trees, None)
    assert caught.value.code is Exit.NO_BASELINE


def test_a_change_that_brings_a_clock_that_lies_is_not_measured_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command: the candidate is measured in a tree of its own, in which the base commit's clock lies."""
    root = tmp_path / "repo"
    for name in ("harness", "fp8core", "sweeps"):
        shutil.copytree(ROOT / name, root / name)
    git(tmp_path, "init", "-q", "repo")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "one")
    session = root / "harness" / "timing" / "session.py"
    assert LIES[0] in session.read_text()
    session.write_text(session.read_text().replace(*LIES))
    monkeypatch.setattr(work_trees, "project_root", lambda: root)
    fastest: dict[str, float] = {}

    def measure(sweeping: Sweeping, this: runner.GateRound) -> None:
        for name, tree in {**sweeping.trees, "own": root}.items():
            sweep = Sweep(tree, WORDS, Path(tempfile.mkdtemp(dir=tmp_path)))
            planned = sweep.receive(180)["cases"]
            for answer in (planned[0]["case_id"], True, False):
                sweep.reply(answer)
                sweep.receive(60)
            fastest[name] = min(min(samples) for samples in sweep.rows()["samples"])
            sweep.close()
        raise runner.SideError("candidate", "no more", "broken", ("import", "x", "y"))

    monkeypatch.setattr(Sweeping, "measure", measure)
    assert main(["gate", "--against", "HEAD", "--results-dir", str(tmp_path / "r")]) == 1
    assert fastest["own"] == 1e-9  # the lie is seen where a side brings its own clock
    assert min(fastest["candidate"], fastest["baseline"]) > 1e-4  # ms: no product is faster


def test_the_verdict_tells_it(
    trees: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through the command: sides that cannot be measured here still come with the note, and in a tree of its own."""
    (trees[0] / "harness" / "timing" / "rounds.py").write_text("def measure(): return 0\n")
    loosen(trees[0] / POLICY)
    (trees[0] / "harness" / "__init__.py").write_text("raise ImportError('no')\n")
    monkeypatch.setattr(work_trees, "project_root", lambda: trees[0])
    asked = []

    def broken(sweeping: Sweeping, *args: object) -> None:
        asked.append(sweeping.trees["candidate"])
        raise runner.SideError("candidate", "ImportError: no", "broken", ("import", "x", "y"))

    monkeypatch.setattr(Sweeping, "measure", broken)
    assert main(["gate", "--against", "HEAD", "--results-dir", str(tmp_path / "r")]) == 1
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("JUDGE CHANGED")]
    assert f"({POLICY}; harness/timing/" in note
    assert asked[0] != trees[0]
