"""Tokens of a step. Oracle: sizes of the batches by hand."""

from __future__ import annotations

import json

import pytest

from fp8core import PrecisionSchedule
from harness.advise.training import traced
from harness.training import meta_estimate
from harness.training.loop import TrainingRegime, facts_of
from harness.training.setup import Setup


@pytest.mark.parametrize(
    ("build", "batch", "expected"),
    [
        ("pooled", "patches", 3 * 2 * 64),  # of pictures, 64 patches each
        ("from_pixels", "pixels", 3 * 2 * 64),  # whole numbers, and yet no ids
        ("no_linear", "patches", 0),
        ("peeks", "small_batch", 0),  # looks at values, which are not there on paper
    ],
)
def test_tokens_of_a_step_of_a_user_s_model_are_rows_of_its_layers(
    build: str, batch: str, expected: int
) -> None:
    """Whatever `seq` says, which the model has no use for; 0 is "not known"."""
    model = json.dumps({"_target_": f"models_to_advise.{build}", "batch": f"models_to_advise.{batch}"})
    made = Setup(model, 2, 77, accumulation=3, compute="bf16")
    assert meta_estimate.tokens(made) == expected
    if expected:
        assert 3 * traced(model, 2, 0, None, None).tokens == expected
    assert facts_of(made, TrainingRegime(1, 1e-3, 1e-4), PrecisionSchedule())["tokens_per_step"] == expected
