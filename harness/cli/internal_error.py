"""What is left to do when the harness itself fails: say so, end what it has started, exit with a code of its own."""

from __future__ import annotations

import traceback

from harness.machine import raw_output
from harness.machine.processes import kill_children
from harness.store.errors import one_line

EXIT = 7  # of every command; 2 is a request that cannot be carried out


def report(error: Exception) -> int:
    """Prints an exception that nothing was to raise, ends the processes that were started here; the exit code.

    The last line says what happened, the lines before it where.
    """
    # Its frames hold whatever was under way, worker processes among it.
    raw_output.say("".join(traceback.format_exception(error)))
    kill_children()
    raw_output.say(f"error: internal error: {one_line(error)}; please report it with the lines above\n")
    return EXIT
