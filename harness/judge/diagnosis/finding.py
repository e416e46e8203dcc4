"""Finding: one thing that is probably wrong, and the parsed rows that the checks look at."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.store.cause import known
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd

    from harness.judge.verdict import ArmVerdict
    from harness.judge.verdict.rows import Setup

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is probably wrong.

    Attributes:
        symptom: what is seen, in one sentence that names the arm.
        evidence: the figures that it rests on.
        cause: the likely reason.
        change: the command or the change that helps.
    """

    symptom: str
    evidence: tuple[str, ...]
    cause: str
    change: str


class Record:
    """One stored row with its JSON columns parsed."""

    def __init__(self, row: dict[str, Any]) -> None:
        (
            self.run_id,
            self.suite,
            self.case_id,
            self.arm,
            self.metric,
            self.baseline,
            self.part,
            self.reason,
        ) = (
            str(row.get(column) or "")
            for column in ("run_id", "suite", "case_id", "arm", "metric", "baseline", "part", "reason")
        )
        self.status, self.cause, self.samples = row["status"], known(row["cause"]), row["samples"]
        self.axes, self.resolved, self.env = (parse(row[column]) for column in ("axes", "resolved", "env"))
        name = str(self.resolved.get("recipe") or "")
        self.recipe = "" if name in ("none", "None") else name  # empty for an arm without FP8

    @property
    def setting(self) -> str:
        """The set-up that the row belongs to: its axes without the seed."""
        return json.dumps({k: v for k, v in self.axes.items() if k != "seed"}, sort_keys=True)


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """What the checks look at."""

    frame: pd.DataFrame
    records: Sequence[Record]
    setups: Sequence[Setup]
    verdicts: Sequence[ArmVerdict]
    ratios: pd.DataFrame | None = None  # of `harness.store.compare.paired_ratios`, where they are at hand


def gathered(lines: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Lines by the arm that they are about, in order."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for arm, line in lines:
        found[arm].append(line)
    return found


def few(items: Sequence[str], most: int = 3) -> tuple[str, ...]:
    """The first few items, each once, and how many more there are."""
    items = list(dict.fromkeys(items))
    more = len(items) - most
    return (*items[:most], *([f"and {more} more"] if more > 0 else []))


def gib(size: float) -> str:
    """A size in GiB, or MiB where it is small."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"
