"""What resume= needs to know: what a run holds already, and what was left out for a reason that may have passed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from harness import store
from harness.errors import UsageError
from harness.rows import is_trial
from harness.trials import DIED

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from harness.plan import Plan

BUDGET = "time budget"  # a skipped row whose reason starts with this is run by resume=
LOST = "the device was lost"  # likewise a failed one


def stored_cases(folder: Path, env_id: str, commit: str | None, plan: Plan) -> set[str]:
    """Ids of the cases of a plan that a run holds already with all of their arms, for resume=.

    Raises:
        UsageError: the run was made in another environment or by other code; its numbers would not be comparable.
    """
    rows = store.read(folder)
    others = set(rows["env_id"]) - {env_id}
    if others:
        raise UsageError(
            f"{folder.name} was measured in environment {sorted(others)[0]}, this one is {env_id}; "
            "start a new run (leave resume= out)"
        )
    commits = {json.loads(env).get("git_commit") for env in rows["env"].unique()}
    if commits - {commit}:
        raise UsageError(
            f"{folder.name} was measured by commit {', '.join(map(str, commits))}, this is {commit}; "
            "start a new run (leave resume= out)"
        )
    waiting = _waiting(rows)
    stored = rows[~waiting].groupby("case_id")["arm"].agg(set)
    unfinished = set(rows[waiting]["case_id"])
    return {
        c.case.case_id
        for c in plan.cases
        if c.case.case_id not in unfinished and set(c.arms) <= stored.get(c.case.case_id, set())
    }


def stored_arms(folder: Path, plan: Plan, done: set[str]) -> set[tuple[str, str]]:
    """(case id, arm) of the runs of trial suites that a run holds of unfinished cases already, for resume=."""
    rows = store.read(folder)
    rows = rows[~_waiting(rows)]
    ours = {c.case.case_id for c in plan.cases if is_trial(c)} - done
    return {(i, arm) for i, arm in zip(rows["case_id"], rows["arm"], strict=True) if i in ours}


def _waiting(rows: pd.DataFrame) -> pd.Series[bool]:
    """The rows of what was not measured for a reason that may have passed."""
    return rows["reason"].str.startswith((BUDGET, LOST, DIED))
