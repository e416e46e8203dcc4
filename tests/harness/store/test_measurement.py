"""Oracle: the row contract, and the standard library's json and statistics."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8core import convert_to_float8_training, verify
from harness.store import measurement
from harness.store.errors import DEFAULT, RETRYABLE, Cause
from harness.store.measurement import METRICS, Measurement, ProofOutcome, proof_outcome
from harness.training.steps import cause_of_fault, facts_of


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


def test_a_metric_has_one_meaning() -> None:
    """A merge once left five entries twice, of which a mapping keeps the last."""
    lines = (Path(measurement.__file__).parent / "metrics.yaml").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines if not line.startswith("#")] == list(METRICS)


def test_a_row_says_its_cause_and_whether_it_may_have_passed() -> None:
    assert row().as_row()["schema_version"] == 4
    failed = {"status": "failed", "reason": "why", "samples": ()}
    for status, cause in DEFAULT.items():
        samples = (1.0,) if status in ("ok", "partial") else ()
        made = row(status=status, reason="" if status == "ok" else "why", samples=samples)
        assert made.as_row()["cause"] == str(cause)
        assert made.as_row()["retryable"] is (status == "partial")
    for cause in Cause:
        if cause:
            assert row(**failed, cause=cause).retryable is (cause in RETRYABLE)
    with pytest.raises(ValueError, match="'ok' with the cause oom"):
        row(cause=Cause.OOM)
    with pytest.raises(ValueError, match="'heat' is not a valid Cause"):
        row(**failed, cause="heat")


def test_a_proof_is_stored_by_what_it_found() -> None:
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16))
    model = convert_to_float8_training(layers, module_filter_fn=lambda _, fqn: fqn != "2")
    proof = verify(lambda: model(torch.randn(16, 32)).sum().backward(), model, announce=False)
    incomplete = dataclasses.replace(proof, not_checked=("a: not compared",))
    wrong = dataclasses.replace(incomplete, problems=("b: wrong",))
    outcomes = [proof_outcome(facts_of(each)) for each in (proof, incomplete, wrong)]
    assert outcomes == [ProofOutcome.PROVED, ProofOutcome.UNPROVEN, ProofOutcome.DISPROVED]
    assert [cause_of_fault(facts_of(each)) for each in (incomplete, wrong)] == [Cause.UNPROVEN, Cause.NOT_FP8]
    stored = json.loads(json.dumps(facts_of(proof)["census"]))
    by_operand = {(each["gemm"], each["role"], each["format"]): each["layers"] for each in stored}
    ran = [("output", "weight", "float8_e4m3fn"), ("grad_weight", "grad_output", "float8_e5m2")]
    assert [by_operand[operand] for operand in ran] == [2, 2]
    once = ["float8_e5m2", "did not run", "float32"]  # the first layer's input needs no gradient
    assert [by_operand["grad_input", "grad_output", dtype] for dtype in once] == [1, 1, 1]
    assert cause_of_fault({}) is Cause.NOT_FP8  # a count, without a proof
    assert proof_outcome({"verify_outcome": "words"}) is ProofOutcome.UNPROVEN
