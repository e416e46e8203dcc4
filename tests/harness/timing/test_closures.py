"""`harness.measure` on a clock that moves only when told to. Oracle: the planted times."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from fakes import FakeTime

import harness
from harness.store.errors import UsageError
from harness.timing.config import TimingConfig
from harness.timing.timers import CpuTimer

QUICK = TimingConfig(warmup_min_seconds=0.0, warmup_max_seconds=0.01, min_seconds=0.0, max_seconds=0.5)


class Work:
    """Functions that take a planted time and return a value."""

    def __init__(self) -> None:
        self.time = FakeTime()
        self.calls = 0

    def taking(self, ms: float, value: object = 1.0, noise: float = 0.0) -> Callable[[], object]:
        def run() -> object:
            self.calls += 1
            self.time.sleep(1e-3 * ms * (1 + noise * math.sin(7.0 * self.calls)))
            return value

        return run

    def measured(self, closures: Any, **arguments: Any) -> Any:
        return harness.measure(
            closures, device="cpu", timer=CpuTimer(self.time), timing=QUICK, rounds=10, **arguments
        )


def test_the_planted_ratio_with_its_interval() -> None:
    work = Work()
    found = work.measured({"slow": work.taking(2.0, noise=0.01), "fast": work.taking(1.0, noise=0.01)})
    effect = found["fast"]
    assert effect.speedup == pytest.approx(2.0, rel=0.01)
    assert effect.direction == "faster"
    assert effect.rounds == 10
    assert -effect.log_high <= math.log(2) <= -effect.log_low
    assert 1.0 <= found.floor < 1.02


def test_a_wrong_result_has_no_ratio() -> None:
    work = Work()
    closures = {"right": work.taking(1.0), "wrong": work.taking(0.1, value=2.0), "too": work.taking(0.5)}
    found = work.measured(closures, check=lambda a, b: a == b)
    with pytest.raises(ValueError, match="its result is not that of right"):
        found["wrong"]
    assert found["too"].direction == "faster"
    frame = found.to_frame()
    assert frame.loc["wrong", "verdict"] == "refused"
    assert math.isnan(frame.loc["wrong", "speedup"])
    assert frame.loc["too", "speedup"] == pytest.approx(2.0)
    assert "<table" in found._repr_html_()
    raised = work.measured({"a": work.taking(1.0), "b": work.taking(1.0)}, check=lambda a, b: 1 / 0)
    with pytest.raises(ValueError, match="its check raised ZeroDivisionError"):
        raised["b"]


def test_results_in_one_buffer_are_not_compared_with_themselves() -> None:
    work, buffer = Work(), [0.0]

    def writes(value: float) -> Callable[[], object]:
        def run() -> object:
            work.time.sleep(1e-3)
            buffer[0] = value
            return buffer

        return run

    found = work.measured({"a": writes(1.0), "b": writes(2.0)}, check=lambda a, b: a == b)
    assert list(found.wrong) == ["b"]


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_function_that_raises_has_no_ratio_and_the_other_goes_on(name: str) -> None:
    work = Work()

    def broken() -> None:
        raise RuntimeError("planted")

    found = work.measured({"a": work.taking(1.0), "b": work.taking(1.0)} | {name: broken})
    with pytest.raises(ValueError, match="planted"):
        found["b"]
    assert "planted" in str(found)


@pytest.mark.parametrize(
    ("closures", "arguments", "words"),
    [
        ({"a": print}, {}, "expected two functions or more"),
        ({"a": print, "b": 3}, {}, "expected two functions or more"),
        ({"a": print, "b": print}, {"rounds": 2}, "rounds=2"),
        ({"a": print, "b": print}, {"device": "tpu"}, "device='tpu'"),
    ],
)
def test_bad_input_is_a_line(closures: Any, arguments: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        harness.measure(closures, **arguments)
