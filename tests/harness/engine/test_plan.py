"""Oracle: the contract of the command line - what is refused, in which words, before anything is measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
from toy import ToySuite

from harness.engine.plan import SweepPlan, make_plan
from harness.engine.settings import SweepConfig
from harness.store.errors import UsageError
from harness.timing.workload import Axis


def config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "toy",
        "suite": "toy",
        "axes": {"n": [1, 2]},
        "shapes": [],
        "arms": [],
        "parts": {},
        "model": None,
        "seed": 0,
        "device": "cpu",
    }
    if changes.get("parts") and "suite" not in changes:
        base["suite"] = None  # as composed: a sweep of parts names no suite of its own
    return base | changes


def plan(toy: ToySuite | None = None, /, **changes: Any) -> SweepPlan:
    return make_plan(SweepConfig.of(config(**changes)), {"toy": toy or ToySuite(), "toy2": ToySuite()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": {"m": [1]}}, r"unknown axis 'm'.*known: K, kind, n"),
        ({"axes": {"n": [0]}}, r"axes.n=0: expected an integer of at least 1 \(a size\)"),
        ({"axes": {"n": [1.5]}}, r"axes.n=1.5: expected an integer"),
        ({"axes": {"n": [True]}}, r"axes.n=True: expected an integer"),
        ({"axes": {"n": "many"}}, r"axes.n='many': expected an integer"),
        ({"axes": {"n": []}}, r"axes.n is empty"),
        ({"axes": {"n": [1], "kind": ["c"]}}, r"axes.kind='c': expected one of a, b"),
        ({"arms": ["bas"]}, r"unknown arm 'bas' \(nearest: base\)"),
        ({"suite": "tot"}, r"unknown suite 'tot' \(nearest: toy\)"),
        ({"cases": ["abc"]}, "no case 'abc' in this sweep"),
        ({"suite": None}, "names neither a suite nor parts"),
        ({"shapes": ["lots"]}, "part toy: unknown shape set 'lots'; known: few"),
        ({"axes": {"n": [1], "K": [100]}}, r"arm other: K=100 is not a multiple of 16; use K=96 or K=112"),
        ({"parts": {"p": {"suite": "???", "axes": {}, "shapes": [], "arms": []}}}, "unknown part 'p'"),
    ],
)
def test_what_is_refused_and_in_which_words(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(**changes)


@pytest.mark.parametrize(
    ("axis", "good", "bad", "message"),
    [
        (Axis("a rate", kind="float", minimum=0), [0, 1e-3], [-1e-9, math.nan, math.inf, "1e-3", True],
         "expected a number of at least 0 "),
        (Axis("a name", kind="str"), ["", "nano"], [1, None, True], "expected a text "),
        (Axis("a count from 0", minimum=0), [0, 7], [-1, 1.0], "expected an integer of at least 0 "),
        (Axis("a batch", words=("max",)), [1, "max"], [0, "most"], r"expected an integer of at least 1, or max \("),
    ],
)  # fmt: skip
def test_axes_of_numbers_and_texts(axis: Axis, good: list[Any], bad: list[Any], message: str) -> None:
    toy = ToySuite()
    toy.AXES = {**toy.AXES, "x": axis}
    assert [c.case["x"] for c in plan(toy, axes={"n": [1], "x": good}).cases] == good
    for value in bad:
        with pytest.raises(UsageError, match=message):
            plan(toy, axes={"n": [1], "x": [value]})


def parts(**changes: Any) -> dict[str, Any]:
    part = {"suite": "toy", "axes": {"n": [1]}, "shapes": [], "arms": []}
    return {"one": part, "two": {**part, "suite": "toy2"}} | changes


def test_sweep_wide_axes_reach_the_parts_that_know_them() -> None:
    made = plan(parts=parts(), axes={"n": [5]})
    assert [(c.part, c.case["n"]) for c in made.cases] == [("one", 5), ("two", 5)]


@pytest.mark.parametrize("key", ["suite", "shapes"])
def test_what_belongs_to_one_part_is_refused_for_the_whole_sweep(key: str) -> None:
    with pytest.raises(UsageError, match=rf"is made of parts; write parts.one.{key}="):
        plan(**{"suite": None, "parts": parts(), "axes": {}, key: "toy"})


def test_headline_cases_are_those_with_the_most_work() -> None:
    made = plan(axes={"n": [3, 9, 1, 7]})
    by_id = {c.case.case_id: c.case["n"] for c in made.cases}
    assert {by_id[i] for i in made.headline(2)} == {9, 7}
    assert made.headline(0) == set()
