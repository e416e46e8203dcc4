"""What happens to a case or run, as the executor tells it: where it begins and ends, its stages, its steps."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


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


class Steps(NamedTuple):
    """How far a run is."""

    done: int
    total: int


class Mark(StrEnum):
    """Where a case or run begins, and where its rows are stored."""

    BEGUN = "begun"
    ENDED = "ended"


class Frame(NamedTuple):
    """What there is to show.

    Attributes:
        where: unit and case.
        stage: and arm, or step, that is under way; "" where none has begun.
        share: of the units that is done, counting parts of one.
        elapsed_s: seconds since the first unit could begin.
        left_s: seconds that the rest takes; None where nothing says how long.
    """

    where: str
    stage: str
    share: float
    elapsed_s: float
    left_s: float | None = None

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.where}: {self.stage}" if self.where and self.stage else self.where
