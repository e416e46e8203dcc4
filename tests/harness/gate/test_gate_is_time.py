"""Which findings count as verdicts on a time. Oracle: the policy's rule of the unit, and whether there are rounds."""

from __future__ import annotations

import pytest

from harness.gate.decide import Verdict
from harness.gate.judge import Finding
from harness.gate.judged_metric import Unit
from harness.gate.policy import Rule


@pytest.mark.parametrize(
    ("rule", "undecided", "is_time"),
    [
        ("timed", "no rounds on one side", True),
        ("timed", "", False),
        ("equal", "another torch", False),
        ("equal", "", False),
    ],
)
def test_a_finding_without_rounds_is_one_on_a_time_only_where_a_time_was_asked_for(
    rule: str, undecided: str, is_time: bool
) -> None:
    unit = Unit(
        "gemm", "c", "gemm[]", "bf16", "time_ms", "", "", "ms", "lower", Rule(rule), undecided=undecided
    )
    assert Finding(unit, Verdict.INCONCLUSIVE, "").is_time is is_time
