"""Oracle: the row contract, and the standard library's json and statistics."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest

from harness.store.measurement import METRICS, Measurement, by_name, to_json


def row(**changes: Any) -> Measurement:
    base: dict[str, Any] = {
        "suite": "s",
        "case_id": "0",
        "arm": "a",
        "axes": "{}",
        "metric": "time_ms",
        "status": "ok",
        "samples": (3.0, 1.0, 2.0),
    }
    return Measurement(**(base | changes))


def test_value_is_the_median_of_all_samples() -> None:
    samples = (5.0, 1.0, 100.0, 2.0)
    assert row(samples=samples).value == statistics.median(samples)


def test_value_of_a_series_is_its_last_sample() -> None:
    assert row(metric="loss", samples=(5.0, 1.0, 100.0, 2.0), rounds=(0, 1, 2, 3)).value == 2.0
    assert row(metric="sqnr_db", samples=(28.5,)).value == 28.5


def test_a_row_carries_unit_and_direction_of_its_metric() -> None:
    made = row().as_row()
    assert (made["unit"], made["better"]) == ("ms", "lower")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": ()}, "needs at least one sample"),
        ({"status": "failed", "samples": ()}, "needs a reason"),
        ({"status": "failed", "reason": "why"}, "no samples"),
        ({"status": "skipped", "reason": "", "samples": ()}, "needs a reason"),
        ({"samples": (1.0, math.nan)}, "NaN is no measurement"),
        ({"metric": "speed"}, "unknown metric 'speed'"),
        ({"rounds": (0, 1)}, "2 rounds for 3 samples"),
    ],
)
def test_a_contradictory_row_cannot_be_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row(**changes)


def test_json_without_the_infinities_that_json_lacks() -> None:
    text = to_json({"b": [math.inf, -math.inf, math.nan], "a": 1})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": 1, "b": ["inf", "-inf", "nan"]}
    assert text.startswith('{"a"')


def test_every_metric_is_filed_under_its_own_name() -> None:
    assert all(name == metric.name and metric.meaning for name, metric in METRICS.items())


def test_a_metric_has_one_meaning() -> None:
    """A merge once left five literals twice, which a dict swallows."""
    metrics = list(METRICS.values())
    assert by_name(metrics) == METRICS
    with pytest.raises(ValueError, match="metric 'time_ms' is defined twice"):
        by_name([*metrics, metrics[0]])
