"""The words of `python -m harness gate`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from harness.store.errors import UsageError
from harness.store.words import key, word


class Loud(str):
    """A note that must not be overlooked; the type says so, whatever its words are."""

    __slots__ = ()


class Exit(IntEnum):
    """Exit codes of the gate."""

    OK = 0
    REGRESSED = 1
    USAGE = 2
    INVALID = 3  # the environment differs, or the control case moved
    NUMERICS = 4
    NO_BASELINE = 5
    INCONCLUSIVE = 6  # too little of the times was decided, or anything open where on_inconclusive: fail
    INTERNAL = 7  # see harness.__main__


class GateError(UsageError):
    """The gate cannot judge; the message says why and what to do, `code` what the process returns."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


SWEEP = "sweep=gate"
COUNT = (1, 1_000_000)


@dataclass(slots=True)
class Options:
    """python -m harness gate: verdicts on a change: REGRESSED, OK, IMPROVED or INCONCLUSIVE, case by case
    exit: 0 ok, 1 regression, 2 usage, 3 invalid environment or control moved, 4 numerics, 5 baseline missing, 6 could not
    judge: too little of the times was decided, 7 internal error
    """

    words: list[str] = word("KEY=VALUE", f"what to measure ({SWEEP})", [])
    baseline: list[str] = key(
        "a stored run (folder, Parquet file or run id), or pytest-benchmark files of as many processes", []
    )
    candidate: list[str] = key("a stored run, or as many files, to be judged", [])
    against: str | None = key(
        "a git revision: measure this work tree and the commit where it left that one (their merge base), paired"
    )
    tip: bool = key("compare with the revision itself, not the merge base", False)
    command: str | None = key(
        "with --against, in any repository: a shell line that writes pytest-benchmark JSON to {out}, or, without {out}, "
        "whose wall time is judged"
    )
    setup: str | None = key("with --command: a shell line that is run once in each work tree before")
    unproven_tree: str | None = key(
        "with --command, where no Python process imports a file of its work tree (refuse)",
        choices=("refuse", "ok"),
    )
    accept_changed_benchmark: bool = key(
        "with --command: each side is judged by its own benchmark (default: both by the base commit's)", False
    )
    measure: bool = key("measure this work tree alone; judge by --baseline", False)
    machine_free: bool = key("judge no times but ratios, numerics and counts", False)
    policy: Path | None = key("YAML; the default documents its keys")
    pairs: int | None = key("rounds: pairs of fresh processes (policy: pairs)", span=COUNT)
    confirm_pairs: int | None = key("rounds of the confirmation (policy: confirm_pairs)", span=COUNT)
    blocks: int | None = key("blocks of each arm in a round (policy: blocks)", span=COUNT)
    budget_s: float | None = key(
        "seconds that measuring may take, 0: no limit (policy: budget_s)", span=(0, 1e9)
    )
    alone: bool = key("one process at a time: where two do not fit into the device's memory", False)
    even_if_equal: bool = key("measure though no measured file differs", False)
    json: Path | None = key("write the verdicts as JSON")
    markdown: Path | None = key("write them as markdown")
    junit: Path | None = key("write them as JUnit XML")
    comment: Path | None = key("write the body of a comment on a pull request")
    annotations: bool = key("print GitHub's ::error and ::warning lines too", False)
    results_dir: Path = key("where sessions are stored, and runs looked for (results)", Path("results"))
