"""Which part is started, and which is refused beforehand. Oracle: the promise of each key, by hand; Hydra's own parser."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.engine.parts import RESERVE_S, START_LEAST_S, Part, Progress, next_part, parts_of
from harness.store.errors import UsageError


@pytest.mark.parametrize(
    "value",
    [
        "it's", "a\\'b", "ends in \\", "C:\\new\\x", 'say "x"', "'", "\\", "a\\\\'", "[x", "a,b", "", ["it's", "b"],
    ],
)  # fmt: skip
def test_a_value_is_what_hydra_reads(value: object) -> None:
    (word,) = (w for w in Part("a", "cast", overrides={"data": value}).words() if w.startswith("data="))
    assert OverridesParser.create().parse_override(word).value() == value or _plain(word) == value


def _plain(word: str) -> list[object]:
    """A list without Hydra's marks of quotes."""
    value: Any = OverridesParser.create().parse_override(word).value()
    return [str(getattr(item, "text", item)) for item in value]


def started(parts: list[Part], left_s: float, had: tuple[str, ...] = ()) -> str | None:
    found = next_part(parts, {part.name: Progress() for part in parts}, left_s, had, {})
    return found[0].name if found else None


def test_a_part_without_an_estimate_is_not_started_with_seconds_left() -> None:
    """It would lose a try; as the first of a slot it has all the time that there is."""
    first, part = Part("first", "cast", estimate_s=1.0), Part("a", "cast")
    assert started([first, part], RESERVE_S + START_LEAST_S - 1, had=("first",)) is None
    assert started([first, part], RESERVE_S + START_LEAST_S, had=("first",)) == "a"
    assert started([part], RESERVE_S + 2) == "a"
    assert started([part], RESERVE_S) is None
    assert started([Part("a", "cast", budget_s=5.0)], RESERVE_S + START_LEAST_S, had=("first",)) == "a"


def config(**keys: Any) -> dict[str, Any]:
    part: dict[str, Any] = {
        "sweep": "cast", "suite": "???", "axes": {}, "shapes": [], "arms": [], "about": "", "overrides": {}, "small": {},
        "priority": 0, "estimate_s": None, "budget_s": None, "last_start_s": 0.0, "needs": [], "checked_by": [],
        "kernels": {}, "runs": {},
    }  # fmt: skip
    return {"parts": {"a": part | keys}, "overrides": {}, "small": {}}


@pytest.mark.parametrize("key", ["estimate_s", "budget_s", "last_start_s"])
@pytest.mark.parametrize("value", [-5.0, math.inf, math.nan])
def test_seconds_of_a_part_are_finite_and_not_below_0(key: str, value: float) -> None:
    with pytest.raises(
        UsageError, match=rf"parts\.a\.{key}={value:g}: expected a finite number of seconds from 0"
    ):
        parts_of(config(**{key: value}), ())
    assert parts_of(config(**{key: 0.0}), ())
