"""Errors that end a command with one clear line and exit code 2."""

from __future__ import annotations

import difflib
import os
import traceback
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Cause(StrEnum):
    """The column `cause` of the store; "" where the row has its number."""

    NONE = ""
    NUMERICS = "numerics"  # its check refuted the result
    NOT_FP8 = "not_fp8"  # its check counted other FP8 GEMMs than the recipe has
    STALE = "stale"  # an output of the timed calls is not that of their inputs
    REPLAYED = "replayed"  # an output was returned again that had been overwritten
    DEFERRED = "deferred"  # an output that is no plain tensor, and may be computed when it is read
    TAMPERED = "tampered"  # clocks, or what waits for the device, were replaced
    TOO_FAST = "too_fast"  # beyond twice the measured peak of the device
    UNPROVEN = "unproven"  # nothing wrong was found, but not all of it could be compared
    DIVERGED = "diverged"  # a training run's loss or gradient is no finite number
    BUILD = "build"  # an exception before the arm was timed: build, first call or check
    COMPILE = "compile"  # not compiled whole, or compiled again while it was timed
    RUN = "run"  # an exception while it was timed or trained
    OOM = "oom"  # memory ran out, or would by prediction
    TIMEOUT = "timeout"  # too long without a sign of life, or as a whole
    BUDGET = "budget"  # the sweep's time was spent before its turn
    DIED = "died"  # its process died, twice
    DEVICE_LOST = "device_lost"  # the device can do nothing more in this process
    BASELINE = "baseline"  # an arm that it is compared with took the case with it
    INTERRUPTED = "interrupted"  # the sweep ended while the case was under way
    UNSUPPORTED = "unsupported"  # this shape anywhere, or this arm or metric on this machine
    MISSING = "missing"  # a library or a compiler that could be installed
    REFUSED = "refused"  # what was to run said no before it started
    UNSTORABLE = "unstorable"  # a row that no file can hold
    ERROR = "error"  # anything else, a fault of the harness included


# What may have passed by the time of a resume=: the rows wait, and replace nothing that was measured.
RETRYABLE = frozenset({Cause.BUDGET, Cause.DIED, Cause.DEVICE_LOST, Cause.INTERRUPTED})
# The check refuted the arm: its result exists and is wrong.
REFUTED = frozenset({Cause.NUMERICS, Cause.NOT_FP8, Cause.STALE, Cause.REPLAYED, Cause.DEFERRED})
# By status, where nothing more is known
DEFAULT = {
    "ok": Cause.NONE,
    "partial": Cause.INTERRUPTED,
    "skipped": Cause.UNSUPPORTED,
    "failed": Cause.ERROR,
}


_KNOWN = {str(cause): cause for cause in Cause}


def known(word: object) -> Cause:
    """A cause that another commit's harness wrote; ERROR for a word that this one lacks."""
    return _KNOWN.get(str(word or ""), Cause.ERROR)


OUT_OF_MEMORY = "out of memory"
# What the kernel and the loader say where the machine has no more of something or a file was cut off, and the way out.
NO_MORE = {
    "Too many open files": "ulimit -n allows more",
    "No space left on device": "free some where it writes, such as TMPDIR={tmp}",
    "Disk quota exceeded": "free some where it writes, such as TMPDIR={tmp}",
    "File too large": "ulimit -f allows more",
    "failed to map segment": "ulimit -v allows more memory",
    "file too short": "a compilation was cut off: delete that file",
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
    """The line of an exception that says what the machine has no more of or is cut off, and the way out; "" without one."""
    for line in text_of(error).splitlines():  # of a compiler's many, the one that says it
        for phrase, way in NO_MORE.items():
            if phrase in line:
                return f"{line.strip()[:300]}; {way.format(tmp=os.environ.get('TMPDIR', '/tmp'))}"
    return ""


def cause_of(error: BaseException, otherwise: Cause) -> Cause:
    """The cause that an exception is: memory that ran out wherever it came from, else what was under way."""
    own = getattr(error, "cause", None)
    if isinstance(own, Cause):
        return own
    return Cause.OOM if out_of_memory(error) else otherwise


def status_of(cause: Cause) -> Literal["skipped", "failed"]:
    """Status of the row of an arm that raised: what could be installed is no failure of what is measured."""
    return "skipped" if cause is Cause.MISSING else "failed"


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
