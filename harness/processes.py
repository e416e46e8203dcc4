"""Processes that work for another one: how they end with it or when told to, what ended them, what memory they hold."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

ONE_INTERRUPT_S = 5.0  # Ctrl-C and SIGTERM that follow one another so closely count as one


def end_with_parent() -> None:
    """From now on this process, and all of its process group if it leads one, ends when its parent has.

    Also where the parent was killed, had no time to say so, and this process computes and listens to nobody.
    """
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def kill_group(pid: int) -> None:
    """Kills a process that leads a group, with what it has started itself; nothing where both are gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


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


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM, as a scheduler sends it, ends the block as Ctrl-C does: cleanly.

    Either often comes twice, from an impatient hand or from a terminal and a launcher at once; the second must not keep
    a run from recording how it ended.
    """
    heard = -ONE_INTERRUPT_S

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal heard
        if time.monotonic() - heard >= ONE_INTERRUPT_S:
            heard = time.monotonic()
            raise KeyboardInterrupt

    # A shell lets its background jobs ignore Ctrl-C, and so it stays.
    asked = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, stop)) for number in asked]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
