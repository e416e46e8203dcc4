"""The plan of a trial. Oracles: counts by hand; every rank draws the same; each arm is as often first as another."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from harness.store.errors import UsageError
from harness.training.ab.plan import ARMS, FP8, Plan


def test_the_default_of_200_steps_is_12_rounds() -> None:
    plan = Plan()
    assert (plan.before, plan.per_round, plan.rounds) == (7, 15, 12)
    turns = list(plan.turns())
    assert len(turns) == 7 + 12 * 15
    assert Counter(t.purpose for t in turns)["timed"] == 12 * 3 * 4
    assert sum(t.closes for t in turns) == 12
    assert turns[-1].closes


def test_both_precisions_are_warm_and_proved_before_the_first_block() -> None:
    before = [(t.is_fp8, t.purpose) for t in Plan().turns() if t.round < 0]
    assert before == [
        *[(False, "warm")] * 2,
        (False, "none"),
        *[(True, "warm")] * 2,
        (True, "compare"),
        (True, "count"),
    ]


def test_each_switch_is_followed_by_untimed_steps() -> None:
    plan = Plan(steps=300, block=5, lead=2)
    turns = [t for t in plan.turns() if t.round >= 0]
    for start in range(0, len(turns), 7):
        block = turns[start : start + 7]
        assert [t.purpose for t in block] == ["lead"] * 2 + ["timed"] * 5
        assert len({(t.arm, t.round) for t in block}) == 1


def test_every_rank_draws_the_same_and_each_arm_leads_as_often() -> None:
    assert list(Plan(seed=3).turns()) == list(Plan(seed=3).turns())
    assert list(Plan(seed=3).turns()) != list(Plan(seed=4).turns())
    firsts = Counter(Plan(steps=10**6, seed=1).order(i)[0] for i in range(3000))
    assert all(abs(firsts[arm] - 1000) < 120 for arm in ARMS)  # over 4 standard deviations of a fair draw
    assert FP8 in firsts


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
