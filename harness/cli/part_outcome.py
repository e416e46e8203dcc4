"""What the rows of a part say about it: its progress after its sweep has ended."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from harness.engine.parts import CUT, Part, Progress, State
from harness.store.cause import Cause

if TYPE_CHECKING:
    import pandas as pd


def settle(mine: Progress, frame: pd.DataFrame | None) -> None:
    """Sets what has become of a part, whose `exit` is that of its sweep.

    A failure that no resume= would measure again is its cause, whatever else ended it.

    Args:
        mine: its progress.
        frame: rows of its run; None where it has stored none.
    """
    mine.cause, mine.reason, mine.ok = Cause.NONE, "", False
    if frame is None:
        mine.cause = {None: Cause.INTERRUPTED, CUT: Cause.BUDGET}.get(mine.exit, Cause.ERROR)
        mine.reason = "it has stored nothing; see what it printed"
        return
    mine.statuses = dict(Counter(frame["status"]))
    left = frame["retryable"] | (frame["status"] == "partial")  # resume= would measure it
    mine.done = mine.exit in (0, 1) and not left.any()
    failed = frame["status"] == "failed"
    mine.ok = mine.done and not failed.any() and mine.exit == 0 and mine.statuses.get("ok", 0) > 0
    ending = ""
    if mine.exit is None:
        mine.cause, ending = Cause.INTERRUPTED, "interrupted; what it has finished is stored"
    elif mine.exit == CUT:
        mine.cause, ending = Cause.BUDGET, "cut off; what it has finished is stored"
    elif mine.exit not in (0, 1):
        mine.cause, ending = Cause.ERROR, "it ended early; see what it printed"
    mine.reason = ending
    if (failed & ~left).any():
        _explain(mine, frame[failed & ~left], Cause.ERROR, ending)
    elif not ending and left.any():  # a failed one before a skipped one
        _explain(mine, frame[left].sort_values("status", kind="stable"), Cause.BUDGET)
    elif mine.done and mine.exit == 1:
        mine.cause, mine.reason = Cause.ERROR, "it ended with exit code 1; see what it printed"
    elif mine.done and not mine.ok:
        _explain(mine, frame, Cause.UNSUPPORTED)


def _explain(mine: Progress, rows: pd.DataFrame, otherwise: Cause, ending: str = "") -> None:
    """The first of these rows says why."""
    mine.cause = Cause(rows["cause"].iloc[0] or otherwise)
    mine.reason = str(rows["reason"].iloc[0]) + (f"; {ending}" if ending else "")


def unchecked(part: Part, state: State) -> dict[str, str]:
    """The parts that were to check the arms of this one and have not, with the reason: they measured nothing, or not all.

    A check that failed is a result, and leaves out the arms that it refutes.
    """
    found = {}
    for name in part.checked_by:
        check = state[name]
        if not check.statuses.get("ok") and not check.statuses.get("failed"):
            found[name] = "has no result"
        elif not check.done:
            found[name] = "is unfinished"
    return found
