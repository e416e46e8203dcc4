"""The plan of a trial: which step runs in which precision, drawn by blocks. No torch; every rank draws the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from harness.store.effect import MIN_ROUNDS
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

BASE, AGAIN, FP8 = "base", "base:again", "fp8"
ARMS = (BASE, AGAIN, FP8)
# What a step is for: `warm` and `lead` are not timed; `compare` and `count` are the two steps of the proof; `none` counts
# the FP8 GEMMs of a bf16 step, of which there must be none.
Purpose = Literal["warm", "compare", "count", "none", "lead", "timed"]
# Each precision runs two untimed steps before it is looked at: the first compiles, the second shows that it is done
_BEFORE: dict[str, tuple[Purpose, ...]] = {
    BASE: ("warm", "warm", "none"),
    FP8: ("warm", "warm", "compare", "count"),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """What one step of the loop is for.

    Attributes:
        arm: one of `ARMS`.
        purpose: see `Purpose`.
        round: of the block; -1 before the first.
    """

    arm: str
    purpose: Purpose
    round: int = -1

    @property
    def is_fp8(self) -> bool:
        """Whether the step runs in FP8."""
        return self.arm == FP8


@dataclass(frozen=True, slots=True)
class Plan:
    """How the steps of a trial are dealt.

    Attributes:
        steps: of the loop that the trial may take, all in all.
        block: timed steps after each switch.
        lead: untimed steps after each switch.
        seed: of the order of the blocks in each round; the same on all ranks.

    Raises:
        UsageError: too few steps for an interval, or a count below its least.
    """

    steps: int = 200
    block: int = 4
    lead: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("block", 1), ("lead", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}={value!r}: expected an integer of at least {least}")
        if self.rounds < MIN_ROUNDS:
            before, each = len(self.preparation), self.per_round
            raise UsageError(
                f"steps={self.steps}: an interval needs {MIN_ROUNDS} rounds of {each} steps after {before} that warm up and "
                f"prove; give steps={before + MIN_ROUNDS * each} or more, about steps={before + 12 * each} for a narrow one"
            )

    @property
    def per_round(self) -> int:
        """Steps of a round: a block of each arm."""
        return len(ARMS) * (self.block + self.lead)

    @property
    def preparation(self) -> list[Turn]:
        """The steps before the first block: each precision warms up, then is proved."""
        return [Turn(arm, purpose) for arm, purposes in _BEFORE.items() for purpose in purposes]

    @property
    def rounds(self) -> int:
        """Whole rounds that fit."""
        return (self.steps - len(self.preparation)) // self.per_round

    def turns(self) -> Iterator[Turn]:
        """What each step is for, in order."""
        yield from self.preparation
        for index in range(self.rounds):
            for arm in self.order(index):
                yield from [Turn(arm, "lead", index)] * self.lead
                yield from [Turn(arm, "timed", index)] * self.block

    def order(self, index: int) -> tuple[str, ...]:
        """The arms of a round, in an order drawn for it alone."""
        return tuple(random.Random(f"{self.seed}/{index}").sample(ARMS, len(ARMS)))
