"""Process: one worker seen from outside. It is asked, it answers, and it may die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

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
