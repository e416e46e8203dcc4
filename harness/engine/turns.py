"""Turns: a sweep that is measured beside the same sweep of another commit, in turns that a gate gives (`gate --against`).

The word `turns=N` names a pipe. Over it the sweep asks, and does nothing until it is answered; all messages are JSON.

    {"version": 1, "root": FOLDER, "cases": [...]}    which case next?    ID, or null: none
    {"block": N}                                      another block?      true, or false: the case has ended

A case is built, compiled and checked before its first block. A block is a round of its own, led in by a call of each arm. The rows
are those of any sweep, and durable when the next case is asked for. The version changes with the meaning of a message.
"""

from __future__ import annotations

import json
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engine import control
from harness.engine.plan import PlannedCase, Task
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from harness.engine.plan import SweepPlan
    from harness.timing.config import Timing, TimingConfig

VERSION = 1
# No block has a warm-up of its own: the first of a case is led in by this, the later ones by one call an arm.
LEAD_IN_S = {"cpu": 0.05, "cuda": 0.5}


class Turns:
    """The pipe to a gate.

    Args:
        pipe: number of the one over which it answers.
        device: "cpu" or "cuda".
    """

    def __init__(self, pipe: int, device: str) -> None:
        self._pipe, self._device = Connection(pipe), device

    def request(self, **question: Any) -> Any:
        """The answer of the gate; a gate that is gone interrupts the sweep."""
        try:
            self._pipe.send_bytes(json.dumps(question).encode())
            return json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise KeyboardInterrupt from error

    def of(self, tasks: Sequence[Task]) -> Iterator[Task]:
        """The tasks that the gate wants, in its order."""
        by_id = {task.case.case_id: task for task in tasks}
        about = [_about(task.planned) for task in tasks]
        root = Path(__file__).resolve().parents[2]
        while name := self.request(version=VERSION, root=str(root), cases=about):
            yield by_id[name]

    def blocks(
        self, measure: Callable[[TimingConfig, int], dict[str, Timing]], timing: TimingConfig
    ) -> dict[str, Timing]:
        """What as many blocks as the gate wants gave, each a round.

        Args:
            measure: measures one, by its settings and its number.
            timing: of the sweep.
        """
        found: dict[str, Timing] = {}
        number = 0
        one = replace(timing, min_rounds=1, max_rounds=1, min_samples=5, min_seconds=0.0)
        while self.request(block=number):
            lead_s = 0.0 if number else LEAD_IN_S[self._device]
            config = replace(one, warmup_min_seconds=lead_s, warmup_min_iterations=1 if number else 3)
            for name, timed in measure(config, number).items():
                found[name] = _joined(found[name], timed, number) if number else timed
            number += 1
        return found


def with_control(plan: SweepPlan) -> SweepPlan:
    """The plan of a sweep in turns: the control case is its first.

    Raises:
        UsageError: an arm of it is a run and no closure to time.
    """
    if runs := [c.case.suite for c in plan.cases if c.is_trial]:
        raise UsageError(
            f"an arm of suite {runs[0]} is a run and no closure to time, so it takes no turns; run python -m harness sweep=NAME at "
            "each commit, then gate --baseline RUN --candidate RUN"
        )
    planned = PlannedCase(control.SUITE, control, control.CASE, tuple(control.ARMS))  # type: ignore[arg-type]
    return replace(plan, cases=(planned, *plan.cases))


def _about(planned: PlannedCase) -> dict[str, Any]:
    case, arms = planned.case, planned.suite.ARMS
    return {
        "suite": case.suite,
        "case_id": case.case_id,
        "axes": case.axes_json,
        "seed": case.seed,
        "arms": {arm: arms[arm].baseline for arm in planned.runnable},
    }


def _joined(one: Timing, more: Timing, number: int) -> Timing:
    """Two timings of an arm as one; what struck one block, struck the row, and what is not known of one, is not of the row."""
    known = one.contended, more.contended
    return replace(
        one,
        samples_ms=one.samples_ms + more.samples_ms,
        rounds=one.rounds + (number,) * len(more.samples_ms),
        sample_clock_mhz=one.sample_clock_mhz + more.sample_clock_mhz,
        joules=one.joules + more.joules,
        split_ms=one.split_ms + more.split_ms,
        late_samples=one.late_samples + more.late_samples,
        seconds=one.seconds + more.seconds,
        throttled=one.throttled or more.throttled,
        throttle_reasons=tuple(dict.fromkeys(one.throttle_reasons + more.throttle_reasons)),
        throttled_rounds=one.throttled_rounds + (number,) * bool(more.throttled_rounds),
        contended=any(known) or (None if None in known else False),
        contended_rounds=one.contended_rounds + (number,) * bool(more.contended_rounds),
        stopped_rounds=one.stopped_rounds + more.stopped_rounds,
        failure=one.failure or more.failure,
        cause=one.cause or more.cause,
    )
