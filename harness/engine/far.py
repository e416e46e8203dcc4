"""Far: a rank of an arm in another process of torchrun's, maybe on another host, as rank 0 has it; and what that process does.

All that they tell each other is JSON in torch's store (`harness.machine.torchrun`): calls as in `harness.engine.calls`. Of a case
its id counts: each process has composed and planned its own from the same command line. So whoever reaches the store can have a
case measured that this command measures, and nothing else.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engine import arm_process, calls
from harness.engine.served import SIGN_S, SIGNS, Served
from harness.machine import torchrun
from harness.machine.ranks import Meeting, Seat
from harness.machine.torchrun import SILENT_S, WAY
from harness.store.errors import Cause, RemoteError, UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from multiprocessing.connection import Connection

    from harness.engine.calls import Message
    from harness.engine.plan import PlannedCase
    from harness.machine.processes import Deadline

END_S = 15.0  # for an answer to what needs no work
JOIN_S = 1.0  # for a thread that has its answer
CALLS = (
    "started_threads", "join", "prepare", "allocate", "release", "call", "sample", "finish", "clear", "trial",
)  # fmt: skip
_numbers = itertools.count()  # of the processes that a rank is to start


class Far:
    """What `harness.engine.served.Served` is, at a distance.

    Args:
        rank: its number.
        meeting: of its group.
        on_lines: given the lines that it prints.
        anew: it is not to be forked.

    Raises:
        RemoteError: some rank is lost since an earlier group.
    """

    pid, silent_s = 0, 2.0 * SILENT_S

    def __init__(
        self, rank: int, meeting: Meeting, on_lines: Callable[[list[str]], None], *, anew: bool
    ) -> None:
        if torchrun.lost:
            raise RemoteError(torchrun.lost[0], Cause.DIED)
        self.rank, self.host, self._on_lines = rank, f" ({torchrun.host_of(rank)})", on_lines
        self._number, self._store = next(_numbers), torchrun.client()
        self._ours, heard = Pipe(duplex=False)
        self._heard, self._why, self._killed = 0, "", False  # answers; why there are no more
        self._send("start", version=calls.VERSION, meeting=meeting, anew=anew)
        self._listener = threading.Thread(target=self._listen, args=(heard,), daemon=True)
        self._listener.start()

    def _send(self, do: str, **more: Any) -> None:
        torchrun.send(self._store, self.rank, do=do, number=self._number, **more)

    def _listen(self, heard: Connection) -> None:
        """Hands on its answers, by a client of its own: a client that waits does nothing else."""
        key = f"from/{self.rank}/{self._number}"
        try:
            store = torchrun.client()
            while answer := torchrun.patiently(store, f"{key}/{self._heard}", self.rank):
                self._heard += 1
                heard.send_bytes(answer)
        except (RuntimeError, OSError) as fault:  # the store is gone, or nobody listens any more
            self._why = str(fault).splitlines()[0]
        heard.close()

    def send(self, message: Message) -> None:
        """See `Served`."""
        with suppress(RuntimeError):  # the store is gone: its answer says so
            self._send("call", **message)

    def waited(self) -> list[Any]:
        """See `Served`."""
        return [self._ours]

    def heard(self, ready: Iterable[Any]) -> dict[str, Any] | None:
        """See `Served`; "lost", with why, of one that is gone with its host."""
        if self._ours not in ready:
            return None
        try:
            lines, answer = json.loads(self._ours.recv_bytes())
        except (EOFError, OSError):
            return self._silent(self._why)
        except ValueError as error:
            return {"unreadable": one_line(error)}
        self._on_lines([str(line) for line in lines])
        if not isinstance(answer, dict) or not answer.keys() & (SIGNS | {"died", "unreadable"}):
            return {"unreadable": "no message"}
        if "raised_at" in answer:  # by the clock of this machine
            answer["raised_at"] = time.monotonic()
        return answer

    def _silent(self, why: str) -> dict[str, Any]:
        torchrun.lost.append(f"rank {self.rank} of {torchrun.started()}{self.host}: {why}; {WAY}")
        return {"lost": f"{why}; {WAY}"}

    def stack(self) -> str:
        """See `Served`."""
        self._send("where")
        return str(self._reply("where", SIGN_S + END_S) or "")

    def kill(self) -> None:
        """Ends its process."""
        if not self._killed:
            self._killed = True
            with suppress(RuntimeError):  # the store is gone: so is the rank
                self._send("end")

    def join(self, until: Deadline) -> None:
        """Waits until that is gone."""
        if not until.left():
            with suppress(RuntimeError):
                # The next answer, and the one after an answer just now
                for number in (self._heard, self._heard + 1):
                    self._store.set(f"from/{self.rank}/{self._number}/{number}", b"")
        elif self._listener.is_alive() and self._reply("end", until.left()) is None:
            self._silent("gave no answer")
            return
        # One that waits in the store as the interpreter exits would abort it
        self._listener.join(max(until.left(), JOIN_S))

    def close(self) -> None:
        """Close this side of the channel: the process is gone."""
        self._ours.close()

    def _reply(self, what: str, seconds: float) -> Any:
        key = f"{what}/{self.rank}/{self._number}"
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:
            return None
        return json.loads(self._store.get(key))


class Follower:
    """A process of torchrun's other than rank 0's: does what that asks for, until it lets this one go.

    Args:
        rank: its number.
        cases: by id, as this process has planned them.
        results: below which the folders of runs are.
        refused: why there is no plan; "" where there is one.
    """

    def __init__(
        self,
        rank: int,
        cases: Mapping[str, PlannedCase],
        results: Path,
        refused: str = "",
    ) -> None:
        self._rank, self._cases, self._results, self._refused = rank, cases, results.absolute(), refused
        self._mine: dict[int, tuple[Served, threading.Thread]] = {}

    def follow(self, store: Any) -> int:
        """The exit code."""
        try:
            for count in itertools.count(1):
                message = json.loads(torchrun.patiently(store, f"to/{self._rank}/{count}", 0))
                if message["do"] == "leave":
                    return 0
                self._do(store, message["do"], int(message["number"]), message)
        finally:
            for one, _ in self._mine.values():
                one.kill()
        raise AssertionError("a count ends")

    def _do(self, store: Any, what: str, number: int, message: Mapping[str, Any]) -> None:
        if what == "start":
            self._start(number, message)
            return
        one, thread = self._mine[number]
        if what == "call":
            try:
                asked = self._allowed(message)
            except (LookupError, TypeError) as error:
                # Only its words: the process goes on
                why = self._refused or f"rank {self._rank}: {one_line(error)}"
                asked = calls.message(arm_process.refuse, [why])
            one.send(asked)
        elif what == "where":
            store.set(f"where/{self._rank}/{number}", json.dumps(one.stack()))
        elif what == "end":
            del self._mine[number]
            one.kill()
            thread.join(END_S)
            store.set(f"end/{self._rank}/{number}", json.dumps(True))

    def _start(self, number: int, message: Mapping[str, Any]) -> None:
        if message["version"] != calls.VERSION:
            raise UsageError(
                f"rank 0 speaks version {message['version']} of what ranks tell each other, rank {self._rank} version {calls.VERSION}: "
                "install the same version on all hosts"
            )
        meeting = Meeting(*message["meeting"])
        seat = Seat(self._rank, torchrun.local_rank(), torchrun.interface(meeting.hosts), meeting)
        lines: list[str] = []
        one = Served(arm_process.Conditions.here(), lines.extend, seat, anew=bool(message["anew"]))
        words = one, lines, f"from/{self._rank}/{number}"
        self._mine[number] = one, threading.Thread(target=_send_answers, args=words, daemon=True)
        self._mine[number][1].start()

    def _allowed(self, message: Mapping[str, Any]) -> Message:
        """A call of an arm's process, of a case as this command has planned it, in a folder of this command.

        Raises:
            LookupError: it is not.
        """
        if message["call"] not in [[arm_process.__name__, name] for name in CALLS]:
            raise LookupError(f"no call {message['call']}")
        return {"call": message["call"], "args": [*map(self._argument, message["args"])]}

    def _argument(self, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if "folder" in given:
            folder = Path(given["folder"])
            if ".." in folder.parts or not folder.is_relative_to(self._results):
                raise LookupError(f"{folder} does not lie in {self._results}")
            return given
        if given["case"] not in self._cases:
            raise LookupError(f"no case {given['case']} in its plan: start all ranks with the same words")
        return calls.as_data(self._cases[given["case"]])


def _send_answers(one: Served, lines: list[str], key: str) -> None:
    """Hands the answers of this rank's process to rank 0, until it has ended."""
    store = torchrun.client()
    with suppress(RuntimeError):
        for number in itertools.count():
            answer: dict[str, Any] = {}
            while not answer.keys() - {"Stage", "Steps"}:  # rank 0's own process gives the signs of life
                answer = one.heard(wait(one.waited())) or {}
            printed, lines[:] = lines[:], []
            store.set(f"{key}/{number}", json.dumps([printed, answer]))
            if answer.keys() & {"died", "unreadable"}:
                store.set(f"{key}/{number + 1}", b"")
                break
    one.close()
