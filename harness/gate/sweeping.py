"""Sweeping: rounds of a sweep in two work trees. Case by case the sides take turns, one block of samples each.

In a round both processes are alive together. Each side builds and checks its arms, and then the two alternate in random
order, several times. A neighbour on the machine, a clock or a temperature strikes both sides of a turn alike.

Cost: `pairs` x (start of two processes, 3 s on two free CPU cores and 10 s with CUDA, + 2 x (checks of every case + cases
x arms x blocks x block_ms)).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.gate.options import Exit, GateError
from harness.gate.runner import Instrument, OutOfTimeError, SideError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.gate.runner import Round


GOODBYE_S = 10.0
WORKER = Path(__file__).with_name("worker.py")


class WorkerError(RuntimeError):
    """A worker ended, answered with an error or did not answer in time; the message says which.

    Attributes:
        kind: the type of the error that it answered with; "" for none.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class Process:
    """A worker process of one work tree.

    Args:
        tree: the work tree whose `harness` and `fp8core` it measures.
        clock: a work tree whose `harness/timing` it measures with, in place of its own.
    """

    def __init__(self, tree: Path, clock: Path | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._pipe, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(number), str(tree), *([str(clock)] if clock else [])],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[number],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
            )

    def tell(self, command: dict[str, Any]) -> None:
        """Sends a command without waiting for its answer."""
        try:
            self._pipe.send_bytes(json.dumps(command).encode())
        except OSError as error:
            raise WorkerError(self._last_words()) from error

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The answer to the oldest command that has none yet.

        Raises:
            WorkerError: it ended, answered with an error, or took longer than the timeout.
        """
        if not self._pipe.poll(timeout_s):
            self._process.kill()
            raise WorkerError(f"no answer within {timeout_s:.0f} s")
        try:
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise WorkerError(self._last_words()) from error
        if "error" in answer:
            raise WorkerError(str(answer["error"]), str(answer.get("kind", "")))
        return answer

    def ask(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        self.tell(command)
        return self.answer(timeout_s)

    def close(self, left: Callable[[], float] = lambda: GOODBYE_S) -> None:
        """Ends the process; it has some seconds to go by itself, if there are any left."""
        with suppress(WorkerError, subprocess.TimeoutExpired):
            if left() > 0 and self._process.poll() is None:
                self.tell({"do": "quit"})
                self._process.wait(GOODBYE_S)
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._process.wait(10)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        said = f": {lines[-1][:300]}" if lines else ""
        return f"ended with code {self._process.returncode}{said}"


START_S, PREPARE_S, BLOCK_S = 180.0, 600.0, 120.0  # an answer later than this is none
LAYOUT = "LayoutError"  # the error of a worker whose tree is of another layout
REFUSED = 2  # exit code of a tree that works and cannot do what was asked
CRASHED = (1, Exit.INTERNAL)  # of a traceback: of Python itself, and of the harness


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

    def blame(self, error: SideError) -> tuple[str, str, str, str]:
        """What the candidate breaks. Tries the tree's own command: only a traceback says that its code is broken.

        Raises:
            GateError: it is the baseline, or the layouts cannot serve one another (exit 5); the candidate refuses the request
                (2); or it was ended from outside or did not end (6).
        """
        tree = self.trees[error.side]
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "harness", *self.words, "dry_run=true"],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                capture_output=True,
                timeout=START_S,
                check=False,
            )
            code, how = done.returncode, f"ended with code {done.returncode}"
        except subprocess.TimeoutExpired:
            code, how = -1, f"did not end in {START_S:g} s"
        said = f"{error.side} ({tree}): {error.reason}"
        if code not in (0, REFUSED, *CRASHED):
            raise GateError(
                Exit.INCONCLUSIVE, f"{said}; its own command {how}, which need not be its code's doing"
            )
        if error.side == "baseline":
            raise GateError(Exit.NO_BASELINE, said)
        if code not in CRASHED:
            raise GateError(Exit.NO_BASELINE if error.kind == LAYOUT else Exit.USAGE, said)
        why = f"the candidate does not import or plan: {error.reason}"
        return "import", "harness and fp8core", "imports", why


def _require_time(this: Round) -> None:
    if not this.left():
        raise OutOfTimeError
