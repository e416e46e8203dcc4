"""Served: one process of an arm as its parent has it: told a call, and what it answers, prints and dies of."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from harness.engine.arm_process import serve
from harness.machine import fork_server
from harness.machine.processes import MARK, ending, kill_all_of
from harness.store.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from harness.engine.arm_process import Conditions
    from harness.engine.calls import Message
    from harness.machine.processes import Deadline
    from harness.machine.ranks import Seat

KEPT_BYTES = 4000  # of what was printed last
HANDED_BYTES = 65_536  # of one job: a log is no place for more
READ_BYTES = 1 << 16

OnLines = Callable[[list[str]], None]


class Printed:
    """Standard output and error of one worker, by a pipe.

    Args:
        pipe: the end to read from.
        on_lines: given whole lines as they come, of one job at most `HANDED_BYTES`.
    """

    def __init__(self, pipe: Connection, on_lines: OnLines) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.inode = os.fstat(pipe.fileno()).st_ino  # by which whoever holds the other end is known
        self._on_lines = on_lines
        self._kept = self._line = b""
        self._handed = 0
        self.pipe: Connection | None = pipe

    def begin(self) -> None:
        """Another job begins."""
        self._kept, self._handed = b"", 0

    def listen(self) -> None:
        """Reads what there is."""
        try:
            while self.pipe is not None and (piece := os.read(self.pipe.fileno(), READ_BYTES)):
                self._kept = (self._kept + piece)[-KEPT_BYTES:]
                self._hand_on(piece)
                if len(piece) < READ_BYTES:
                    return  # one that never stops printing must not keep this process from its other workers
        except BlockingIOError:
            return
        self.close()  # the worker has closed its end

    def last_lines(self) -> str:
        """The end of what the job has printed, of what was read."""
        if self._line:
            self._hand_on(b"\n")
        return self._kept.decode(errors="replace").strip()

    def close(self) -> None:
        """Reads no more."""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def _hand_on(self, piece: bytes) -> None:
        *lines, self._line = (self._line + piece).split(b"\n")
        self._line = self._line[-HANDED_BYTES:]
        if not lines or self._handed > HANDED_BYTES:
            return
        self._handed += sum(len(line) + 1 for line in lines)
        more = [b"(left out: what this job prints from here on)"] if self._handed > HANDED_BYTES else []
        self._on_lines([line.decode(errors="replace") for line in (*lines, *more)])


PRELOADED = ["harness.engine.arm_process"]  # nothing of it starts a thread; pyarrow would
MESSAGE_BYTES = 2**28
SIGN_S = 0.5  # for a process to say where it stands
SIGNS = {"result", "failed", "Stage", "Steps"}
_starting = threading.Lock()


class Served:
    """A process that does what it is told (`harness.engine.arm_process.serve`).

    Args:
        conditions: that it starts with.
        on_lines: given the lines that it prints.
        seat: its place among ranks; None: there are no others.
        anew: it is not forked.

    Attributes:
        pid: its number.
        host: where it is, in words; "" for this host.
        silent_s: it may be gone for so long before that is known.
    """

    host, silent_s = "", 0.0

    def __init__(
        self, conditions: Conditions, on_lines: OnLines, seat: Seat | None = None, *, anew: bool = False
    ) -> None:
        context = multiprocessing.get_context("spawn") if anew else fork_server.context(PRELOADED)
        self._ours, theirs = context.Pipe()
        output, output_pipe = context.Pipe(duplex=False)
        self._printed = Printed(output, on_lines)
        environ = conditions.environ
        self._mark = ".".join(filter(None, [environ.get(MARK, ""), secrets.token_hex(8)]))
        own = replace(conditions, environ={**environ, MARK: self._mark})
        # Not a daemon: a suite may start processes of its own.
        self._process: BaseProcess = context.Process(
            target=serve, args=(theirs, output_pipe, own, seat), daemon=False
        )
        with _starting:
            self._process.start()
        self.pid = self._process.pid or 0
        theirs.close()
        output_pipe.close()

    def send(self, message: Message) -> None:
        """Asks for a call; that it is gone shows in its answer."""
        self._printed.begin()
        with suppress(OSError):
            self._ours.send_bytes(json.dumps(message).encode())

    def waited(self) -> list[Any]:
        """What can be waited for. The pipe last: where the answer is there, so is all that was printed before it."""
        return [self._ours, self._process.sentinel, *self._pipe()]

    def _pipe(self) -> list[Connection]:
        return [self._printed.pipe] if self._printed.pipe is not None else []

    def heard(self, ready: Iterable[Any]) -> dict[str, Any] | None:
        """What it says: an answer or a sign of life, "died" with how, or "unreadable" with why; None for nothing yet.

        Args:
            ready: of `waited`.
        """
        if self._printed.pipe in ready:
            self._printed.listen()
        if self._ours in ready:
            try:
                answer = json.loads(self._ours.recv_bytes(MESSAGE_BYTES))
                if not (isinstance(answer, dict) and answer.keys() & SIGNS):
                    return {"unreadable": "no message"}
            except (EOFError, ConnectionError):
                return self._died()
            except (OSError, ValueError, RecursionError, MemoryError) as error:
                return {"unreadable": one_line(error)}
            if not answer.keys() & {"Stage", "Steps"}:
                self._printed.last_lines()
            return answer
        return self._died() if self._process.sentinel in ready else None

    def _died(self) -> dict[str, Any]:
        self._process.join(5)
        self._printed.listen()
        return {"died": ending(self._process.exitcode or 0), "printed": self._printed.last_lines()}

    def stack(self) -> str:
        """Where its main thread stands, by faulthandler; "" where it gives no sign."""
        self._printed.listen()
        self._printed.begin()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        ends = time.monotonic() + SIGN_S
        while (left := ends - time.monotonic()) > 0 and wait(self._pipe(), left):
            self._printed.listen()
            ends = min(ends, time.monotonic() + SIGN_S / 5)  # it may come in pieces
        return self._printed.last_lines()

    def kill(self) -> None:
        """End it and all that it has started; whoever waits for an answer hears of it."""
        kill_all_of(self.pid, self._mark, self._printed.inode)
        self._process.kill()

    def join(self, until: Deadline) -> None:
        """Waits until it is gone."""
        self._process.join(until.left())

    def close(self) -> None:
        """Reads what it has printed, and no more."""
        self._ours.close()
        self._printed.listen()
        self._printed.last_lines()
        self._printed.close()
