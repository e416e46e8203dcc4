"""Session: measures two work trees (or one) so that their rounds are pairs, and stores both sides.

A round is a pair of new processes, one a side, alive together. Within it, case by case, each side builds and checks
its arms, and then the two take turns: one block of samples each, in random order, several times. A neighbour on the
machine, a clock or a temperature strikes both sides of a turn alike; what one process is stuck with (where its memory
lies, which kernels it chose) is drawn anew in the next round. So the round, not the block, is the unit of statistics.

(Forks of one process that has imported everything start ten times as fast and are no substitute: twenty A/A sessions
of them differed by six times the variance that their own rounds showed; docs/gate-statistics.md.)

Cost: `pairs` x (start of two processes, 3 s on two free CPU cores and 10 s with CUDA, + 2 x (checks of every case + cases
x arms x blocks x block_ms)).
"""

from __future__ import annotations

import math
import os
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from harness import store
from harness.gate.collect import Collected
from harness.gate.process import Process, WorkerError

if TYPE_CHECKING:
    from pathlib import Path

START_S, PREPARE_S, BLOCK_S = 180.0, 600.0, 120.0  # an answer later than this is none

Report = Callable[[str], None]


class OutOfTimeError(Exception):
    """The round under way would end after the time that was allowed."""


class TooSlowError(Exception):
    """The time allowed cannot hold the rounds that a decision needs; carries how long the first one took."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"a round takes {seconds:.0f} s")
        self.seconds = seconds


class SideError(Exception):
    """A side could not even make its plan."""

    def __init__(self, side: str, reason: str, kind: str = "") -> None:
        super().__init__(f"{side}: {reason}")
        self.side, self.reason, self.kind = side, reason, kind


def new_session() -> str:
    """A name that sorts by time and never collides."""
    return f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-gate-{secrets.token_hex(2)}"


@dataclass(slots=True)
class PairedMeasurement:
    """One sitting: the same sides, measured once for each stage.

    Attributes:
        trees: work tree by side ("baseline", "candidate"), or one side alone.
        words: the command line of the sweep, as `python -m harness` takes it.
        folder: where the sides are stored: `<folder>/<side>/stage<N>/`.
        blocks: blocks of each arm in a round.
        alone: one process at a time, where both would not fit into the device's memory; a drift then cancels less.
        clock_tree: the work tree whose `harness/timing` both sides measure with; each with its own where there is none.
        seed: of the order of the sides.
        tell: hears a line a round.
        clock: seconds; injectable for tests.
        rounds: measured to their end so far, in all stages.
    """

    trees: Mapping[str, Path]
    words: Sequence[str]
    folder: Path
    blocks: int
    alone: bool = False
    clock_tree: Path | None = None
    seed: int = 0
    tell: Report = lambda line: None
    clock: Callable[[], float] = time.monotonic
    rounds: int = 0
    _ends: float = math.inf

    def stage(
        self,
        number: int,
        pairs: int,
        only: Sequence[str] = (),
        ends: float = math.inf,
        least: int = 1,
        reserve: int = 0,
    ) -> int:
        """Measures one stage and stores it.

        Args:
            number: 1, or 2 for the confirmation.
            pairs: rounds.
            only: ids of the cases to measure; all where empty.
            ends: by the clock, when it has to be over. No round is begun that would last longer, and one that does is
                broken off and forgotten: how many rounds there are depends on the machine and never on what they gave.
            least: rounds without which nothing can be decided.
            reserve: rounds of a later stage for which time is kept, once there are `least`.

        Returns:
            The rounds that were measured. Without any, nothing is stored.

        Raises:
            SideError: a side could not even make its plan.
            TooSlowError: after the first round, `least` and `reserve` rounds cannot fit; nothing is stored.
        """
        order = random.Random(self.seed * 1000 + number)
        collected = {side: Collected() for side in self.trees}
        started, longest, done = self.clock(), 0.0, 0
        self._ends = ends
        for index in range(pairs):
            begun = self.clock()
            if begun + longest * (1 + (reserve if done >= least else 0)) > ends:
                break
            sides = order.sample(sorted(self.trees), len(self.trees))
            this = {side: Collected() for side in sides}
            try:
                self.measure_round(index, sides, this, set(only), order)
            except OutOfTimeError:
                break
            for side, rows in this.items():
                collected[side].merge(rows)
            done += 1
            self.rounds += 1
            if done == 1 and self.clock() - begun > (ends - started) / (least + reserve):
                raise TooSlowError(self.clock() - begun)
            spent, longest = self.clock() - started, max(longest, self.clock() - begun)
            left = min(spent / done * (pairs - done), ends - self.clock())
            self.tell(f"stage {number}, round {done} of {pairs}, {spent:.0f} s, about {left:.0f} s left")
        if done < pairs:
            self.tell(f"stage {number}: the time allowed holds {done} of {pairs} rounds")
        for side, rows in collected.items() if done else ():
            self._store(side, number, (done, pairs), rows, self.clock() - started)
        return done

    def measure_round(
        self,
        index: int,
        sides: Sequence[str],
        collected: dict[str, Collected],
        only: set[str],
        order: random.Random,
    ) -> None:
        """One round of all sides, in the order given where one follows the other."""
        for together in [[side] for side in sides] if self.alone else [sides]:
            self._round(index, together, collected, only, order)

    def _round(
        self,
        index: int,
        sides: Sequence[str],
        collected: dict[str, Collected],
        only: set[str],
        order: random.Random,
    ) -> None:
        """One round of some sides, each in a new process."""
        with ExitStack() as stack:
            workers = {}
            for side in sides:
                workers[side] = Process(self.trees[side], self.clock_tree)
                stack.callback(self._let_go, workers[side])
                workers[side].tell({"do": "plan", "words": list(self.words)})
            cases: dict[str, dict[str, Any]] = {}
            for side, worker in workers.items():  # both import PyTorch at the same time
                try:
                    plan = worker.answer(self._patience(START_S))
                except WorkerError as error:
                    self._in_time()
                    raise SideError(side, str(error), error.kind) from error
                collected[side].env, collected[side].env_id = plan["env"], plan["env_id"]
                cases[side] = {case["case_id"]: case for case in plan["cases"]}
            for case in {i: c for known in cases.values() for i, c in known.items()}.values():
                if not only or case["case_id"] in only:
                    there = {
                        side: worker for side, worker in workers.items() if case["case_id"] in cases[side]
                    }
                    for side in self._case(index, case, there, collected, order):
                        del workers[side]

    def _case(
        self,
        index: int,
        case: Mapping[str, Any],
        workers: Mapping[str, Process],
        collected: dict[str, Collected],
        order: random.Random,
    ) -> list[str]:
        """Measures one case in one round; returns the sides whose process was lost."""
        alive = dict(workers)

        def ask(side: str, command: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
            try:
                return alive[side].ask(command, self._patience(timeout_s))
            except WorkerError as error:
                self._in_time()
                collected[side].died(index, case, str(error))
                del alive[side]
                return None

        for side in order.sample(sorted(alive), len(alive)):
            if answer := ask(side, {"do": "prepare", "case": case["case_id"]}, PREPARE_S):
                collected[side].take(index, answer["rows"])
        for _ in range(self.blocks):
            for side in order.sample(sorted(alive), len(alive)):
                if answer := ask(side, {"do": "block"}, BLOCK_S):
                    collected[side].time(index, case["case_id"], answer)
        return [side for side in workers if side not in alive]

    def _patience(self, most: float) -> float:
        """Seconds to wait for an answer."""
        return max(min(most, self._ends - self.clock()), 0.0)

    def _in_time(self) -> None:
        if self.clock() >= self._ends:
            raise OutOfTimeError

    def _let_go(self, worker: Process) -> None:
        """Ends a worker: at once where the time is over, else when it has said goodbye."""
        if self.clock() >= self._ends:
            worker.kill()
        worker.close()

    def _store(
        self, side: str, number: int, rounds: tuple[int, int], rows: Collected, seconds: float
    ) -> None:
        folder = self.folder / side / f"stage{number}"
        gate = {
            "session": self.folder.name,
            "side": side,
            "stage": number,
            "pairs": rounds[1],
            "rounds": rounds[0],
            "blocks": self.blocks,
            "seconds": round(seconds, 1),
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        }
        writer = store.RunWriter(
            folder,
            run_id=f"{self.folder.name}-{side}-{number}",
            sweep="gate",
            env_id=rows.env_id,
            env=rows.env,
            about={
                "made_by": "gate",
                "command": " ".join(["python -m harness gate", *self.words]),
                "gate": gate,
            },
        )
        writer.append(rows.measurements())
        writer.close("finished")
