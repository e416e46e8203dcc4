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
from harness.gate.exit_code import Exit, GateError
from harness.gate.render import Answer
from harness.gate.runner import SideError
from harness.gate.sweeping import Sweeping
from harness.gate.unit import Judgement

ROOT = Path(gate.__file__).resolve().parents[2]
WORDS = ["sweep=cast", "axes.M=16", "axes.K=16", "device=cpu", "arms=[eager]"]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """This tree; one that does not parse; and those whose command answers: it refuses, it plans."""
    found = {"sound": ROOT}
    for name, program in (("broken", "def quantize(:"), ("refuses", "raise SystemExit(2)"), ("plans", "")):
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "harness").mkdir()
        (found[name] / "harness" / "__init__.py").write_text("")
        (found[name] / "harness" / "__main__.py").write_text(program)
    return found


def judged(
    baseline: Path, candidate: Path, side: str, why: str = "SyntaxError: x", kind: str = ""
) -> Judgement:
    instrument = Sweeping({"baseline": baseline, "candidate": candidate}, WORDS, 1)
    return instrument.judge_broken(SideError(side, why, kind), lambda: math.inf)


def test_a_candidate_that_does_not_import_is_a_finding_and_one_that_mends_it_passes(
    trees: dict[str, Path],
) -> None:
    found = judged(trees["sound"], trees["broken"], "candidate")
    (finding,) = found.findings
    assert (found.code, str(finding.verdict), "SyntaxError: x" in finding.reason) == (
        Exit.REGRESSED,
        "REGRESSED",
        True,
    )
    assert math.isnan(finding.unit.before)  # nothing is claimed of a baseline that was not tried
    assert "BROKEN (exit 1)" in render.terminal(Answer.of(found))
    assert '"exit_code": 1' in render.as_json(Answer.of(found))
    found = judged(trees["broken"], trees["sound"], "baseline")
    (finding,) = found.findings
    assert (found.code, str(finding.verdict), render.headline(found)) == (
        Exit.OK,
        "IMPROVED",
        "OK, no time judged",
    )
    assert (finding.unit.before, finding.unit.after) == (0.0, 1.0)
    assert judged(trees["broken"], trees["broken"], "baseline").code is Exit.REGRESSED
    alone = Sweeping({"candidate": trees["broken"]}, WORDS, 1)  # --measure: the baseline is stored
    found = alone.judge_broken(SideError("candidate", "SyntaxError: x"), lambda: math.inf)
    assert (found.baseline.name, found.code) == ("baseline", Exit.REGRESSED)


@pytest.mark.parametrize("tree", ["refuses", "plans"])
@pytest.mark.parametrize(
    ("side", "kind", "code"),
    [
        ("candidate", "", Exit.USAGE),
        ("baseline", "", Exit.NO_BASELINE),
        ("candidate", "LayoutError", Exit.NO_BASELINE),
    ],
)
def test_a_side_that_works_and_lacks_the_sweep_is_a_refusal(
    trees: dict[str, Path], tree: str, side: str, kind: str, code: Exit
) -> None:
    with pytest.raises(GateError, match="lacks it") as caught:
        judged(trees[tree], trees[tree], side, "lacks it", kind)
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
    with pytest.raises(GateError, match=rf"{side} .*{how or 'did not end'}") as caught:
        judged(ROOT, ROOT, side, "no answer")
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
