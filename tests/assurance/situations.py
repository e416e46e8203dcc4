"""A situation in which a positive word would be false: how it is planted, what must not be said, and its honest twin.

Planting is one function with a switch, so that the twin differs by the planted thing alone. Answers are data of the public
function or command (a field, a class, an exit code), never prose.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Place(NamedTuple):
    """Where a situation is planted.

    Attributes:
        folder: empty.
        patch: undone after the situation.
        capture: of what is printed.
    """

    folder: Path
    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]


Run = Callable[[Place, bool], object] if TYPE_CHECKING else object


@dataclass(frozen=True)
class Situation:
    """One line of docs/assurance.md.

    Attributes:
        name: of the function that plants it.
        command: whose word it is.
        what: is the case.
        word: that would be false, as the field or code that says it.
        positive: its value, which the twin gives.
        instead: the value that is given.
        run: answers with the planted thing, or without it.
    """

    name: str
    command: str
    what: str
    word: str
    positive: object
    instead: object
    run: Run


SITUATIONS: list[Situation] = []


def situation(
    command: str, what: str, *, word: str, positive: object, instead: object
) -> Callable[[Run], Run]:
    """Registers a function as a situation."""

    def register(run: Run) -> Run:
        SITUATIONS.append(Situation(run.__name__, command, what, word, positive, instead, run))
        return run

    return register


exit_code = partial(situation, word="exit code", positive=0)
