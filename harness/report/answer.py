"""An answer of a report: yes, partly, no or can't tell, in one sentence, with what it rests on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from harness.store import text
from harness.store.compare import TIMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.runs import Machine

Verdict = Literal["yes", "partly", "no", "can't tell"]
MOST_BRIEF = 90  # two lines of a third of the page


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its verdict in one sentence, and what the verdict rests on.

    Attributes:
        question: what a reader asks.
        verdict: one of `Verdict`.
        sentence: the verdict with its figures.
        evidence: what the sentence rests on, a line each.
        brief: the sentence in at most `MOST_BRIEF` characters, for the first screen.
    """

    question: str
    verdict: Verdict
    sentence: str
    evidence: tuple[str, ...] = ()
    brief: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "brief", text.short(self.brief or self.sentence, MOST_BRIEF))


def reasons(machine: Machine, most: int = 4) -> tuple[str, ...]:
    """Arms that did not run, by reason, the most frequent first."""
    frame = machine.frame
    bad = frame[(frame["status"] != "ok") & frame["metric"].isin(TIMES)]
    counts = Counter(zip(bad["status"], bad["suite"], bad["reason"], strict=True))
    lines = [
        f"{status}, {suite}, {text.plural(n, 'arm')}: {why}"
        for (status, suite, why), n in counts.most_common()
    ]
    return tuple(shortened(lines, most))


def shortened(lines: Sequence[str], most: int) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - most
    return [*lines[:most], *([f"and {more} more in the tables below"] if more > 0 else [])]
