"""Sweeping: rounds of a sweep in two work trees. Case by case the sides take turns, one block of samples each.

Each side is its tree's own command, which asks for its turns (`harness.engine.turns`) and stores rows as any sweep does. In a
round both are alive together: each builds and checks its arms, and then the two alternate in random order, several times. A
neighbour on the machine, a clock or a temperature strikes both sides of a turn alike.

Where the baseline takes no turns, or the candidate does not start with the baseline's clock, each side runs its whole sweep by
its own command line in each round, one after the other. Every tree whose rows can be read knows `WORDS`.

Cost: `pairs` x (start of two processes, 3 s on two free CPU cores and 10 s with CUDA, + 2 x (checks of every case + cases
x arms x blocks x block_ms)).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import store
from harness.engine.turns import VERSION
from harness.gate.options import Exit, GateError, Loud
from harness.gate.runner import Instrument, OutOfTimeError, SideError
from harness.store.outside import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd

    from harness.gate.runner import GateRound, How


START_S, PREPARE_S, BLOCK_S = 180.0, 600.0, 120.0  # a message later than this is none
LOOK_S = 0.2  # between two looks at whether a process that is silent has ended
REFUSED = 2  # exit code of a tree that works and cannot do what was asked
ENDED = (0, 1)  # of a sweep that came to its end: all arms are sound, or one failed
CRASHED = (1, int(Exit.INTERNAL))  # of a traceback: of Python itself, and of the harness
LIMITS = ("budget_s", "case_timeout_s", "case_wall_s", "case_memory_gib")  # of a sweep; the gate has its own
# What a round asks of a sweep beside the user's words.
OWN = ("isolate=false", "control=false", "warm_compile=false", "report=false", "quiet=true", "run_id=run")
WORDS = (*OWN, *(f"{name}=null" for name in LIMITS))
APART = "run python -m harness sweep=NAME at each commit, then gate --baseline RUN --candidate RUN"
WHOLE = "each side ran its whole sweep by its own command line, as the two cannot take turns with one clock"
TWO_CLOCKS = "NO TIME JUDGED: each side was timed by its own harness/timing, and they differ"


class EndedError(RuntimeError):
    """The sweep of a tree ended, or was silent for too long; the message names which.

    Attributes:
        code: its exit code; None where it was silent.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class Sweep:
    """The sweep of one work tree in one round.

    Args:
        tree: the work tree whose command it is.
        words: of its command line.
        folder: for its rows and what it prints.
        in_turns: False: it measures every case, and sends nothing.
    """

    def __init__(self, tree: Path, words: Sequence[str], folder: Path, *, in_turns: bool = True) -> None:
        self._folder = folder
        self._pipe, theirs = Pipe()
        with theirs, (folder / "output").open("wb") as output:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "harness",
                    *words,
                    *WORDS,
                    f"results_dir={folder}",
                    *[f"turns={number}"] * in_turns,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[number],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                start_new_session=True,
            )

    def reply(self, answer: object) -> None:
        """Answers the process's last message; that it is gone shows when the next one is waited for."""
        with suppress(OSError):
            self._pipe.send_bytes(json.dumps(answer).encode())

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Its next message.

        Raises:
            EndedError: it ended, or took longer than the timeout.
        """
        left = timeout_s
        try:
            while not self._pipe.poll(min(LOOK_S, left)):
                left -= LOOK_S
                if self._process.poll() is not None and not self._pipe.poll(0):
                    raise EOFError
                if left <= 0:
                    self.close()  # or it would compute beside the other side
                    raise EndedError(f"no answer within {timeout_s:.0f} s")
            message: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            code = self._process.wait(10)
            lines = (self._folder / "output").read_text(errors="replace").strip().splitlines()
            last_line = f": {lines[-1][:300]}" if lines else ""
            raise EndedError(f"ended with code {code}{last_line}", code) from error
        return message

    def rows(self) -> pd.DataFrame:
        """The rows of the cases that have ended.

        Raises:
            GateError: some cannot be read (exit 6).
        """
        rows = store.open_run(self._folder)
        if rows.attrs["problems"]:
            raise GateError(Exit.INCONCLUSIVE, f"cannot read {rows.attrs['problems'][0]}; measure again")
        return rows

    def close(self) -> None:
        """Ends it, and what it has started: its rows are durable."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()


