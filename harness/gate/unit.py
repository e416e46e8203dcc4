"""Unit: what is judged one by one, one metric of one arm of one case on both sides, and what is found about it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.gate.decide import NOTHING, UnitVerdict

if TYPE_CHECKING:
    import datetime

    from harness.gate.decide import UnitDecision
    from harness.gate.options import Exit
    from harness.gate.policy import Allowance, MetricRule
    from harness.gate.sides import Mode, Side
    from harness.store.stats import Vector

RowPair = tuple[list[Any], list[Any]]  # stored rows of a unit: the baseline's, the candidate's
EMPTY: RowPair = ([], [])
RATIO = "ratio"  # regime of units that are ratios of two arms of one run


class UnitState(StrEnum):
    """What stands in the way of comparing a unit; `Unit.reason` says it in words."""

    SOUND = ""
    LOST = "lost"  # the candidate has no number
    WRONG = "wrong"  # the candidate's check refuted its result
    NO_TIME = "no time"  # a sample of the candidate is no time
    OPEN = "open"  # the code need not be why
    FAILED_TWICE = (
        "failed twice"  # the whole arm failed in the baseline and gave nothing in the candidate either
    )
    EXCLUDED = "excluded"  # there are times, and the policy lets them decide nothing


class UnitKey(NamedTuple):
    """Which rows of a store belong to a unit."""

    suite: str
    case_id: str
    arm: str
    metric: str
    regime: str
    part: str


class SlowdownCause(NamedTuple):
    """Why a unit became worse: one word and what speaks for it."""

    name: str
    evidence: str = ""


@dataclass(slots=True, eq=False)  # a unit is itself: arrays have no truth value
class Unit:
    """One metric of one arm of one case.

    Attributes:
        case: the case for people.
        before, after: the two values, in `unit`.
        first, second: log(candidate / baseline) by round of the first stage and of the confirmation, positive = worse.
        tick: by how much the step of the clock may move a ratio, as a logarithm.
        rows, again: the stored rows of the first stage and of the confirmation.
        verdict, reason: what is found.
        limit: the share that is tolerated of a time.
        allowed, expired: the policy's allowance.
        told_only: the policy has on_slower: warn.
        looks_slower: undecided, and what was measured speaks against it.
        in_doubt: open, as the figures themselves are odd or a median hides something.
    """

    key: UnitKey
    case: str
    unit: str
    better: str
    rule: MetricRule
    before: float = math.nan
    after: float = math.nan
    first: Vector = field(default_factory=lambda: np.empty(0))
    second: Vector = field(default_factory=lambda: np.empty(0))
    tick: float = 0.0
    rows: RowPair = EMPTY
    again: RowPair = EMPTY
    state: UnitState = UnitState.SOUND
    verdict: UnitVerdict = UnitVerdict.INCONCLUSIVE
    reason: str = ""
    decision: UnitDecision = NOTHING
    limit: float = 0.0
    cause: SlowdownCause | None = None
    allowed: Allowance | None = None
    expired: bool = False
    told_only: bool = False
    looks_slower: bool = False
    in_doubt: bool = False

    def set_aside(self, state: UnitState, why: str) -> None:
        """Notes what stands in the way."""
        self.state, self.reason = state, why

    def found(self, verdict: UnitVerdict, reason: str) -> None:
        """Notes what was found."""
        self.verdict, self.reason = verdict, reason

    @property
    def trouble(self) -> bool:
        """Whether the candidate gave nothing that can be compared, which is no pass."""
        return self.state in (UnitState.LOST, UnitState.WRONG, UnitState.NO_TIME)

    @property
    def is_open(self) -> bool:
        """Whether there is nothing to compare, and the code need not be why."""
        return self.state in (UnitState.OPEN, UnitState.FAILED_TWICE)

    @property
    def is_time(self) -> bool:
        """Whether the verdict is one on a time, also one that is undecided without it."""
        return self.rule.rule == "timed" and not self.trouble

    @property
    def is_sound_time(self) -> bool:
        """Whether it is judged by its rounds, and both sides have some."""
        return self.is_time and not self.is_open

    @property
    def fields(self) -> dict[str, str]:
        """What a policy's globs are matched against."""
        return {**self.key._asdict(), "case": self.case}

    @property
    def worse(self) -> float:
        """+1 where more is worse, -1 where less is."""
        return -1.0 if self.better == "higher" else 1.0

    @property
    def change(self) -> float:
        """The mean ratio after / before, above 1 = worse; NaN of what is not timed."""
        return math.exp(self.decision.effect.log)

    @property
    def low(self) -> float:
        """Lower end of the interval that decides."""
        return math.exp(self.decision.low)

    @property
    def high(self) -> float:
        """Upper end of the interval that decides."""
        return math.exp(self.decision.high)

    @property
    def rounds(self) -> int:
        """Number of rounds of both stages."""
        return self.decision.effect.rounds

    @property
    def flagged(self) -> bool:
        """Whether it has to be measured again before it is reported."""
        return self.decision.flagged and self.state is not UnitState.EXCLUDED

    @property
    def held(self) -> bool:
        """Whether the policy keeps it from the exit code."""
        return self.told_only or (self.allowed is not None and not self.expired)

    @property
    def counts(self) -> bool:
        """Whether a regression speaks through the exit code."""
        return self.verdict is UnitVerdict.REGRESSED and not self.held


@dataclass(frozen=True, slots=True)
class ControlCase:
    """What the control case says about the run."""

    moved: bool
    reason: str
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    rounds: int = 0


@dataclass(frozen=True)
class Judgement:
    """Everything that the gate found."""

    baseline: Side
    candidate: Side
    mode: Mode
    findings: tuple[Unit, ...]
    control: ControlCase
    notes: tuple[str, ...]
    code: Exit
    date: datetime.date
    could_not_judge: bool = False  # silence would read as approval

    @property
    def counted(self) -> Counter[str]:
        """How many units got each verdict."""
        return Counter(str(f.verdict) for f in self.findings)

    @property
    def to_confirm(self) -> tuple[str, ...]:
        """Ids of the cases that must be measured again before they are reported."""
        return tuple(sorted({f.key.case_id for f in self.findings if f.flagged}))

    @property
    def times(self) -> tuple[Unit, ...]:
        """Findings about times that speak through the exit code; none where only exact rules are judged."""
        if self.mode == "machine-free":
            return ()
        return tuple(f for f in self.findings if f.is_time and not f.told_only)

    @property
    def undecided(self) -> tuple[Unit, ...]:
        """Findings of `times` that are INCONCLUSIVE."""
        return tuple(f for f in self.times if f.verdict is UnitVerdict.INCONCLUSIVE)

    @property
    def suspects(self) -> tuple[Unit, ...]:
        """Findings whose silence would be approval: undecided, and they look slower or are in doubt; the slowest first."""
        found = (f for f in self.findings if (f.looks_slower or f.in_doubt) and not f.held)
        return tuple(sorted(found, key=lambda f: -f.change))
