"""The plan of a trial. Oracles: counts by hand; every rank draws the same; each arm is as often first as another."""

from __future__ import annotations

from typing import Any

import pytest

from harness.store.errors import UsageError
from harness.training.ab.result import Plan


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": 51}, "steps=51: an interval needs 3 rounds of 15 steps after 7 .* give steps=52 or more"),
        ({"steps": 200.0}, "steps=200.0: expected an integer"),
        ({"block": 0}, "block=0: expected an integer of at least 1"),
        ({"lead": -1}, "lead=-1: expected an integer of at least 0"),
        ({"seed": "a"}, "seed='a': expected an integer"),
    ],
)
def test_a_plan_that_can_give_no_interval_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Plan(**arguments)
