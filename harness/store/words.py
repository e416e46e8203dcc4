"""Words of a command line, read the same way by every command: help, one-line refusals, exit code 2."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NoReturn

from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Parser(argparse.ArgumentParser):
    """Flags of `python -m harness NAME`; what it refuses is a `UsageError`, as of every other command."""

    def __init__(self, name: str, description: str, epilog: str | None = None) -> None:
        super().__init__(prog=f"python -m harness {name}", description=description, epilog=epilog)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def helped(words: Sequence[str], usage: str, *, alone: bool = False) -> bool:
    """Prints the usage where `-h` or `--help` is among the words, or, with `alone`, where there is no word."""
    if not ({"-h", "--help"} & set(words) or (alone and not words)):
        return False
    sys.stdout.write(usage)
    return True


def keyed(words: Sequence[str], usage: str, keys: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Plain words, and values by key of those that are key=value.

    Args:
        words: of the command.
        usage: its first line is what a refusal shows.
        keys: that are taken.

    Raises:
        UsageError: a flag, or another key.
    """
    plain = [word for word in words if "=" not in word and not word.startswith("-")]
    options = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))
    wrong = [w for w in words if w.startswith("-")] + [key for key in options if key not in keys]
    if wrong:
        raise UsageError(f"unknown word {wrong[0]!r}; {usage.partition(chr(10))[0]}")
    return plain, options
