"""What resume= needs to know: what a run holds already, and what was left out for a reason that may have passed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from harness import store
from harness.errors import UsageError
from harness.rows import is_trial
from harness.training.batches import text_of
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
        UsageError: the run was made in another environment, by other code or from another text; its numbers would
            not be comparable.
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
    _refuse_another_text(folder.name, rows, plan)
    waiting = _waiting(rows)
    stored = rows[~waiting].groupby("case_id")["arm"].agg(set)
    unfinished = set(rows[waiting]["case_id"])
    return {
        c.case.case_id
        for c in plan.cases
        if c.case.case_id not in unfinished and set(c.arms) <= stored.get(c.case.case_id, set())
    }


def _refuse_another_text(run_id: str, rows: pd.DataFrame, plan: Plan) -> None:
    """A text goes by the name of its kind, which leaves open what lies at data_path: the sha256 in the rows says it."""
    of_case = rows.groupby("case_id")["resolved"].agg(set)
    for case in (c.case for c in plan.cases if c.case.case_id in of_case.index):
        if "data_path" not in dict(case.axes):
            continue
        stored = {json.loads(r or "{}").get("data_sha256") for r in of_case[case.case_id]} - {None}
        text = text_of(case)
        now = text.sha256 if text is not None else None
        if stored - {now}:
            raise UsageError(
                f"{run_id} read a text with sha256 {sorted(stored - {now})[0][:16]}..., data={case['data']} is now "
                f"one with {str(now)[:16]}...; give that text by data_path=FILE or start a new run (leave resume= out)"
            )


def stored_arms(folder: Path, plan: Plan, done: set[str]) -> set[tuple[str, str]]:
    """(case id, arm) of the runs of trial suites that a run holds of unfinished cases already, for resume=."""
    rows = store.read(folder)
    rows = rows[~_waiting(rows)]
    ours = {c.case.case_id for c in plan.cases if is_trial(c)} - done
    return {(i, arm) for i, arm in zip(rows["case_id"], rows["arm"], strict=True) if i in ours}


def _waiting(rows: pd.DataFrame) -> pd.Series[bool]:
    """The rows of what was not measured for a reason that may have passed."""
    return rows["reason"].str.startswith((BUDGET, LOST, DIED))
