"""How a command ends: by an exception that nothing was to raise, or although something that an arm has started still runs."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from contextlib import suppress

from harness.machine import raw_output
from harness.machine.processes import kill_children
from harness.store.errors import one_line

INTERNAL = 7  # exit code of every command; 2 is a request that cannot be carried out
JOIN_S = 1.0  # for threads that are about to end


def internal_error(error: Exception) -> int:
    """Prints an exception that nothing was to raise, ends the processes that were started here; the exit code."""
    raw_output.say("".join(traceback.format_exception(error)))
    kill_children()
    raw_output.say(f"error: internal error: {one_line(error)}; please report it with the lines above\n")
    return INTERNAL


def leave(code: int) -> int:
    """The exit code; this process ends here where a thread of an arm would keep it alive for ever."""
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