@dataclass
class Sweeping(Instrument):
    """The instrument of a sweep.

    Attributes:
        commits: of each tree.
        own_clock: gives the candidate its own `harness/timing` back; None where that is the baseline's.
        no_turns: what the verdict has to say of sides that take no turns; nothing while they do.
    """

    commits: Mapping[str, str] = field(default_factory=dict)
    own_clock: Callable[[], None] | None = None
    no_turns: list[str] = field(default_factory=list)

    def measure(self, this: GateRound) -> None:
        """One round of all sides, together or in the order given."""
        try:
            for sides in [[side] for side in this.sides] if self.alone else [this.sides]:
                with ExitStack() as stack:
                    self._measure(this, sides, stack)
        except SideError as error:
            failed = error.side, error.how
            lent = failed == ("candidate", "broken") and self.own_clock
            if self.no_turns or this.number or this.only or not (lent or failed == ("baseline", "refused")):
                raise
            self.alone = "sweeps"
            self.no_turns.append(f"{WHOLE}: {error.reason}")
            if self.own_clock:
                self.own_clock()
                self.alone = "clocks"
                self.no_turns.append(Loud(TWO_CLOCKS))
            for collected in this.collected.values():
                collected.rows.clear()
            self.measure(this)

    def notes(self) -> Sequence[str]:
        """What the verdict has to say about how it was measured."""
        return self.no_turns

    def _measure(self, this: GateRound, sides: Sequence[str], stack: ExitStack) -> None:
        sweeps: dict[str, Sweep] = {}
        words = [*self.words, f"rounds={self.blocks}", *[f"cases={sorted(this.only)}"] * bool(this.only)]
        for side in sides:  # both import PyTorch at the same time
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gate-round-")))
            sweeps[side] = Sweep(self.trees[side], words, folder, in_turns=not self.no_turns)
            stack.callback(sweeps[side].close)
        cases: dict[str, dict[str, Any]] = {}
        there: dict[str, set[str]] = {}
        for side in sorted(sweeps, reverse=True):  # what the candidate refuses too is no matter of protocols
            planned = self._planned(side, sweeps[side], this)
            there[side] = {case["case_id"] for case in planned}
            cases |= {case["case_id"]: case for case in planned}
        lost: dict[str, Mapping[str, Any]] = {}
        for name, case in cases.items():
            if not this.only or name in this.only:
                here = {s: w for s, w in sweeps.items() if name in there[s] and s not in lost}
                for side, why in self._case(this, name, here).items():
                    lost[side] = {**case, "why": why}
        for side, sweep in sweeps.items():
            this.collected[side].take(this.number, sweep.rows())
            if side in lost:
                this.collected[side].died(this.number, lost[side])

    def _planned(self, side: str, sweep: Sweep, this: GateRound) -> list[dict[str, Any]]:
        """The cases that a side has planned; none of a whole sweep, which has ended.

        Raises:
            SideError: it could not, or is of another version.
            GateError: it is not of its tree (exit 6).
        """
        try:
            plan = sweep.receive(this.left() if self.no_turns else min(START_S, this.left()))
        except EndedError as error:
            _require_time(this)
            if self.no_turns and error.code in ENDED and len(rows := sweep.rows()):
                _require_own(side, parse(rows["env"][0]).get("git_commit"), self.commits[side])
                return []
            raise no_start(side, self.trees[side], str(error), error.code) from error
        root = self.trees[side].resolve()
        _require_own(side, plan.get("root"), str(root))
        if plan.get("version") != VERSION:
            raise no_start(
                side, root, f"it answers {plan.get('version')}, expected turns of {VERSION}", REFUSED
            )
        return list(plan["cases"])

    def _case(self, this: GateRound, name: str, here: dict[str, Sweep]) -> dict[str, str]:
        """Measures one case in one round; returns which sides were lost, and why: those take no further part in it."""
        lost: dict[str, str] = {}
        asked: list[tuple[object, float]] = [
            (name, PREPARE_S),
            *[(True, BLOCK_S)] * self.blocks,
            (False, BLOCK_S),
        ]
        for answer, timeout_s in asked:
            for side in this.order.sample(sorted(here), len(here)):
                here[side].reply(answer)
                try:
                    if "block" not in here[side].receive(min(timeout_s, this.left())):
                        del here[side]  # the case has ended, as nothing of it can be timed
                except EndedError as error:
                    _require_time(this)
                    lost[side] = str(error)
                    del here[side]
        return lost


def no_start(side: str, tree: Path, reason: str, code: int | None) -> SideError:
    """A tree whose sweep could not be planned: only a traceback says that its code is broken.

    Args:
        side: which one.
        tree: its work tree.
        reason: its last words.
        code: exit code of its command; None where it was silent.
    """
    how: How = "broken" if code in CRASHED else "refused" if code in (0, REFUSED) else "ended"
    message = f"{side} ({tree}): {reason}" + (f"; {APART}" if side == "baseline" else "")
    if (side, how) == ("candidate", "broken"):
        message = f"the candidate does not import or plan: {reason}"
    return SideError(side, message, how, ("import", "harness and fp8core", "imports"))


def _require_own(side: str, ran: object, own: str) -> None:
    if ran != own:
        raise GateError(
            Exit.INCONCLUSIVE, f"the {side} ran {ran}, expected {own}: it did not run its own code"
        )


def _require_time(this: GateRound) -> None:
    if not this.left():
        raise OutOfTimeError
