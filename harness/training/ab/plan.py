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
GATHER = "fp8:gather"  # FP8 whose weights FSDP2 gathers as codes, where `FP8` gathers them in high precision
ARMS = (BASE, AGAIN, FP8)
WITH_GATHER = (*ARMS, GATHER)
# What a step is for: `warm` and `lead` are not timed; `compare` and `count` are the two steps of the proof; `none` counts
# the FP8 GEMMs of a bf16 step, of which there must be none.
Purpose = Literal["warm", "compare", "count", "none", "lead", "timed"]
_COMPILING = 2  # untimed steps in each precision before the first block: the first compiles, the second shows that it is done


@dataclass(frozen=True, slots=True)
class Turn:
    """What one step of the loop is for.

    Attributes:
        arm: one of `WITH_GATHER`.
        purpose: see `Purpose`.
        round: of the block; -1 before the first.
        closes: it is the last step of a round.
    """

    arm: str
    purpose: Purpose
    round: int = -1
    closes: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether the step runs in FP8."""
        return self.arm in (FP8, GATHER)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the steps of a trial are dealt.

    Attributes:
        steps: of the loop that the trial may take, all in all.
        block: timed steps after each switch.
        lead: untimed steps after each switch.
        seed: of the order of the blocks in each round; the same on all ranks.
        arms: that each round has a block of.

    Raises:
        UsageError: too few steps for an interval, or a count below its least.
    """

    steps: int = 200
    block: int = 4
    lead: int = 1
    seed: int = 0
    arms: tuple[str, ...] = ARMS

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("block", 1), ("lead", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}={value!r}: expected an integer of at least {least}")
        if self.rounds < MIN_ROUNDS:
            least = self.before + MIN_ROUNDS * self.per_round
            raise UsageError(
                f"steps={self.steps}: an interval needs {MIN_ROUNDS} rounds of {self.per_round} steps after {self.before} "
                f"that warm up and prove; give steps={least} or more, about steps={self.before + 12 * self.per_round} for "
                "a narrow one"
            )

    @property
    def per_round(self) -> int:
        """Steps of a round: a block of each arm."""
        return len(self.arms) * (self.block + self.lead)

    @property
    def before(self) -> int:
        """Steps before the first block."""
        return len(self.preparation)

    @property
    def preparation(self) -> tuple[Turn, ...]:
        """The steps before the first block: each precision warms up, then is proved."""
        before = [Turn(BASE, "warm")] * _COMPILING + [Turn(BASE, "none")]
        for arm in self.arms:
            if Turn(arm, "warm").is_fp8:
                before += [Turn(arm, "warm")] * _COMPILING + [Turn(arm, "compare"), Turn(arm, "count")]
        return tuple(before)

    @property
    def rounds(self) -> int:
        """Whole rounds that fit."""
        return (self.steps - self.before) // self.per_round

    def turns(self) -> Iterator[Turn]:
        """What each step is for, in order."""
        yield from self.preparation
        for index in range(self.rounds):
            arms = self.order(index)
            for arm in arms:
                for _ in range(self.lead):
                    yield Turn(arm, "lead", index)
                for i in range(self.block):
                    yield Turn(arm, "timed", index, closes=arm == arms[-1] and i == self.block - 1)

    def order(self, index: int) -> tuple[str, ...]:
        """The arms of a round, in an order drawn for it alone."""
        return tuple(random.Random(f"{self.seed}/{index}").sample(self.arms, len(self.arms)))
