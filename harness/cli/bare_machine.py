"""What every command needs of its machine; each refusal names the limit and the way out."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

from harness.store.errors import UsageError

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
