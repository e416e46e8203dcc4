"""Errors that end a command with one clear line and exit code 2."""

from __future__ import annotations

import difflib
import os
import traceback
from typing import TYPE_CHECKING

from harness.store.cause import Cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


OUT_OF_MEMORY = "out of memory"
# What the kernel and the loader say where the machine has no more of something, and the way out.
NO_MORE = {
    "Too many open files": "ulimit -n allows more",
    "No space left on device": "free some where it writes, such as TMPDIR={tmp}",
    "Disk quota exceeded": "free some where it writes, such as TMPDIR={tmp}",
    "File too large": "ulimit -f allows more",
    "failed to map segment": "ulimit -v allows more memory",
}


class UsageError(ValueError):
    """The request cannot be carried out; the message names the value, the expectation and the way out."""


class SpoiledError(RuntimeError):
    """What was refused has left this process unfit for its device, though the device still answers it."""


class LateError(RuntimeError):
    """The case as a whole has taken too long: no fault of the arm that was under way."""


class RemoteError(RuntimeError):
    """What went wrong in another process: its one line, and its cause."""

    def __init__(self, reason: str, cause: Cause) -> None:
        super().__init__(reason)
        self.cause = cause


class MemoryShortageError(MemoryError):
    """Memory ran out; `facts` say of what, and belong into the `resolved` of the row."""

    def __init__(self, message: str, facts: Mapping[str, object]) -> None:
        super().__init__(message)
        self.facts = dict(facts)


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not in a table: the nearest one first, then all."""
    names = sorted(known)
    plain = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), plain, n=1, cutoff=0.5)
    hint = f" (nearest: {plain[near[0]]})" if near else ""
    return UsageError(f"unknown {kind} {name!r}{hint}; known: {', '.join(names)}")


def one_line(error: BaseException) -> str:
    """An exception as the reason of a row; one that says that memory ran out begins with "out of memory"."""
    text, name = " ".join(text_of(error).split())[:500], type(error).__name__
    if isinstance(error, RemoteError):
        return text
    if no_more := refused(error):
        return f"{name}: {no_more}"
    if out_of_memory(error):
        return f"{OUT_OF_MEMORY}: {text or name}"
    return f"{name}: {text}" if text else name


def refused(error: BaseException) -> str:
    """What an exception says that the machine has no more of, and the way out; "" where it says none of that."""
    for line in text_of(error).splitlines():  # of a compiler's many, the one that says it
        for said, way in NO_MORE.items():
            if said in line:
                return f"{line.strip()[:300]}; {way.format(tmp=os.environ.get('TMPDIR', '/tmp'))}"
    return ""


def cause_of(error: BaseException, otherwise: Cause) -> Cause:
    """The cause that an exception is: memory that ran out wherever it came from, else what was under way."""
    own = getattr(error, "cause", None)
    if isinstance(own, Cause):
        return own
    return Cause.OOM if out_of_memory(error) else otherwise


def text_of(error: BaseException) -> str:
    """`str(error)`; says so where the exception, which may be anyone's, cannot be written."""
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 - whatever it raises, the first one is to be told
        return f"its text cannot be read: str() raised {type(second).__name__}"


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch's own class on a GPU; its CPU allocator raises a bare RuntimeError."""
    # By name, so that what reads results needs no torch.
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in text_of(error))


def let_go(error: BaseException) -> None:
    """Clears the variables of all frames that an exception, and those that led to it, went through.

    For one that is kept while memory is to be freed. Frames that still run keep theirs.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
