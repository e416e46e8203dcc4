"""Drive: measure, judge, measure again what was flagged, judge again. The only part of the gate that measures."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate.broken import judge_broken, judge_failed_command
from harness.gate.command_session import CommandSession
from harness.gate.decide import FEWEST_TO_CLAIM, FEWEST_TO_FLAG, rounds_for
from harness.gate.exit_code import Exit, GateError
from harness.gate.judge import Judgement, judge
from harness.gate.process import Process, WorkerError
from harness.gate.session import START_S, PairedMeasurement, SideError, TooSlowError, new_session
from harness.gate.sides import load_side

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.gate.command_session import BenchmarkCommand
    from harness.gate.policy import Policy
    from harness.gate.session import Report

JUDGING_S = 5.0  # reading the store, twice, and writing the verdicts
PLANNED_SPREADS = (0.01, 0.05)  # a quiet machine, a shared one
PLANNED_AWAY = math.log1p(0.03)
MARGIN = 1.2  # of the budget that is advised: rounds differ


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be measured and against what.

    Attributes:
        trees: work tree by side; without a "baseline", a stored one is judged against.
        words: the sweep's command line.
        policy: with the counts of pairs and blocks.
        results_dir: the session is stored in `<results_dir>/gate/<session>/`.
        stored_baseline: a run, where `trees` has no baseline.
        machine_free: see `judge`.
        alone: one process at a time (see `PairedMeasurement`).
        command: what was typed, without its budget, for advice that can be copied.
        benchmark: a user's command that is measured instead of a sweep.
        clock_tree: see `PairedMeasurement`.
        notes: what is told with the verdict, whatever it is.
    """

    trees: Mapping[str, Path]
    words: Sequence[str]
    policy: Policy
    results_dir: Path
    stored_baseline: str | None = None
    machine_free: bool = False
    alone: bool = False
    command: str = "python -m harness gate"
    benchmark: BenchmarkCommand | None = None
    clock_tree: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def judges_times(self) -> bool:
        """Whether a time may decide the exit code."""
        return not self.machine_free and self.policy.on_slower == "fail"


def measure_and_judge(request: Request, tell: Report) -> Judgement:
    """Run both stages: units that the first one flags are measured again in new processes.

    Raises:
        GateError: the time allowed cannot hold the rounds that a decision needs, which is known after one of them.
    """
    session = open_session(request, tell)
    policy = request.policy
    allowed = (policy.budget_s or math.inf) - JUDGING_S
    ends = session.clock() + allowed
    confirming = max(policy.confirm_pairs, FEWEST_TO_CLAIM)
    # Who asks for fewer pairs than can flag anything has asked for no decision, and gets none.
    decides = request.judges_times and policy.pairs >= FEWEST_TO_FLAG
    least, reserve = (FEWEST_TO_FLAG, FEWEST_TO_CLAIM) if decides else (1, 0)
    judgement: Judgement | None = None
    try:
        if not session.stage(1, policy.pairs, ends=ends, least=least, reserve=reserve):
            raise GateError(
                Exit.USAGE,
                f"not one round was measured in the {policy.budget_s:g} s allowed; give more with --budget-s, or measure less",
            )
        judgement = judge_session(request, session)
        if judgement.to_confirm and not judgement.control.moved:
            tell(f"{len(judgement.to_confirm)} cases are flagged and measured again, {confirming} rounds")
            if session.stage(2, confirming, judgement.to_confirm, ends=ends):
                judgement = judge_session(request, session)
    except TooSlowError as error:
        raise _too_slow(request, error.seconds, least + reserve) from error
    except SideError as error:
        if session.rounds:  # it could be planned before, so the code need not be why
            return _broken_off(judgement, error)
        if request.benchmark is not None:
            judgement = judge_failed_command(request.trees, request.benchmark.line, error.side, error.reason)
        else:
            judgement = judge_broken(request.trees, request.words, error.side, error.reason, error.kind)
    own = session.notes() if isinstance(session, CommandSession) else ()
    return replace(judgement, notes=(*judgement.notes, *own, *request.notes))


def _broken_off(judgement: Judgement | None, error: SideError) -> Judgement:
    """What the first stage showed, which is no pass.

    Raises:
        GateError: it was not over.
    """
    why = f"the {error.side} could not be planned again after rounds that it took part in: {error.reason}"
    if judgement is None:
        raise GateError(Exit.INCONCLUSIVE, f"{why}; measure again") from error
    code = Exit.INCONCLUSIVE if judgement.code is Exit.OK else judgement.code
    return replace(judgement, notes=(*judgement.notes, why), could_not_judge=True, code=code)


def _too_slow(request: Request, seconds: float, rounds: int) -> GateError:
    needed = 10 * math.ceil((MARGIN * rounds * seconds + JUDGING_S) / 10)
    return GateError(
        Exit.USAGE,
        f"a round takes {seconds:.0f} s, and a decision needs {FEWEST_TO_FLAG} rounds and {FEWEST_TO_CLAIM} to confirm, "
        f"which {request.policy.budget_s:g} s cannot hold: {request.command} --budget-s {needed}",
    )


def plan_lines(units: int, policy: Policy) -> list[str]:
    """What a decision on so many timed units takes, said before anything is measured."""
    lines = [
        f"{units} timed units: {FEWEST_TO_FLAG} rounds to flag, {FEWEST_TO_CLAIM} to confirm; planned: "
        f"{policy.pairs} and {max(policy.confirm_pairs, FEWEST_TO_CLAIM)} in {policy.budget_s:g} s"
    ]
    for spread in PLANNED_SPREADS:
        rounds = rounds_for(max(units, 1), spread, PLANNED_AWAY, policy.alpha_confirm)
        lines.append(
            f"rounds that differ by {spread:.1%}: {rounds or 'over 1000'} find a unit {math.expm1(PLANNED_AWAY):.0%} "
            "beyond its tolerance, 95 times of 100, whichever of them it is"
        )
    return lines


def print_plan(tree: Path, words: Sequence[str], policy: Policy) -> None:
    """Plans the sweep in a worker and prints what a decision on it takes.

    Raises:
        GateError: it cannot be planned.
    """
    worker = Process(tree)
    try:
        plan = worker.ask({"do": "plan", "words": list(words)}, START_S)
    except WorkerError as error:
        raise GateError(Exit.USAGE, str(error)) from error
    finally:
        worker.close()
    units = sum(len(case["arms"]) for case in plan["cases"])
    sys.stdout.write("\n".join(plan_lines(units, policy)) + "\n")


def open_session(request: Request, tell: Report) -> PairedMeasurement:
    """A session that has measured nothing yet."""
    folder = request.results_dir / "gate" / new_session()
    if request.benchmark is not None:
        return CommandSession(
            trees=request.trees,
            words=request.words,
            folder=folder,
            blocks=1,
            tell=tell,
            benchmark=request.benchmark,
        )
    return PairedMeasurement(
        trees=request.trees,
        words=request.words,
        folder=folder,
        blocks=request.policy.blocks,
        alone=request.alone,
        clock_tree=request.clock_tree,
        tell=tell,
    )


def judge_session(request: Request, session: PairedMeasurement) -> Judgement:
    """Judges what a session has stored so far."""
    before = (
        session.folder / "baseline" if "baseline" in request.trees else Path(str(request.stored_baseline))
    )
    return judge(
        load_side(before, "baseline", request.results_dir),
        load_side(session.folder / "candidate", "candidate", request.results_dir),
        request.policy,
        machine_free=request.machine_free,
    )
