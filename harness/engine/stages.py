"""Stages of the work on a case, and what each costs: the time left follows from the costs seen so far."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from harness.store.arm import parse

REMEMBERED = (
    8  # last costs of a kind that count: the first compilation of a process is dearer than later ones
)
LATE = 0.25  # what lasts longer than expected is taken to last so much of its age on


class StageKind(StrEnum):
    """What is done with a case, in the words that people see."""

    BUILD = "building"
    COMPILE = "compiling"
    CHECK = "checking"
    WARM_UP = "warming up"
    TIME = "timing"
    SUSTAIN = "timing under load"


class Stage(NamedTuple):
    """What is under way.

    Attributes:
        kind: of the work.
        arm: that it is for; "" where it is for all arms of the case.
    """

    kind: StageKind
    arm: str = ""

    def __str__(self) -> str:
        """Print the words and the arm.

        >>> str(Stage(StageKind.COMPILE, "rowwise_compile"))
        'compiling rowwise_compile'
        """
        return f"{self.kind} {self.arm}".strip()


class Frame(NamedTuple):
    """What there is to show.

    Attributes:
        where: unit and case.
        stage: and arm, or step, that is under way; "" where none has begun.
        share: of the units that is done, counting parts of one.
        elapsed_s: seconds since the first unit could begin.
        left_s: seconds that are left by the costs so far.
    """

    where: str
    stage: str
    share: float
    elapsed_s: float
    left_s: float

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.where}: {self.stage}" if self.where and self.stage else self.where

    @property
    def bar(self) -> float:
        """Share of the time that is over."""
        whole = self.elapsed_s + self.left_s
        return self.elapsed_s / whole if whole > 0 else 1.0


class Work(StrEnum):
    """Work that has a cost of its own."""

    READY = "ready"  # one arm built, compiled and checked
    TIME = "time"  # one arm's share of warm-up and rounds
    RUN = "run"  # one run of a trial suite


# Seconds before anything is known: `sweep=quick` on two CPU cores. The first stages that end replace them.
_FIRST_S = {
    (Work.READY, False): 0.3,
    (Work.READY, True): 6.0,
    (Work.RUN, False): 5.0,
    (Work.RUN, True): 15.0,
}


class Item(NamedTuple):
    """A kind of work: costs within one are alike."""

    suite: str
    work: Work
    is_compiled: bool = False


def item_of(suite: str, work: Work, arm: str) -> Item:
    """The kind of the work on an arm.

    >>> item_of("linear", Work.READY, "rowwise_compile").is_compiled
    True
    """
    return Item(suite, work, parse(arm).mode in ("compile", "linears"))


class Costs:
    """Seconds by kind of work, learned while a sweep runs.

    Args:
        time_s: that the settings allow for timing one arm; counts until a case has been timed.
    """

    def __init__(self, time_s: float) -> None:
        self._time_s = time_s
        self._seen: dict[Item, deque[float]] = {}

    def learn(self, item: Item, seconds: float) -> None:
        """Take in what one piece of work took."""
        self._seen.setdefault(item, deque(maxlen=REMEMBERED)).append(seconds)

    def expected(self, item: Item) -> float:
        """Seconds that one piece will take: the mean of its kind, else of that work in other suites, else a first guess."""
        seen = self._seen.get(item) or [
            seconds
            for other, costs in self._seen.items()
            if other.work == item.work and other.is_compiled == item.is_compiled
            for seconds in costs
        ]
        if seen:
            return sum(seen) / len(seen)
        return self._time_s if item.work is Work.TIME else _FIRST_S[item.work, item.is_compiled]
