"""Lines on a terminal. Text from outside is never read as markup and never moves the cursor."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from harness.machine.raw_output import printable as printable  # its public place
from harness.machine.raw_output import unguarded

WIDTH, NARROW = 100, 80


def console(width: int = WIDTH) -> Console:
    """Console as wide as the terminal, at most `width`; `width` without a terminal.

    Never narrower than `NARROW`, for which tables are made: a terminal wraps what is wider, and a table would cut it.
    """
    here = Console(highlight=False)
    if not here.is_terminal:
        return Console(width=width, highlight=False)
    wide = min(width, max(here.width, NARROW))
    return Console(file=unguarded(sys.stdout), width=wide, highlight=False)


def print_text(where: Console, text: str, style: str = "") -> None:
    """Prints lines."""
    where.print(Text(printable(text, keep="\n")), style=style)
