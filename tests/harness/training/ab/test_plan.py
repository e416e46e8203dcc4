"""The plan of a trial. Oracles: counts by hand; every rank draws the same; each arm is as often first as another."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from harness.store.errors import UsageError
from harness.training.ab.result import ARMS, TrialPlan


@pytest.mark.parametrize(
    ("plan", "before", "per_round", "rounds"),
    [
        (TrialPlan(), "bwbwbnfwfwfcfc", 15, 12),
        (TrialPlan(steps=300, block=5, lead=2), "bwbwbnfwfwfcfc", 21, 13),
    ],
)
def test_a_plan_by_hand(plan: TrialPlan, before: str, per_round: int, rounds: int) -> None:
    """Both precisions are warm and proved before the first block; each switch is followed by untimed steps."""
    turns = list(plan.turns())
    start = [turn for turn in turns if turn.round < 0]
    assert "".join(turn.arm[0] + turn.purpose[0] for turn in start) == before
    assert (plan.per_round, plan.rounds) == (per_round, rounds)
    steps = plan.lead + plan.block
    blocks = [turns[i : i + steps] for i in range(len(start), len(turns), steps)]
    for block in blocks:
        assert [turn.purpose for turn in block] == ["lead"] * plan.lead + ["timed"] * plan.block
        assert len({(turn.arm, turn.round) for turn in block}) == 1
    assert Counter((block[0].arm, block[0].round) for block in blocks) == Counter(
        (arm, index) for arm in ARMS for index in range(rounds)
    )


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
        TrialPlan(**arguments)
