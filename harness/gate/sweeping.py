"""Sweeping: rounds of a sweep in two work trees. Case by case the sides take turns, one block of samples each.

In a round both processes are alive together. Each side builds and checks its arms, and then the two alternate in random
order, several times. A neighbour on the machine, a clock or a temperature strikes both sides of a turn alike.

Cost: `pairs` x (start of two processes, 3 s on two free CPU cores and 10 s with CUDA, + 2 x (checks of every case + cases
x arms x blocks x block_ms)).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.gate.decide import FEWEST_TO_CLAIM, FEWEST_TO_FLAG, rounds_for
from harness.gate.exit_code import Exit, GateError
from harness.gate.process import Process, WorkerError
from harness.gate.runner import Instrument, OutOfTimeError, SideError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from harness.gate.policy import Policy
    from harness.gate.runner import Round
    from harness.gate.unit import Judgement

START_S, PREPARE_S, BLOCK_S = 180.0, 600.0, 120.0  # an answer later than this is none
LAYOUT = "LayoutError"  # the error of a worker whose tree is of another layout
REFUSED = 2  # exit code of a tree that works and cannot do what was asked
CRASHED = (1, Exit.INTERNAL)  # of a traceback: of Python itself, and of the harness
PLANNED_SPREADS = (0.01, 0.05)  # a quiet machine, a shared one
PLANNED_AWAY = math.log1p(0.03)


@dataclass
class Sweeping(Instrument):
    """The instrument of a sweep.

    Attributes:
        alone: one process at a time, where both would not fit into the device's memory; a drift then cancels less.
        clock_tree: the work tree whose `harness/timing` both sides measure with; each with its own where there is none.
    """

    alone: bool = False
    clock_tree: Path | None = None

    def measure(self, this: Round) -> None:
        """One round of all sides, together or in the order given."""
        for sides in [[side] for side in this.sides] if self.alone else [this.sides]:
            self._measure(this, sides)

    def _measure(self, this: Round, sides: Sequence[str]) -> None:
        with ExitStack() as stack:
            workers: dict[str, Process] = {}
            for side in sides:  # both import PyTorch at the same time
                worker = workers[side] = Process(self.trees[side], self.clock_tree)
                stack.callback(worker.close, this.left)
                worker.tell({"do": "plan", "words": list(self.words)})
            cases: dict[str, dict[str, Any]] = {}
            there: dict[str, set[str]] = {}
            for side, worker in workers.items():
                try:
                    plan = worker.answer(min(START_S, this.left()))
                except WorkerError as error:
                    _require_time(this)
                    raise SideError(side, str(error), error.kind) from error
                this.collected[side].plan(plan["env"], plan["env_id"])
                there[side] = {case["case_id"] for case in plan["cases"]}
                cases |= {case["case_id"]: case for case in plan["cases"]}
            for name, case in cases.items():
                if not this.only or name in this.only:
                    self._case(this, case, {s: w for s, w in workers.items() if name in there[s]}, workers)

    def _case(
        self, this: Round, case: Mapping[str, Any], here: dict[str, Process], workers: dict[str, Process]
    ) -> None:
        """Measures one case in one round; a side whose process is lost takes no further part in the round."""

        prepare = {"do": "prepare", "case": case["case_id"]}, PREPARE_S
        for command, timeout_s in (prepare, *[({"do": "block"}, BLOCK_S)] * self.blocks):
            for side in this.order.sample(sorted(here), len(here)):
                told = this.collected[side]
                try:
                    answer = here[side].ask(command, min(timeout_s, this.left()))
                except WorkerError as error:
                    _require_time(this)
                    told.died(this.number, case, str(error))
                    del here[side], workers[side]
                    continue
                if "rows" in answer:
                    told.take(this.number, answer["rows"])
                else:
                    told.time(this.number, case["case_id"], answer)

    def judge_broken(self, error: SideError, left: Callable[[], float]) -> Judgement:
        """The judgement where one side could not be planned.

        A change that mends a broken baseline has nothing to fall behind, so it passes if it can be planned itself.

        Raises:
            GateError: the side works, so no code is to blame: it refuses the request (exit 2), or the baseline does or the
                layouts cannot serve one another (5); or it is not known why it could not be planned (6).
        """
        self._require_crash(error.side, error.reason, error.kind)
        reason = error.reason
        if error.side == "baseline":
            try:
                self.plan("candidate")
                reason = ""
            except WorkerError as other:
                reason = str(other)
                self._require_crash("candidate", reason)
        return self.one_sided(
            *("import", "harness and fp8core", "imports"),
            0.0 if error.side == "baseline" else math.nan,
            f"the candidate does not import or plan: {reason}" if reason else "",
            "the baseline did not import, and the candidate does",
            f"the {error.side} does not import or plan: {error.reason}; nothing was measured",
        )

    def _require_crash(self, side: str, reason: str, kind: str = "") -> None:
        """Tries the tree's own command: only a traceback says that its code is broken.

        Raises:
            GateError: it refuses the request or answers (exit 2 or 5, see `judge_broken`); or it was ended from outside or
                did not end (6).
        """
        tree = self.trees[side]
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "harness", *self.words, "dry_run=true"],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                capture_output=True,
                timeout=START_S,
                check=False,
            )
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None
        if code in CRASHED:
            return
        said = f"{side} ({tree}): {reason}"
        if code in (0, REFUSED):
            raise GateError(Exit.NO_BASELINE if side == "baseline" or kind == LAYOUT else Exit.USAGE, said)
        how = f"did not end in {START_S:g} s" if code is None else f"ended with code {code}"
        raise GateError(
            Exit.INCONCLUSIVE, f"{said}; its own command {how}, which need not be its code's doing"
        )

    def plan(self, side: str) -> dict[str, Any]:
        """The plan of one side.

        Raises:
            WorkerError: it cannot be planned.
        """
        worker = Process(self.trees[side])
        try:
            return worker.ask({"do": "plan", "words": list(self.words)}, START_S)
        finally:
            worker.close()

    def cost(self, policy: Policy) -> str:
        """What a decision takes, said before anything is measured.

        Raises:
            GateError: the sweep cannot be planned.
        """
        try:
            units = sum(len(case["arms"]) for case in self.plan("candidate")["cases"])
        except WorkerError as error:
            raise GateError(Exit.USAGE, str(error)) from error
        lines = [
            f"{units} timed units: {FEWEST_TO_FLAG} rounds to flag, {FEWEST_TO_CLAIM} to confirm; planned: "
            f"{policy.pairs} and {max(policy.confirm_pairs, FEWEST_TO_CLAIM)} in {policy.budget_s:g} s\n"
        ]
        for spread in PLANNED_SPREADS:
            rounds = rounds_for(max(units, 1), spread, PLANNED_AWAY, policy.alpha_confirm)
            lines.append(
                f"rounds that differ by {spread:.1%}: {rounds or 'over 1000'} find a unit {math.expm1(PLANNED_AWAY):.0%} "
                "beyond its tolerance, 95 times of 100, whichever of them it is\n"
            )
        return "".join(lines)


def _require_time(this: Round) -> None:
    if not this.left():
        raise OutOfTimeError
