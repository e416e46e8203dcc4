"""Unit: what is judged one by one. A unit is one metric of one arm of one case, with both sides' numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.gate.policy import Rule
    from harness.store.stats import Vector

Key = tuple[str, ...]
Table = dict[Key, list[Any]]  # the stored rows of each key, one a run
KEY = ("suite", "case_id", "arm", "metric", "regime", "part")
RATIO = "ratio"  # regime of units that are ratios of two arms of one run
LOSS = "loss"  # the metric by which training is judged: not its value, but what the loss verdict says
OPERATORS = "operator_calls"  # the fact that depends on the version of PyTorch
SHOWN = 6  # arms that a note names
EMPTY: Vector = np.empty(0)


@dataclass(slots=True)
class Unit:
    """One metric of one arm of one case on both sides.

    Attributes:
        first, second: log(candidate / baseline) by round of the first stage and of the confirmation, positive = worse.
        before, after: the two values, in `unit`.
        trouble: why there is nothing to compare, which is no pass; "" where there is.
        undecided: why there is nothing to compare, and the code need not be why.
        failed_twice: the whole arm failed in the baseline and gave nothing in the candidate either.
        excluded: why the policy lets these times decide nothing, though there are some.
        strayed: samples at a clock that is not their round's.
        rows: the stored rows (baseline's, candidate's), for whoever looks for the cause.
    """

    suite: str
    case_id: str
    case: str
    arm: str
    metric: str
    regime: str
    part: str
    unit: str
    better: str
    rule: Rule
    before: float = np.nan
    after: float = np.nan
    first: Vector = field(default_factory=lambda: EMPTY)
    second: Vector = field(default_factory=lambda: EMPTY)
    trouble: str = ""
    wrong: bool = False  # the candidate's check failed: its result is wrong, and not only absent
    invalid: bool = False  # a sample of the candidate is no time
    undecided: str = ""
    failed_twice: bool = False
    excluded: str = ""
    strayed: int = 0
    rows: tuple[Any, Any] = (None, None)
    members: tuple[str, ...] = ()  # of a group: the ids of its cases

    @property
    def cases(self) -> tuple[str, ...]:
        """Ids of the cases to measure for this unit."""
        return self.members or (self.case_id,)

    @property
    def key(self) -> Key:
        """Which rows of a store belong to this unit."""
        return (self.suite, self.case_id, self.arm, self.metric, self.regime, self.part)

    @property
    def is_sound_time(self) -> bool:
        """Whether it is judged by its rounds, and both sides have some."""
        return self.rule.rule == "timed" and not self.trouble and not self.undecided

    @property
    def fields(self) -> dict[str, str]:
        """What a policy's globs are matched against."""
        return {
            "suite": self.suite,
            "arm": self.arm,
            "metric": self.metric,
            "regime": self.regime,
            "part": self.part,
            "case": self.case,
        }

    @property
    def worse(self) -> float:
        """+1 where more is worse, -1 where less is."""
        return -1.0 if self.better == "higher" else 1.0


def arm_names(units: Sequence[Unit]) -> str:
    """The first arms of some units, and how many more there are."""
    arms = list(dict.fromkeys(f"{u.suite}/{u.arm}" for u in units))
    more = f" and {len(arms) - SHOWN} more arms" if len(arms) > SHOWN else ""
    return ", ".join(arms[:SHOWN]) + more


def facts_of(row: Any) -> Mapping[str, Any]:
    """What a stored row says really ran."""
    return parse(row.resolved)
