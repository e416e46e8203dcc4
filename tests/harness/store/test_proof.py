"""What a proof found, as a field. Oracle: `Proof` objects made by hand, and lines of rows from before the field."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from fp8core import Proof, convert_to_float8_training, verify
from harness.store.cause import Cause
from harness.store.proof import ProofOutcome, proof_outcome
from harness.training.steps import cause_of_fault, facts_of


@pytest.fixture(scope="module")
def proof() -> Proof:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    return verify(lambda: model(torch.randn(16, 32)).sum().backward(), model, announce=False)


def test_a_proof_is_stored_by_what_it_found(proof: Proof) -> None:
    incomplete = dataclasses.replace(proof, ok=False, not_checked=("a: not compared",))
    wrong = dataclasses.replace(incomplete, problems=("b: wrong",))
    outcomes = [proof_outcome(facts_of(each)) for each in (proof, incomplete, wrong)]
    assert outcomes == [ProofOutcome.PROVED, ProofOutcome.UNPROVEN, ProofOutcome.DISPROVED]
    assert [cause_of_fault(facts_of(each)) for each in (incomplete, wrong)] == [Cause.UNPROVEN, Cause.NOT_FP8]
    assert cause_of_fault({}) is Cause.NOT_FP8  # a count, without a proof


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("", ""),
        ("FP8 verified: 9 of 9 Linear layers", "proved"),
        ("FP8 NOT verified: no FP8 GEMM ran", "disproved"),
        (
            "FP8 NOT verified: nothing wrong found in 9 of 9 Linear layers; not checked: a: experts",
            "unproven",
        ),
        ("not verified: out of memory: of the proof", "unproven"),
        ("words of no version", "unproven"),
    ],
)
def test_older_rows_are_read_by_their_line(line: str, outcome: str) -> None:
    assert proof_outcome({"verify": line}) == outcome
    assert proof_outcome({"verify": line, "verify_outcome": "proved"}) is ProofOutcome.PROVED
