"""What resume= needs to know: what a run holds already, and what was left out for a reason that may have passed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness import store
from harness.advise.training import content
from harness.engine.run_folder import ANEW
from harness.store.differences import comparable
from harness.store.errors import UsageError
from harness.store.outside import parse
from harness.training.batches import corpus_of_case

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pandas as pd

    from harness.engine.plan import SweepPlan


def changes(folder: Path, conditions: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """What is no longer as it was when the rows of a run were made, in words; empty where all is.

    Args:
        folder: of the run.
        conditions: (env_id, environment) of every device that would continue the run.
    """
    rows = store.open_run(folder)
    ids, (_, now) = {env_id for env_id, _ in conditions}, conditions[0]
    found: list[str] = []
    for env_id, text in rows[["env_id", "env"]].drop_duplicates().itertuples(index=False):
        then = parse(text)
        found += _code_changes(then, now)
        if env_id in ids:
            continue
        fields = [f"{name} {old} -> {new}" for name, (old, new) in comparable(then, now).items()]
        found += fields or [f"environment {env_id} -> {conditions[0][0]}"]
    return list(dict.fromkeys(found))


def _code_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The code is its content where both know it (a commit may change no code, and code without a commit), else the commit.

    That of extensions is their content alone; rows from before it was stored do not tell.
    """
    if then.get("code") and now.get("code"):
        same = then["code"] == now["code"]
    else:
        same = then.get("git_commit") == now.get("git_commit")
    found = [] if same else [f"code of {_version(then)} -> {_version(now)}"]
    if "extensions" in then and then["extensions"] != now.get("extensions"):
        found.append(f"code of extensions {then['extensions']} -> {now.get('extensions')}")
    return found


def _version(env: Mapping[str, Any]) -> str:
    commit = str(env.get("git_commit"))[:12]
    return f"commit {commit}{' with uncommitted changes' if env.get('git_dirty') else ''}"


def refuse(run_id: str, changed: Sequence[str]) -> None:
    """Ends a resume= under other conditions than the run was made under.

    Raises:
        UsageError: something has changed; says what.
    """
    if changed:
        raise UsageError(
            f"{run_id} was measured under other conditions: {'; '.join(changed)}; {ANEW}, or add resume_anyway=true: the "
            "new rows then record what they were made with"
        )


def stored_cases(folder: Path, plan: SweepPlan) -> set[str]:
    """Ids of the cases of a plan that a run holds already with all of their arms, for resume=.

    Raises:
        UsageError: the run read another text; its numbers would not be comparable.
    """
    rows = store.open_run(folder)
    _refuse_other_inputs(folder.name, rows, plan)
    waiting = rows["retryable"]
    stored = rows[~waiting].groupby("case_id")["arm"].agg(set)
    unfinished = set(rows[waiting]["case_id"])
    return {
        c.case.case_id
        for c in plan.cases
        if c.case.case_id not in unfinished and set(c.arms) <= stored.get(c.case.case_id, set())
    }


def _refuse_other_inputs(run_id: str, rows: pd.DataFrame, plan: SweepPlan) -> None:
    """A text and ceilings go by a name, which leaves open what lies there: the sha256 in the rows says it."""
    of_case = rows.groupby("case_id")["resolved"].agg(set)
    for case in (c.case for c in plan.cases if c.case.case_id in of_case.index):
        axes, stored = dict(case.axes), of_case[case.case_id]
        if "data_path" in axes:
            text = corpus_of_case(case)
            now = text.sha256 if text is not None else None
            other = {str(sha) for r in stored if (sha := parse(r).get("data_sha256")) is not None} - {now}
            if other:
                raise UsageError(
                    f"{run_id} read a text with sha256 {min(other)[:16]}..., data={case['data']} is now "
                    f"one with {str(now)[:16]}...; give that text by data_path=FILE or {ANEW}"
                )
        advised = [r for r in stored if '"ceilings_sha256"' in str(r)]
        run = str(axes.get("ceilings") or "") if advised else ""
        now = content(run) if run else ""
        other = {parse(r)["advice"]["ceilings_sha256"] for r in advised} - {now}
        if other:
            then = ", ".join(f"{sha[:16]}..." if sha else "none" for sha in sorted(other))
            raise UsageError(
                f"{run_id} was advised by ceilings with sha256 {then}, now they are "
                f"{f'{now[:16]}...' if now else 'none'}; give those by ceilings=RUN or {ANEW}"
            )


def stored_arms(folder: Path, plan: SweepPlan, done: set[str]) -> set[tuple[str, str]]:
    """(case id, arm) of the runs of trial suites that a run holds of unfinished cases already, for resume=."""
    rows = store.open_run(folder)
    rows = rows[~rows["retryable"]]
    ours = {c.case.case_id for c in plan.cases if c.is_trial} - done
    return {(i, arm) for i, arm in zip(rows["case_id"], rows["arm"], strict=True) if i in ours}
