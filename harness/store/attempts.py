"""Attempts: which rows stand where something was measured more than once."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from harness.store.measurement import TIMES

if TYPE_CHECKING:
    import pandas as pd

_DRAWN = (
    20  # low bits of an attempt's number that are drawn: two writers that begin within a millisecond differ
)


DECIDED_BY = ("run_id", "case_id", "arm", "metric", "rounds", "status", "retryable", "attempt")


def that_count(frame: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are of the attempt that counts, for each thing that was measured.

    The arms of a timed case are stored together and compared round by round, so one attempt stands for all of them. The
    runs of a trial suite are stored as each ends, so each arm has a last attempt of its own.

    Args:
        frame: all rows of the cases, with the columns `DECIDED_BY`.
    """
    attempt = frame["attempt"]
    case = [frame["run_id"], frame["case_id"]]
    timed = frame["metric"].isin(TIMES).groupby(case, dropna=False).transform("any")
    unit = frame.groupby([*case, frame["arm"].mask(timed, "")], dropna=False).ngroup()
    waits = frame["retryable"]
    tried = ~waits & (frame["status"] != "skipped")
    sitting = [unit, attempt]
    partial = (frame["status"] == "partial").groupby(sitting).transform("any")
    whole = ~waits.groupby(sitting).transform("any")
    some = tried.groupby(sitting).transform("any")
    # Prefer a complete attempt, then one whose measured arms are complete, then one that was cut off, then a deferred one.
    tier = whole.astype(int) * 3 + (~whole & some & ~partial) * 2 + (~whole & partial)
    best = tier == tier.groupby(unit).transform("max")
    if partial.any():  # of several that were cut off, the one with the most rounds
        rounds = frame["rounds"].map(lambda of: max(of, default=-1) + 1).where(best & (tier == 1), 0)
        most = rounds.groupby(sitting).transform("max")
        best &= most == most.where(best, -1).groupby(unit).transform("max")
    last = attempt.where(best, -1)
    return best & (last == last.groupby(unit).transform("max"))


def next_attempt(last: int) -> int:
    """A number for an attempt that begins now: nanoseconds since 1970, the last bits drawn.

    Args:
        last: the largest number that the run holds in any of its shards; it is exceeded, since a clock may be set back, or
            lie behind another machine's.
    """
    return max(time.time_ns() >> _DRAWN, (last >> _DRAWN) + 1) << _DRAWN | secrets.randbits(_DRAWN)
