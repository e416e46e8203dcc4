"""Oracle: trees that were broken by hand, and the exit codes of docs/gate.md."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from harness import gate
from harness.__main__ import main
from harness.gate import render, sweeping
from harness.gate.options import Exit, GateError
from harness.gate.policy import load_policy
from harness.gate.render import Answer
from harness.gate.runner import Round, Session, SideError
from harness.gate.sweeping import Sweeping
from harness.gate.unit import Judgement

ROOT = Path(gate.__file__).resolve().parents[2]
WORDS = ["sweep=cast", "axes.M=16", "axes.K=16", "device=cpu", "arms=[eager]"]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that does not parse, and those whose command answers: it refuses, it plans."""
    found = {}
    for name, program in (("broken", "def quantize(:"), ("refuses", "raise SystemExit(2)"), ("plans", "")):
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "harness").mkdir()
        (found[name] / "harness" / "__init__.py").write_text("")
        (found[name] / "harness" / "__main__.py").write_text(program)
    return found


def judged(tree: Path, side: str, kind: str = "") -> Judgement:
    """A session of which one side cannot be planned; the other one is this tree."""

    class Broken(Sweeping):
        def measure(self, this: Round) -> None:
            raise SideError(side, "SyntaxError: x", kind)

    sides = {"baseline": ROOT, "candidate": ROOT, side: tree}
    return Session(Broken(sides, WORDS, 1), load_policy(), Path("nowhere")).run()


def test_a_candidate_that_does_not_import_is_a_finding(trees: dict[str, Path]) -> None:
    found = judged(trees["broken"], "candidate")
    (finding,) = found.findings
    assert (found.code, str(finding.verdict)) == (Exit.REGRESSED, "REGRESSED")
    assert "SyntaxError: x" in finding.reason
    assert math.isnan(finding.unit.before)  # nothing is claimed of a baseline that was not tried
    assert "BROKEN (exit 1)" in render.terminal(Answer.of(found))
    assert '"exit_code": 1' in render.as_json(Answer.of(found))


@pytest.mark.parametrize(
    ("tree", "side", "kind", "code"),
    [
        ("refuses", "candidate", "", Exit.USAGE),
        ("plans", "candidate", "", Exit.USAGE),
        ("plans", "candidate", "LayoutError", Exit.NO_BASELINE),
        ("refuses", "baseline", "", Exit.NO_BASELINE),
        ("broken", "baseline", "", Exit.NO_BASELINE),  # a change that mends it was compared with nothing
    ],
)
def test_a_side_that_lacks_the_sweep_and_a_baseline_that_does_not_run_are_refusals(
    trees: dict[str, Path], tree: str, side: str, kind: str, code: Exit
) -> None:
    with pytest.raises(GateError) as caught:
        judged(trees[tree], side, kind)
    assert caught.value.code is code


@pytest.mark.parametrize(("side", "how"), [("baseline", -9), ("candidate", 137), ("baseline", None)])
def test_a_side_that_was_killed_or_did_not_end_is_not_broken(
    side: str, how: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A baseline that was killed for its memory made the candidate pass: "the baseline did not import"."""

    def probe(command: list[str], **options: float) -> subprocess.CompletedProcess[bytes]:
        if how is None:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, how)

    monkeypatch.setattr(sweeping.subprocess, "run", probe)
    with pytest.raises(GateError) as caught:
        judged(ROOT, side)
    assert caught.value.code is Exit.INCONCLUSIVE


def test_a_crash_of_the_gate_is_exit_7_and_reaches_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setattr(gate, "_answer", lambda *_: 1 // 0)
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
