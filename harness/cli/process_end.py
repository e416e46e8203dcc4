"""How a command ends: by an exception that nothing was to raise, or although something that an arm has started still runs."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from harness.machine import raw_output
from harness.store.errors import UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence


# What a sweep takes with its processes: the least that it ends with, and the shell's word for more.
LEAST = {resource.RLIMIT_NOFILE: (64, "open files", "n"), resource.RLIMIT_AS: (2**31, "bytes of memory", "v")}


def refuse_place(words: Sequence[str]) -> None:
    """Refuse a working folder that is gone, and words that are no text.

    Raises:
        UsageError: which, and the way out.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(f"the working folder cannot be used ({error.strerror}); cd to another one") from None
    for word in words:
        if word != word.encode(errors="replace").decode():
            raise UsageError(
                f"{word!a}: expected UTF-8; give the file another name, or set LC_ALL=C.UTF-8 where it is UTF-8"
            )


def refuse_limits() -> None:
    """Refuse limits within which no sweep ends.

    Raises:
        UsageError: which, and the way out.
    """
    for kind, (least, what, option) in LEAST.items():
        limit = resource.getrlimit(kind)[0]
        if 0 <= limit < least:
            raise UsageError(
                f"this shell allows {limit} {what}: expected at least {least}; set it by ulimit -{option}"
            )


INTERNAL = 7  # exit code of every command; 2 is a request that cannot be carried out
JOIN_S = 1.0  # for threads that are about to end


def internal_error(error: Exception) -> int:
    """Prints an exception that nothing was to raise; the exit code."""
    raw_output.notify("".join(traceback.format_exception(error)))
    raw_output.notify(f"error: internal error: {one_line(error)}; please report it with the lines above\n")
    return INTERNAL


def exit_with(code: int) -> int:
    """The exit code; this process ends here where a thread of an arm would keep it alive for ever.

    So would a server of processes that is stopped: an interpreter that exits waits for those that it forked.
    """
    if "harness.machine.fork_server" in sys.modules:
        from harness.machine import fork_server

        fork_server.kill()
    if (pools := sys.modules.get("concurrent.futures.thread")) is not None:
        # What the interpreter does as it exits: idle threads of pools end, for those that work it would wait for ever.
        idle = threading.Thread(target=pools._python_exit, daemon=True)
        idle.start()
        idle.join(JOIN_S)
        setattr(pools, "_shutdown", False)  # noqa: B010 - whoever called this in a longer process may go on
    deadline = time.monotonic() + JOIN_S
    threads = [t for t in threading.enumerate() if not t.daemon and t is not threading.current_thread()]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)
    return code
