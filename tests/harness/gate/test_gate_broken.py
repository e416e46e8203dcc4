"""Oracle: trees that were broken by hand, and the exit codes of docs/gate.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import gate
from harness.__main__ import main
from harness.gate.options import Exit, GateError
from harness.gate.policy import load_policy
from harness.gate.runner import GateRound, Session
from harness.gate.sweeping import EndedError, Sweep, Sweeping, no_start

if TYPE_CHECKING:
    from harness.gate.unit import Judgement

ROOT = Path(gate.__file__).resolve().parents[2]


def judged(side: str, code: int | None) -> Judgement:
    """A session of which one side cannot be planned, as its command ended with this code or was silent."""

    class Broken(Sweeping):
        def measure(self, this: GateRound) -> None:
            raise no_start(side, ROOT, "SyntaxError: x", code)

    sides = {"baseline": ROOT, "candidate": ROOT}
    return Session(Broken(sides, ["sweep=x"], 1), load_policy(), Path("nowhere")).run()


@pytest.mark.parametrize(
    ("side", "ended", "code"),
    [
        ("candidate", 2, Exit.USAGE),
        ("candidate", 0, Exit.USAGE),
        ("baseline", 2, Exit.NO_BASELINE),  # of a commit that takes no turns too
        ("baseline", 1, Exit.NO_BASELINE),  # a change that mends it was compared with nothing
        # A baseline that was killed for its memory made the candidate pass: "the baseline did not import".
        ("baseline", -9, Exit.INCONCLUSIVE),
        ("candidate", 137, Exit.INCONCLUSIVE),
        ("baseline", None, Exit.INCONCLUSIVE),
    ],
)
def test_a_side_that_refuses_or_was_killed_or_is_the_baseline_is_no_finding(
    side: str, ended: int | None, code: Exit
) -> None:
    with pytest.raises(GateError) as caught:
        judged(side, ended)
    assert caught.value.code is code


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("def quantize(:", 1),
        ("raise SystemExit(2)", 2),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import time; time.sleep(99)", None),
    ],
)
def test_how_the_command_of_a_tree_ended_is_known(tmp_path: Path, program: str, code: int | None) -> None:
    tree = tmp_path / "tree"
    (tree / "harness").mkdir(parents=True)
    (tree / "harness" / "__init__.py").write_text("")
    (tree / "harness" / "__main__.py").write_text(program)
    sweep = Sweep(tree, ["sweep=x"], tmp_path)
    try:
        with pytest.raises(EndedError) as caught:
            sweep.receive(0.5 if code is None else 60.0)
        assert caught.value.code == code
        assert len(sweep.rows()) == 0
    finally:
        sweep.close()


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
