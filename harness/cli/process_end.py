"""End of the command's process: nothing that an arm has started keeps it alive after its last line."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from harness.machine import raw_output
from harness.machine.processes import thread_owner

LOOK_S = 0.1  # between two looks at whether the main thread has ended
JOIN_S = 1.0  # for threads that are about to end
EXIT_S = 30.0  # for what is registered with `atexit`
# Their threads end by themselves when the interpreter exits.
_POOLS = ("concurrent", "joblib", "multiprocessing", "threading")


def leave(code: int) -> int:
    """Return the exit code; once the main thread has ended, nothing keeps the process alive for long.

    Threads that still run a second later are named and cut off. What is registered with `atexit` runs all the same, for at
    most `EXIT_S`. As long as the main thread lives, as in a program that called this command, nothing happens.
    """
    # A daemon: it runs until the interpreter itself is taken down.
    threading.Thread(target=_see_off, args=(code,), daemon=True).start()
    return code


def _see_off(code: int) -> None:
    # The second of the two comes first, before pools are waited for; a Python without it waits for pools
    while threading.main_thread().is_alive() and not getattr(threading, "_SHUTTING_DOWN", False):
        time.sleep(LOOK_S)
    deadline = time.monotonic() + JOIN_S
    left = [thread for thread in threading.enumerate() if _is_foreign(thread)]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = ", ".join(repr(thread.name) for thread in left if thread.is_alive())
    if names:
        raw_output.say(
            f"warning: the command ends although threads still run: {names}; they were started without daemon=True, and are cut off\n"
        )
        threading.Thread(target=_run_exit_functions, args=(code,), daemon=True).start()
    time.sleep(EXIT_S)
    raw_output.say(
        f"warning: the command ends although what is registered with atexit, or a pool, has not ended within {EXIT_S:g} s\n"
    )
    _exit(code)


def _run_exit_functions(code: int) -> None:
    with suppress(Exception):
        atexit._run_exitfuncs()
    _exit(code)


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _is_foreign(thread: threading.Thread) -> bool:
    if thread.daemon or thread is threading.main_thread():
        return False
    return thread_owner(thread) not in _POOLS
