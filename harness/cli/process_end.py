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

JOIN_S = 1.0  # for threads that are about to end
EXIT_S = 30.0  # for what is registered with `atexit`
# Their threads end by themselves when the interpreter exits.
_POOLS = ("concurrent", "joblib", "multiprocessing", "threading")


def leave(code: int) -> int:
    """Return the exit code; where a thread would keep the process alive, name it and end the process with that code.

    What is registered with `atexit` runs in either case, for at most `EXIT_S`.
    """
    # A daemon: it runs until the interpreter itself is taken down.
    threading.Thread(target=_end_in_time, args=(code,), daemon=True).start()
    deadline = time.monotonic() + JOIN_S
    left = [thread for thread in threading.enumerate() if _is_foreign(thread)]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = ", ".join(repr(thread.name) for thread in left if thread.is_alive())
    if names:
        raw_output.say(
            f"warning: the command ends although threads still run: {names}; they were started without daemon=True, and are cut off\n"
        )
        with suppress(Exception):
            atexit._run_exitfuncs()
        _exit(code)
    return code


def _end_in_time(code: int) -> None:
    time.sleep(EXIT_S)
    raw_output.say(
        f"warning: the command ends although what is registered with atexit, or a pool, has not ended within {EXIT_S:g} s\n"
    )
    _exit(code)


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _is_foreign(thread: threading.Thread) -> bool:
    if thread.daemon or thread is threading.main_thread():
        return False
    started = getattr(thread, "_target", None) or type(thread)
    return str(getattr(started, "__module__", "")).partition(".")[0] not in _POOLS
