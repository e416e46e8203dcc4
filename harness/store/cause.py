"""Cause: why a row has no number, or not all of it, as one word from a fixed list. Prose (`reason`) is for people only."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """The column `cause` of the store; "" where the row has its number."""

    NONE = ""
    NUMERICS = "numerics"  # its check refuted the result
    NOT_FP8 = "not_fp8"  # its check counted other FP8 GEMMs than the recipe has
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
REFUTED = frozenset({Cause.NUMERICS, Cause.NOT_FP8})
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
