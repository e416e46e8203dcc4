"""`gate --command` in repositories made for the test. Oracle: times that the benchmark program was told to write, and git."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_repo import (
    FAKE,
    FEW,
    PROGRAM,
    commit,
    fake_repository,
    gate,
    git,
    make_repository,
    package,
    verdicts,
)

SLOWER = {"src/pkg/__init__.py": package(a=0.012, b=0.02)}
BROKEN = {"src/pkg/__init__.py": "def times(:\n"}
WORKS = {"src/pkg/__init__.py": package(a=0.01, b=0.02)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fake_repository(tmp_path / "repo")


def run(root: Path, *words: str, command: str = FAKE, **env: str) -> tuple[int, str, dict[str, Any]]:
    ended = gate(root, "--command", command, *FEW, *words, **env)
    assert len(git(root, "worktree", "list").splitlines()) == 1
    return ended


def test_a_change_of_the_documentation_is_ok(root: Path) -> None:
    commit(root, {"README.md": "words\n"})
    code, said, document = run(root, "--markdown", "v.md")
    assert (code, document["verdict"]) == (0, "OK")
    assert verdicts(document) == {"a": "OK", "b": "OK"}
    assert document["baseline"]["commit"] == git(root, "rev-parse", "main")
    assert document["candidate"]["commit"] == git(root, "rev-parse", "change")
    assert any(
        note.startswith("each side imported modules of its own work tree") for note in document["notes"]
    )
    assert "### Gate: OK" in (root / "v.md").read_text()
    assert "a CPU, Python 3.11" in said
    assert len(list(root.glob("results/gate/*/*/stage1/_run.json"))) == 2


@pytest.mark.parametrize(
    ("seconds", "verdict", "exit_code"),
    [(0.0102, "OK", 0), (0.0105, "REGRESSED", 1), (0.012, "REGRESSED", 1), (0.008, "IMPROVED", 0)],
)
def test_each_benchmark_has_a_verdict(root: Path, seconds: float, verdict: str, exit_code: int) -> None:
    """Tolerance 3 %: +2 % is within it, +5 % and +20 % are not."""
    commit(root, {"src/pkg/__init__.py": package(a=seconds, b=0.02)})
    code, said, document = run(root)
    assert (code, verdicts(document)) == (exit_code, {"a": verdict, "b": "OK"}), said


def test_what_is_not_committed_is_measured_as_it_is(root: Path) -> None:
    commit(root, {"bench/old.py": ""})
    (root / "bench" / "old.py").unlink()
    (root / "src" / "pkg" / "new.py").write_text("A = 0.012\n")  # untracked, and imported
    (root / "src" / "pkg" / "__init__.py").write_text(
        "from pkg.new import A\n\n" + package(b=0.02).replace("{", "{'bench.py::a': A, ")
    )
    code, said, document = run(root)
    assert (code, verdicts(document)) == (1, {"a": "REGRESSED", "b": "OK"}), said
    assert f"candidate {git(root, 'rev-parse', 'HEAD')[:10]}+" in said
    assert git(root, "status", "--porcelain").splitlines() == [
        "D bench/old.py",
        " M src/pkg/__init__.py",
        "?? src/pkg/new.py",
    ]


def test_equal_trees_are_ok_without_measuring(root: Path) -> None:
    code, said, _ = run(root)
    assert (code, said[:35]) == (0, "OK (exit 0): all files are the same")
    assert run(root, "--even-if-equal")[2]["verdict"] == "OK"


def test_a_change_that_mends_a_broken_baseline_passes(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "repo", {"bench/program.py": PROGRAM, **BROKEN})
    commit(root, WORKS)
    code, said, document = run(root)
    assert (code, document["verdict"]) == (0, "OK, no time judged"), said
    assert document["findings"][0]["verdict"] == "IMPROVED"
    assert (
        run(root, command="PYTHONPATH=src " + FAKE.partition(" ")[2])[0] == 6
    )  # mends, as far as can be proven


def test_a_command_that_works_on_neither_side_is_refused(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "repo", {"bench/program.py": PROGRAM, **BROKEN})
    commit(root, {"README.md": "words\n"})
    code, said, _ = run(root)
    assert (code, said.count("SyntaxError")) == (2, 2)


@pytest.mark.parametrize(
    ("source", "reason"),
    [(package(a=0.01) + "CODE = 3\n", "exit code 3"), (package(), "wrote no benchmark")],
    ids=["partial file and exit code", "no file"],
)
def test_a_command_that_writes_too_little(root: Path, source: str, reason: str) -> None:
    """A finding where the candidate alone does; never OK where both do."""
    commit(root, {"src/pkg/__init__.py": source})
    code, said, document = run(root)
    assert (code, document["verdict"]) == (1, "REGRESSED")
    assert reason in said
    git(root, "branch", "-qf", "main")
    commit(root, {"README.md": "words\n"})
    code, said, _ = run(root)
    assert (code, said.count(reason)) == (2, 2)


def test_a_renamed_benchmark_is_listed_on_both_sides(root: Path) -> None:
    commit(root, {"src/pkg/__init__.py": package(c=0.01, b=0.02)})
    code, said, document = run(root)
    assert (code, verdicts(document)) == (1, {"a": "REGRESSED", "b": "OK"})
    assert "only on the baseline (lost): bench.py::a" in document["notes"]
    assert "only on the candidate (new, and not judged): bench.py::c" in said
    policy = root.parent / "policy.yaml"  # one within the repository would be the change's own
    policy.write_text("allow:\n  - {match: {case: 'bench.py::a'}, until: 2999-01-01, reason: renamed to c}\n")
    assert run(root, "--policy", str(policy))[0] == 0
    commit(root, {"src/pkg/__init__.py": package(c=0.01, d=0.02)})
    code, said, _ = run(root)
    assert code == 5
    assert "only on the candidate: bench.py::c, bench.py::d" in said


def test_a_command_that_writes_other_benchmarks_each_time_is_not_judged(root: Path) -> None:
    source = "import secrets\n" + package(a=0.01, b=0.02).replace(
        "{", "{'bench.py::' + secrets.token_hex(3): 0.01, "
    )
    commit(root, {"src/pkg/__init__.py": source})
    code, said, _ = run(root)
    assert code == 6
    assert "the candidate does not write the same benchmarks each time" in said


# Which code was run -------------------------------------------------------------------------------------------------

PLAIN = FAKE.partition(" ")[2]  # without a path of its own


def test_an_editable_install_of_the_checkout_is_refused(root: Path) -> None:
    """Both sides would run the checkout: 20 % slower, and equal on both sides."""
    commit(root, SLOWER)
    code, said, document = run(root, command=PLAIN, PYTHONPATH=str(root / "src"))
    assert (code, document["exit_code"], document.get("findings")) == (3, 3, None)
    assert "in the original checkout (an editable install?)" in said
    assert "PYTHONPATH=src:$PYTHONPATH" in said


def test_an_environment_for_each_tree_is_measured(root: Path) -> None:
    commit(root, {**SLOWER, ".gitignore": "results\nsite\n"})
    command = f"PYTHONPATH=site:$PYTHONPATH {PLAIN}"
    code, said, document = run(root, "--setup", "mkdir site && cp -r src/pkg site", command=command)
    assert (code, verdicts(document)) == (1, {"a": "REGRESSED", "b": "OK"}), said
