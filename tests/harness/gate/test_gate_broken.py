"""Oracle: trees that were broken by hand, and the exit codes of docs/gate.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import gate
from harness.__main__ import main
from harness.gate import broken, judge, render
from harness.gate.decide import Verdict
from harness.gate.exit_code import Exit, GateError

ROOT = Path(gate.__file__).resolve().parents[2]
WORDS = ["sweep=cast", "axes.M=16", "axes.K=16", "device=cpu", "arms=[eager]"]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """This tree, and a copy in which one module does not even parse."""
    copy = tmp_path_factory.mktemp("broken") / "tree"
    copy.mkdir()
    for name in ("harness", "fp8core", "sweeps", "pyproject.toml"):
        (copy / name).symlink_to(ROOT / name)
    (copy / "fp8core").unlink()
    (copy / "fp8core").mkdir()
    for path in (ROOT / "fp8core").iterdir():
        (copy / "fp8core" / path.name).symlink_to(path)
    (copy / "fp8core" / "cast.py").unlink()
    (copy / "fp8core" / "cast.py").write_text("def quantize(:\n")
    (copy / "harness").unlink()
    subprocess.run(["cp", "-r", str(ROOT / "harness"), str(copy / "harness")], check=True)
    return {"sound": ROOT, "broken": copy}


def judged(baseline: Path, candidate: Path, side: str) -> judge.Judgement:
    return broken.judge_broken({"baseline": baseline, "candidate": candidate}, WORDS, side, "SyntaxError: x")


def test_a_candidate_that_does_not_import_is_its_own_finding(trees: dict[str, Path]) -> None:
    found = judged(trees["sound"], trees["broken"], "candidate")
    assert found.code is Exit.REGRESSED
    (finding,) = found.findings
    assert finding.reason == "the candidate does not import or plan: SyntaxError: x"
    assert "REGRESSED (exit 1)" in render.terminal(found)
    assert '"exit_code": 1' in render.as_json(found)


def test_a_change_that_mends_a_broken_baseline_passes(trees: dict[str, Path]) -> None:
    found = judged(trees["broken"], trees["sound"], "baseline")
    assert (found.code, found.findings[0].verdict) == (Exit.OK, Verdict.IMPROVED)
    assert render.headline(found) == "OK, no time judged"
    assert any("the baseline does not import" in note for note in found.notes)


def test_a_broken_change_on_a_broken_baseline_does_not_pass(trees: dict[str, Path]) -> None:
    assert judged(trees["broken"], trees["broken"], "baseline").code is Exit.REGRESSED


def test_a_side_that_works_and_lacks_the_sweep_is_a_refusal(trees: dict[str, Path]) -> None:
    with pytest.raises(GateError, match="no_such") as caught:
        broken.judge_broken({"candidate": ROOT}, ["sweep=no_such"], "candidate", "unknown sweep 'no_such'")
    assert caught.value.code is Exit.USAGE
    for side, kind in (("baseline", ""), ("candidate", "LayoutError")):
        with pytest.raises(GateError) as caught:
            broken.judge_broken({side: ROOT}, ["sweep=no_such"], side, "lacks it", kind)
        assert caught.value.code is Exit.NO_BASELINE  # the one cannot serve the other


@pytest.mark.parametrize("side", ["baseline", "candidate"])
@pytest.mark.parametrize("how", [-9, -15, 137, None])
def test_a_side_that_was_killed_or_did_not_end_is_not_broken(
    side: str, how: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A baseline that was killed for its memory made the candidate pass: "the baseline did not import"."""

    def probe(command: list[str], **options: float) -> subprocess.CompletedProcess[bytes]:
        if how is None:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, how)

    monkeypatch.setattr(broken.subprocess, "run", probe)
    with pytest.raises(
        GateError, match=rf"{side} .*: no answer; its own command .*{how or 'did not end'}"
    ) as caught:
        broken.judge_broken({"baseline": ROOT, "candidate": ROOT}, WORDS, side, "no answer")
    assert caught.value.code is Exit.INCONCLUSIVE


def test_a_crash_of_the_gate_is_exit_7_and_reaches_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setattr(gate, "_gate", lambda *_: 1 // 0)
    assert main(["gate", "--baseline", "a", "--candidate", "b"]) == Exit.INTERNAL
    assert "internal error (exit 7)" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("words", [[], ["--against", "HEAD"]])
def test_the_shell_form_blames_no_baseline_for_a_gate_that_does_not_start(
    tmp_path: Path, words: list[str]
) -> None:
    """Python's own exit code of a traceback is 1, which is a regression's too."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "gate").write_text((ROOT / ".ci" / "gate").read_text())
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").write_text("import no_such_module\n")
    done = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "gate"), *words],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "PY": sys.executable},
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert "No module named 'no_such_module'" in done.stderr
    assert "makes it the baseline" not in done.stderr
