"""A wrong scale of the weights' gradients, planted in real training runs: AdamW hides it from the loss, L6 names its size.

Oracle: the planted factor, and a twin without a fault. Model nano, 3 seeds of 52 steps, tensorwise, whose golden arm multiplies the
same codes in high precision.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from unittest import mock

import pytest
from layer_faults import backward_times
from test_faults_in_training import SHORT, control, correct, golden, trained

from fp8core import RECIPES
from harness.judge.verdict import Verdict, judge_pairs

GRAD_WEIGHT, GRAD_INPUT = 1, 0


@cache
def verdict_on(factor: float, place: int = GRAD_WEIGHT) -> Verdict:
    with ExitStack() as planted:
        for target, replacement in backward_times(factor, place):
            planted.enter_context(mock.patch(target, replacement))
        runs = trained(RECIPES["tensorwise"], SHORT)
    return judge_pairs(runs, control(SHORT), golden=golden("tensorwise", SHORT))


def test_a_twin_without_a_fault_passes() -> None:
    runs = correct("tensorwise", SHORT)
    result = judge_pairs(runs, control(SHORT), golden=golden("tensorwise", SHORT)).gate("L6")
    assert result is not None
    assert result.status == "PASS"
    assert "weights of the FP8 layers" in result.sentence


@pytest.mark.parametrize(("factor", "status"), [(1.02, "WARN"), (1.1, "FAIL"), (0.9, "FAIL")])
def test_the_size_of_the_error_is_named(factor: float, status: str) -> None:
    """Of the median over steps: at step 0 the embedding, which shares the head's matrix, dilutes the error to 1.015."""
    result = verdict_on(factor).gate("L6")
    assert result is not None
    assert result.status == status
    assert result.effect == pytest.approx(factor, abs=0.003)
    assert result.sentence.startswith(f"gradients {result.effect:.3f} times the golden arm's")


def test_the_loss_does_not_see_it() -> None:
    """So the test above shows something: nothing else in the verdict fails at 2 %."""
    assert [g.gate for g in verdict_on(1.02).gates if g.status == "FAIL"] == []


def test_an_error_of_the_inputs_gradient_is_named_at_step_0() -> None:
    """It grows from layer to layer; after some steps the median hides it, since the head's own gradient outweighs it."""
    result = verdict_on(1.02, GRAD_INPUT).gate("L6")
    assert result is not None
    assert result.status == "WARN"
    assert result.effect > 1.01
    assert f"at step 0 {result.effect:.3f}" in result.sentence
