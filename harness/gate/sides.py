"""Sides: the two things that are compared, read from the store, and whether they may be compared at all.

A side is a run folder, or a folder of them. `gate --against` writes one folder a side with one run a stage
(`stage1`, `stage2` = the confirmation) and records in each `_run.json` the session in which both were measured:
only rounds of one session are pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness import store
from harness.gate.decide import FEWEST_TO_CLAIM
from harness.gate.options import Exit, GateError
from harness.store import run_state
from harness.store.differences import comparable, in_words
from harness.store.errors import UsageError
from harness.store.outside import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

Mode = Literal["paired", "stored", "machine-free", "broken"]  # broken: one side does not run
CONTROL_SUITE = "control"
FIRST, CONFIRMATION = 1, 2


@dataclass(frozen=True)
class Side:
    """One side: the rows of each stage and where they were measured."""

    name: str
    stages: dict[int, pd.DataFrame]
    env: dict[str, Any]
    env_id: str
    session: str = ""  # shared by the two sides that were measured together
    notes: tuple[str, ...] = ()
    runs: tuple[str, ...] = field(default=())
    looks: int = 1  # at the first stage, which what its rounds gave made longer
    alone: str = ""  # see `harness.gate.runner.Instrument`

    @property
    def first(self) -> pd.DataFrame:
        """The rows of the first stage."""
        return self.stages[FIRST]

    @property
    def fresh(self) -> bool:
        """Whether each round is a process of its own: a session of the gate, or pytest-benchmark files."""
        return bool(self.session) or bool(self.env.get("imported_from"))

    @property
    def commit(self) -> str:
        """The commit that was measured, shortened; "+" where the tree held changes."""
        sha = str(self.env.get("git_commit") or "unknown commit")[:10]
        return sha + ("+" if self.env.get("git_dirty") else "")


def load_side(name: str | Path, role: Literal["baseline", "candidate"], results_dir: str | Path) -> Side:
    """Reads one side.

    Raises:
        GateError: no such run (a baseline: exit 5, a candidate: 2), no rows in it, a file that can't be read, or rows of
            several environments (3).
    """
    absent = Exit.NO_BASELINE if role == "baseline" else Exit.USAGE
    try:
        path = store.find_run(name, results_dir)
    except UsageError as error:
        raise GateError(absent, f"{role}: {error}") from error
    frame, notes = store.open_run(path), list[str]()
    if frame.attrs["problems"]:
        raise GateError(Exit.USAGE, f"{role}: cannot read {frame.attrs['problems'][0]}; measure it again")
    if frame.empty:
        raise GateError(absent, f"{role}: no rows in {path}; measure first: python -m harness sweep=NAME")
    by_id = frame.drop_duplicates("env_id").sort_values("env_id")
    envs = dict(zip(by_id["env_id"], map(parse, by_id["env"]), strict=True))
    if len(envs) > 1:
        fields = differing_fields(*list(envs.values())[:2])
        raise GateError(Exit.INVALID, f"{role}: rows of several environments ({fields}); name one run")
    ((env_id, env),) = envs.items()
    stage_of, sessions, files, looks, alone = {}, set(), 0, 1, ""
    for folder in {Path(file).parent for file in frame.attrs["files"]}:
        about = store.read_about(folder)
        gate = about.get("gate") or {}
        files += run_state.made_by(about) == "import"
        stage_of[str(about.get("run_id", ""))] = int(gate.get("stage", FIRST))
        sessions.add(str(gate.get("session", "")))
        looks = max(looks, int(gate.get("looks", 1)))
        alone = alone or str(gate.get("alone", ""))
        planned = int(gate.get("pairs", 0))
        done = int(gate.get("rounds", planned))
        if role == "candidate" and done < planned:
            notes.append(
                f"the time allowed held {done} of {planned} rounds of stage {gate['stage']}; --budget-s gives more"
            )
    if 0 < files < FEWEST_TO_CLAIM:
        notes.append(
            f"{role}: files of {files} processes, each of which is one round; {FEWEST_TO_CLAIM} a side can decide"
        )
    by_stage = frame.groupby(frame["run_id"].map(lambda run: stage_of.get(run, FIRST)))
    stages = {int(number): rows.reset_index(drop=True) for number, rows in by_stage}
    if FIRST not in stages:
        raise GateError(Exit.USAGE, f"{role}: {path} holds a confirmation without its first stage")
    return Side(
        name=str(name),
        stages=stages,
        env=dict(env),
        env_id=env_id,
        session=sessions.pop() if len(sessions) == 1 else "",
        notes=tuple(notes),
        runs=tuple(sorted(frame["run_id"].dropna().unique())),
        looks=looks,
        alone=alone,
    )


def refuse_one_run(baseline: Side, candidate: Side) -> None:
    """Refuses a run that stands on both sides, be it a copy under another name: whatever it holds, it would pass.

    Raises:
        GateError: they share a run (exit 2).
    """
    if both := sorted({run for run in baseline.runs if run} & set(candidate.runs)):
        raise GateError(
            Exit.USAGE,
            f"--baseline {baseline.name} and --candidate {candidate.name} hold the same run {both[0]}, which would pass whatever "
            "it holds; measure the candidate: python -m harness sweep=NAME",
        )


def mode_of(baseline: Side, candidate: Side, *, machine_free: bool) -> Mode:
    """How two sides may be compared.

    Raises:
        GateError: times are to be judged and the environments differ (exit 3); the fields are named.
    """
    if machine_free:
        return "machine-free"
    if baseline.env_id != candidate.env_id:
        raise GateError(
            Exit.INVALID,
            f"the environments differ ({differing_fields(baseline.env, candidate.env)}), so their times cannot be "
            "compared; measure both here with --against GIT_REV, or judge what no machine changes with "
            "--machine-free",
        )
    return "paired" if baseline.session and baseline.session == candidate.session else "stored"


def same_class(baseline: Side, candidate: Side) -> bool:
    """Whether ratios of the two may be set side by side: one kind of device at one power limit."""
    kind = ("device", "gpu", "power_limit_w", "cpu", "isa")
    fields = kind[:3] if baseline.env.get("device") == "cuda" else kind
    return all(baseline.env.get(name) == candidate.env.get(name) for name in fields)


def differing_fields(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The fields of the fingerprint in which two environments differ: "driver: 570.1 != 575.3"."""
    return in_words(comparable(one, other)) or "of unknown fields"
