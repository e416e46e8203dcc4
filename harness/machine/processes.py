"""Processes: how this one is interrupted, how those that work for another end with it, and what is known of each."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import secrets
import signal
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

ONE_INTERRUPT_S = 5.0  # signals that follow one another so closely count as one
# Ctrl-C, a scheduler, a closed terminal, Ctrl-\\: all end a command in the same way.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MARK = "FP8_HARNESS_PROCESS"  # environment variable: the command and worker that a process was started by
KILLED_S = 10.0  # for killed processes to be gone
END_S = 15.0  # for all that a command that ends waits for: torchrun and Slurm kill it after 30 s


class Deadline:
    """One time for all that is waited for, however many wait one after another.

    Attributes:
        at: by `time.monotonic`; infinity until it has begun.
    """

    at = math.inf

    def begin(self, seconds: float = END_S) -> Deadline:
        """So many seconds from now, unless it has begun before; this."""
        if self.at == math.inf:
            self.at = time.monotonic() + seconds
        return self

    def left(self) -> float:
        """Seconds that may still be waited."""
        return max(0.0, self.at - time.monotonic())


ENDING = Deadline()  # of the command under way: begun by the first signal, or by its end


def patience() -> Deadline:
    """For processes that were just killed, all of them: one that hangs in a driver can't be waited for.

    None in a command that was interrupted: it writes its state first, and waits for all of them at its end (`kill_children`).
    """
    until = Deadline().begin(KILLED_S)
    until.at = until.at if ENDING.at == math.inf else 0.0
    return until


class Interrupts:
    """The handler of `ENDING_SIGNALS` within `interruptible`.

    Attributes:
        heard: a signal came.
    """

    def __init__(self) -> None:
        self.heard, self._last = False, -math.inf

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.heard = True
        ENDING.begin()
        if time.monotonic() - self._last >= ONE_INTERRUPT_S:
            self._last = time.monotonic()
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Each of `ENDING_SIGNALS` ends what is within as Ctrl-C does: cleanly, by KeyboardInterrupt.

    They often come twice, from an impatient hand or from a terminal and a launcher at once; the second must not keep
    the run from recording how it ended. Within another one this is that other one, so that all of it counts as one.
    """
    outer = next((h for h in map(signal.getsignal, ENDING_SIGNALS) if isinstance(h, Interrupts)), None)
    if outer is not None:
        yield outer
        return
    own, ENDING.at = Interrupts(), math.inf
    # A shell lets its background jobs ignore Ctrl-C, and nohup SIGHUP; so it stays.
    asked = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, own)) for number in asked]
    try:
        yield own
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def began(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since it was booted; None where it is gone, or not reaped.

    Tells a process from a later one that has its number, whatever becomes of the wall clock (proc(5), `starttime`).
    """
    fields = _stat(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def state_of(pid: int) -> str:
    """The state of a process, a letter of proc(5): "T" is stopped, "Z" dead and not reaped; "" where there is none."""
    return "".join(_stat(pid)[:1])


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may have spaces
    except OSError:
        return []


def this_host() -> str:
    """Number of this boot and of the namespace of processes: a process number means something only within both."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def end_with_parent() -> None:
    """End this process, and all that it starts, when its parent has ended.

    Also where the parent was killed, had no time to say so, and this process computes and listens to nobody.
    """
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    below = descendants(os.getpid(), servers=True)
    kill_marked(os.environ.get(MARK, ""), servers=True)  # no later command of the parent's needs them
    kill_each(below)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def kill_group(pid: int) -> None:
    """Kills a process that leads a group, with what it has started itself; nothing where both are gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_children() -> None:
    """Kills every process that `multiprocessing` has started here and that still runs, with its group.

    An interpreter waits for them before it exits: one that nobody ends any more would keep it forever.
    """
    children = [child for child in multiprocessing.active_children() if child.pid is not None]
    for child in children:
        kill_group(child.pid or 0)
        child.kill()
    for child in children:
        child.join(ENDING.begin().left())
    ENDING.at = math.inf


@contextmanager
def marked() -> Iterator[None]:
    """Kills at its end all processes that were started within, in a session of their own too.

    A process is known by a variable that it was started with (`MARK`), whatever its parent and its group are by then; one
    that clears its environment, by its parents up to this process. Not found is one that does so and whose parent has ended,
    as that of a daemon: a subreaper would be its parent, but then owe every other orphan a wait, without knowing which of
    its children others wait for.
    """
    before, mark = os.environ.get(MARK), secrets.token_hex(8)
    there = descendants(os.getpid())
    os.environ[MARK] = own = f"{before}.{mark}" if before else mark
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(MARK, None)  # an arm of this process may have cleared it
        else:
            os.environ[MARK] = before
        below = descendants(os.getpid())
        kill_marked(own)
        kill_each({pid: start for pid, start in below.items() if there.get(pid) != start})


def kill_all_of(pid: int, mark: str, pipe: int) -> None:
    """Kill what a process has started, and its group: by parents, by the mark, and by who holds the pipe that it printed to.

    The last finds what it has forked without a new program, in a session of its own.
    """
    below = descendants(pid, servers=True)
    kill_group(pid)
    kill_marked(mark, servers=True, pipe=pipe)
    kill_each(below)  # those that have cleared their environment


def kill_marked(mark: str, *, servers: bool = False, pipe: int = 0) -> None:
    """Kills the other processes of this user that were started with this mark, or with a longer one; none for "".

    Looks through /proc until it finds no more, since one may start another meanwhile; a few milliseconds a look.

    Args:
        mark: of the process that started them.
        servers: those of multiprocessing and all that was forked from them too. One that waits in C without releasing
            the interpreter's lock ends in no other way: none of its threads can see that its parent is gone.
        pipe: inode; those whose standard output or error it is, too.
    """
    wanted = f"{MARK}={mark}".encode()
    for _ in range(10 if mark else 0):
        pids = [int(path.name) for path in Path("/proc").glob("[1-9]*")]
        found = [pid for pid in pids if _carries(pid, wanted, servers) or (pipe and _prints_to(pid, pipe))]
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)


def descendants(*roots: int, servers: bool = False) -> dict[int, int]:
    """Processes that these started, and those that they started: pid -> when it began, see `began`.

    Args:
        roots: their numbers.
        servers: those of multiprocessing, and what was forked from them, too.
    """
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[1-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found: dict[int, int] = {}
    waiting = list(roots)
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            start = began(pid)
            if start is not None and (servers or not _is_server(pid)):
                found[pid] = start
                waiting.append(pid)
    return found


def kill_each(processes: Mapping[int, int]) -> None:
    """Kill processes, each given with when it began, which tells it from a later one with its number."""
    for pid, start in processes.items():
        if began(pid) == start:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _is_server(pid: int) -> bool:
    """Whether it is a server of multiprocessing, or was forked from one."""
    try:
        return b"from multiprocessing." in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _prints_to(pid: int, pipe: int) -> bool:
    if pid == os.getpid() or began(pid) is None:
        return False
    try:
        return f"pipe:[{pipe}]" in [str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in (1, 2)]
    except OSError:  # gone, closed, or another user's
        return False


def _carries(pid: int, wanted: bytes, servers: bool) -> bool:
    if pid == os.getpid():
        return False
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        # A mark ends where the word does, or where that of a worker begins.
        if not any(word == wanted or word.startswith(wanted + b".") for word in words):
            return False
        if servers:
            return began(pid) is not None  # one that is dead, but not reaped, would be found again and again
        # The servers of multiprocessing serve later commands of this process too, and end with it by themselves.
        return b"from multiprocessing." not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # gone, or another user's
        return False


def ending(exit_code: int) -> str:
    """What a process ended by.

    >>> ending(-11), ending(3)
    ('signal 11, SIGSEGV', 'exit code 3')
    """
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {-exit_code}, {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal
        return f"signal {-exit_code}"


continued: list[int] = []  # a signal for each time that this process was stopped and continued


def watch_stops() -> None:
    """Have `continued` count the stops of this process from now on."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCONT, lambda number, _: continued.append(number))


def waited_s() -> float:
    """Seconds in which this thread was ready and had no core (kernel documentation, sched-stats)."""
    return sum(map(int, _of_this_thread("schedstat")[1:2])) / 1e9


def children() -> set[int]:
    """Processes that this thread has started and nobody has waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are none, which is known sooner than by a file
        return set()
    return set(map(int, _of_this_thread("children")))


def _of_this_thread(what: str) -> list[bytes]:
    try:
        # Around each sample: pathlib would take three times as long
        with open(f"/proc/thread-self/{what}", "rb", buffering=0) as file:  # noqa: PTH123
            return file.read().split()
    except OSError:
        return []


def end_children(but: set[int]) -> None:
    """Kill all other `children`, and what they have started."""
    if not (left := children() - but):
        return
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGSTOP)  # it starts no more, while all processes are looked through
    kill_each(descendants(*left, servers=True))
    for pid in left:
        with suppress(OSError):  # where an arm ignores SIGCHLD the kernel has waited for it
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def memory_of_machine(field: Literal["total", "available"]) -> int | None:
    """Bytes that the machine has, or could make free; None where the system does not say."""
    import psutil

    try:
        return int(getattr(psutil.virtual_memory(), field))
    except (OSError, KeyError, ValueError):  # a container may hide /proc/meminfo
        return None


def memory_of_this_process(field: str) -> int:
    """Bytes that /proc/self/status has in a field ("VmRSS": resident, "VmData": private and writable)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no field {field}")


def limit_memory(extra_bytes: int) -> None:
    """Lets this process ask for so many bytes beyond what it has; more is refused, and raises what it raises anywhere.

    Counts private writable memory (RLIMIT_DATA, Linux 4.7 and later), asked for or touched, by this process alone. Not
    address space, of which libraries reserve far more than they use.
    """
    limit = memory_of_this_process("VmData") + extra_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
