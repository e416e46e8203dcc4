"""Process: one worker seen from outside. It is asked, it answers, and it may die."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
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
        self._pending = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(tree), *([str(clock)] if clock else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
        )

    def tell(self, command: dict[str, Any]) -> None:
        """Sends a command without waiting for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
        except OSError as error:
            raise WorkerError(self._last_words()) from error

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The answer to the oldest command that has none yet.

        Raises:
            WorkerError: it ended, answered with an error, or took longer than the timeout.
        """
        assert self._process.stdout is not None
        ends = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            if not select.select([self._process.stdout], [], [], max(ends - time.monotonic(), 0))[0]:
                self._process.kill()
                raise WorkerError(f"no answer within {timeout_s:.0f} s")
            piece = self._process.stdout.read(1 << 16)
            if not piece:
                raise WorkerError(self._last_words())
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
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
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _last_words(self) -> str:
        self._process.wait(10)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        said = f": {lines[-1][:300]}" if lines else ""
        return f"ended with code {self._process.returncode}{said}"
