"""Broken: a side that cannot even make its plan, or on which the user's command fails. A candidate that does not import is a finding of its own, not a crash.

A change that mends a broken baseline has nothing to fall behind, so it passes if it can be planned itself. A side that
works and only lacks the sweep or its layout is a refusal: nothing about the change was learned.
"""

from __future__ import annotations

import datetime
import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from harness.gate.cause import Cause
from harness.gate.decide import Verdict
from harness.gate.exit_code import Exit, GateError
from harness.gate.judge import Control, Finding, Judgement
from harness.gate.judged_metric import Unit
from harness.gate.policy import Rule
from harness.gate.process import Process, WorkerError
from harness.gate.shell import Ran
from harness.gate.sides import Side

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PROBE_S = 180.0
LAYOUT = "LayoutError"  # the error of a worker whose tree is of another layout
REFUSED = 2  # exit code of a tree that works and cannot do what was asked
CRASHED = (1, Exit.INTERNAL)  # of a traceback: of Python itself, and of the harness


def judge_broken(
    trees: Mapping[str, Path], words: Sequence[str], side: str, reason: str, kind: str = ""
) -> Judgement:
    """The judgement where one side could not be planned.

    Raises:
        GateError: the side works, so no code is to blame: it refuses the request (exit 2), or the baseline does or the
            layouts cannot serve one another (5); or it is not known why it could not be planned (6).
    """
    _require_crash(side, trees[side], words, reason, kind)
    candidate_reason = reason
    if side == "baseline" and (candidate_reason := _plan_fault(trees["candidate"], words)):
        _require_crash("candidate", trees["candidate"], words, candidate_reason)
    unit = _unit("import", "harness and fp8core", side, candidate_reason)
    what = f"the candidate does not import or plan: {candidate_reason}"
    mends = "the baseline did not import, and the candidate does"
    note = f"the {side} does not import or plan: {reason}; nothing was measured"
    return _judgement(trees, unit, what if candidate_reason else "", mends, note)


def judge_failed_command(
    trees: Mapping[str, Path], command: str, side: str, reason: str, ran: Ran = Ran.COMMAND
) -> Judgement:
    """The judgement where a user's command, or its set-up, works on one side alone.

    Args:
        trees: both.
        command: the user's benchmark command, or the set-up command.
        side: where it failed. Where that is the baseline, the caller has seen it fail twice, and seen the benchmark
            command work on the candidate.
        reason: of the failure.
        ran: what failed; the suite of the one unit.
    """
    unit = _unit(ran, command, side, reason if side == "candidate" else "")
    what = f"the {ran} fails on the candidate and works on the baseline: {reason}"
    mends = f"the command failed on the baseline, twice, and works on the candidate: {reason}"
    if ran is Ran.SET_UP:
        mends = (
            f"the set-up failed on the baseline, twice; it and the command work on the candidate: {reason}"
        )
    note = f"the {ran} fails on the {side}; no time was judged"
    return _judgement(trees, unit, what if side == "candidate" else "", mends, note)


def _unit(kind: str, what: str, side: str, candidate_reason: str) -> Unit:
    return Unit(
        *(kind, "", what, "", "imports" if kind == "import" else "runs", "", ""),
        unit="",
        better="higher",
        rule=Rule("exact"),
        before=0.0 if side == "baseline" else math.nan if kind == "import" else 1.0,  # nan: it was not tried
        after=float(not candidate_reason),
        trouble=candidate_reason,
    )


def _judgement(
    trees: Mapping[str, Path], unit: Unit, finding_reason: str, mends: str, note: str
) -> Judgement:
    """One finding: REGRESSED with its reason, or IMPROVED where there is none."""
    if finding_reason:
        finding = Finding(unit, Verdict.REGRESSED, finding_reason, cause=Cause(unit.suite, ""))
        code = Exit.REGRESSED
    else:
        finding, code = Finding(unit, Verdict.IMPROVED, mends), Exit.OK
    return Judgement(
        *(_side("baseline", trees), _side("candidate", trees)),
        "broken",
        (finding,),
        Control(False, "no control case was measured"),
        (note,),
        code,
        datetime.datetime.now(datetime.UTC).date(),
    )


def _require_crash(side: str, tree: Path, words: Sequence[str], reason: str, kind: str = "") -> None:
    """Tries the tree's own command: only a traceback says that its code is broken.

    Raises:
        GateError: it refuses the request or answers (exit 2 or 5, see `judge_broken`); or it was ended from outside or did not end (6).
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "harness", *words, "dry_run=true"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            timeout=PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        how = f"its own command did not end in {PROBE_S:g} s"
    else:
        if done.returncode in CRASHED:
            return
        if done.returncode in (0, REFUSED):
            apart = side == "baseline" or kind == LAYOUT
            raise GateError(Exit.NO_BASELINE if apart else Exit.USAGE, f"{side} ({tree}): {reason}")
        how = f"its own command ended with code {done.returncode}"
    raise GateError(
        Exit.INCONCLUSIVE, f"{side} ({tree}): {reason}; {how}, which need not be its code's doing"
    )


def _plan_fault(tree: Path, words: Sequence[str]) -> str:
    """Why a tree cannot be planned; "" where it can."""
    worker = Process(tree)
    try:
        worker.ask({"do": "plan", "words": list(words)}, PROBE_S)
    except WorkerError as error:
        return str(error)
    finally:
        worker.close()
    return ""


def _side(name: str, trees: Mapping[str, Path]) -> Side:
    return Side(name=str(trees.get(name, name)), stages={}, env={}, env_id="")
