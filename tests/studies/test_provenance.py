"""What may not be published. Oracles: git itself, whose commits are made here; the published rows of 2026-11-27 and their conditions."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import provenance
import pytest
import yaml
from provenance import codes_of_commit, faults
from report_fixtures import H200, TIMING, Invented, write_run

from harness.machine.environment import code_hash
from harness.store.case import Case

ROOT = Path(__file__).parents[2]
WHO = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
READ = ("fp8core/a.py", "harness/b.yaml", "harness/deep/c.j2", "harness/d.csv", "sweeps/e.yaml")
NOT_READ = ("harness/f.css", "tests/g.py", "docs/h.yaml")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *WHO, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (*READ, *NOT_READ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def code_of(folder: Path) -> str | None:
    code_hash.cache_clear()
    codes_of_commit.cache_clear()
    return code_hash(folder)


def publish(
    tree: Path, fp8_layers: int = 1, throttled: bool = False, mark: dict[str, Any] | None = None, **env: Any
) -> list[str]:
    """Codes of what stands against a run of steps at 1.25x that was measured in that environment."""
    known = {"code": code_of(tree), "git_commit": git(tree, "rev-parse", "HEAD")}
    case = Case.of("train", {"model": "llama3_8b", "batch": 1, "seq": 4096})
    fp8 = {
        "ms": 8.0,
        "baseline": "bf16_eager",
        "flops": {"e4m3": 1e12},
        "resolved": {"fp8_layers": fp8_layers},
    }
    invented = Invented(spread=1e-5, timing=TIMING | {"throttled": throttled})
    rows = invented.times(case, {"bf16_eager": {"ms": 10.0}, "tensorwise_eager": fp8})
    write_run(tree / "results/published/run", [rows], env=H200 | known | env)
    if mark:
        (tree / "results/published/provenance.yaml").write_text(yaml.safe_dump([mark]))
    return [fault.code for fault in faults(tree)]


@pytest.mark.parametrize("changed", READ)
def test_data_and_templates_are_code_as_much_as_python(tree: Path, changed: str) -> None:
    before = code_of(tree)
    (tree / changed).write_text("other")
    assert code_of(tree) != before


@pytest.mark.parametrize("changed", NOT_READ)
def test_what_no_row_depends_on_is_no_code(tree: Path, changed: str) -> None:
    before = code_of(tree)
    (tree / changed).write_text("other")
    assert code_of(tree) == before


def test_a_wheel_has_the_hash_of_its_checkout_and_a_commit_too(tree: Path, tmp_path: Path) -> None:
    """A wheel has the sweeps in the package, and in its folder a `sweeps` may be somebody else's."""
    checkout, commit = code_of(tree), git(tree, "rev-parse", "HEAD")
    assert codes_of_commit(tree, commit)[0] == checkout
    (tree / "harness/sweeps").mkdir()
    (tree / "sweeps/e.yaml").rename(tree / "harness/sweeps/e.yaml")
    (tree / "sweeps/theirs.yaml").write_text("1")
    assert code_of(tree) == checkout


def test_a_run_of_a_commit_is_published_and_one_of_a_copy_whose_commit_is_named_too(tree: Path) -> None:
    assert publish(tree) == []
    commit = git(tree, "rev-parse", "HEAD")
    copy = {"git_commit": None, "git_dirty": None}
    assert publish(tree, **copy) == ["unknown_commit"]
    assert publish(tree, mark={"runs": "run", "commit": commit}, **copy) == []
    assert publish(tree, mark={"runs": "run", "commit": commit}, **copy, code="0" * 12) == [
        "code_of_no_commit"
    ]


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"git_dirty": True}, "dirty_tree"),
        ({"git_commit": "f" * 40}, "unknown_commit"),
        ({"code": "0" * 12}, "code_of_no_commit"),
        ({"code": None}, "no_code"),
    ],
    ids=lambda value: str(value),
)
def test_what_is_of_no_commit_is_refused_unless_it_is_marked(
    tree: Path, env: dict[str, Any], code: str
) -> None:
    assert publish(tree, **env) == [code]
    assert publish(tree, mark={"runs": "run", "accepted": [code]}, **env) == []
    assert publish(tree, mark={"runs": "ru", "accepted": [code]}, **env) == [code, "accepted_in_vain"]


def test_a_mark_of_nothing_is_refused(tree: Path) -> None:
    assert publish(tree, mark={"runs": "run", "accepted": ["dirty_tree"]}) == ["accepted_in_vain"]


def test_an_untracked_file_is_seen_where_git_calls_the_tree_clean(tree: Path) -> None:
    (tree / "harness/new.yaml").write_text("1")
    assert git(tree, "status", "--porcelain", "--untracked-files=no") == ""
    assert publish(tree) == ["code_of_no_commit"]


@pytest.mark.parametrize(
    ("sentence", "throttled", "layers", "codes"),
    [
        ("On an H200 FP8 runs at 1.25x bf16.", True, 1, ["throttling_left_out"]),
        ("On an H200 FP8 runs at 1.25x bf16, both throttled.", True, 1, []),
        ("On an H200 FP8 runs at 1.25x bf16.\n\nThe other paragraph: throttled.", True, 1, ["throttling_left_out"]),
        ("| H200 | 1.2 to 1.25x |\n| throttled | H100 |", True, 1, ["throttling_left_out"]),
        ("On an H200 FP8 runs at 1.25x bf16.", False, 1, []),
        ("On an H100 FP8 runs at 1.25x bf16, on an H200 at 1.31x.\n\nAnd 1.25x elsewhere.", True, 1, ["throttling_left_out"]),
        ("On an H100 FP8 runs at 1.25x bf16.", True, 1, []),
        ("On an H200 the advised filter gives 1.25x.", False, 0, ["aa_as_speedup"]),
        ("On an H200 the advised filter gives 1.25x, an A/A.", False, 0, []),
    ],
)  # fmt: skip
def test_a_sentence_leaves_out_no_condition_of_the_ratio_that_it_quotes(
    tree: Path, sentence: str, throttled: bool, layers: int, codes: list[str]
) -> None:
    (tree / "README.md").write_text(f"# A page\n\n{sentence}\n")
    assert publish(tree, layers, throttled) == codes


def shallow() -> bool:
    return not (ROOT / ".git").exists() or git(ROOT, "rev-parse", "--is-shallow-repository") == "true"


@pytest.mark.skipif(
    shallow(), reason="the commits of the published runs are not in a copy or a shallow clone"
)
def test_what_is_published_has_no_fault_but_those_that_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    codes_of_commit.cache_clear()
    assert faults(ROOT) == []
    monkeypatch.setattr(provenance, "_marks", lambda folder: [])
    found = {(f.code, f.where) for f in faults(ROOT)}
    assert ("dirty_tree", "h200/2026-11-27/eager") in found
    assert ("python_alone", "cpu/2026-11-21/codes") in found
