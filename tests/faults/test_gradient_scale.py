"""A wrong scale of the weights' gradients, planted in real training runs: AdamW hides it from the loss, L6 names its size.

Oracle: the planted factor, and a twin without a fault. Model nano, 3 seeds of 52 steps, tensorwise, whose golden arm multiplies the
same codes in high precision. The table of docs/loss-verdict-evidence.md is printed by

    python tests/faults/test_gradient_scale.py MODEL SEEDS STEPS [LAYER_LEFT_OUT ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import numpy as np
import pytest
from layer_faults import backward_times
from test_faults_in_training import SHORT, Runs, Size, control, correct, golden, recipe_of, trained

from harness.judge.verdict import Verdict, judge_pairs
from harness.store import stats

GRAD_INPUT, GRAD_WEIGHT = 0, 1  # places in what the backward pass returns


@contextmanager
def planted(factor: float, place: int) -> Iterator[None]:
    """The gradient of every FP8 layer is so many times too large."""
    with ExitStack() as stack:
        for target, replacement in backward_times(factor, place):
            stack.enter_context(mock.patch(target, replacement))
        yield


@cache
def verdict_on(factor: float, place: int = GRAD_WEIGHT) -> Verdict:
    runs = trained(recipe_of("tensorwise"), SHORT, planted(factor, place))
    return judge_pairs(runs, control(SHORT), golden=golden("tensorwise", SHORT))


def test_a_twin_without_a_fault_passes() -> None:
    runs = correct("tensorwise", SHORT)
    result = judge_pairs(runs, control(SHORT), golden=golden("tensorwise", SHORT)).gate("L6")
    assert result is not None
    assert result.status == "PASS"
    assert "weights of the FP8 layers" in result.sentence


@pytest.mark.parametrize(("factor", "status"), [(1.02, "WARN"), (1.1, "FAIL"), (0.9, "FAIL")])
def test_the_size_of_the_error_is_named(factor: float, status: str) -> None:
    """The median over steps has it in full: at step 0 the embedding, which shares the head's matrix, dilutes the error to 1.015."""
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


def table(size: Size, left_out: tuple[str, ...]) -> None:
    """Prints the ratios to the golden arm, by whose norm and where: mean over seeds with its 95 % interval."""
    print("| planted | whole, median | FP8 weights, median | whole, step 0 | FP8 weights, step 0 |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for recipe in ("tensorwise", "rowwise"):
        right = recipe_of(recipe)
        twin = trained(right.with_backend("reference_bf16"), size, left_out=left_out)
        for name, factor, place in (
            ("nothing", 1.0, GRAD_WEIGHT),
            ("grad_weight x 1.02", 1.02, GRAD_WEIGHT),
            ("grad_weight x 1.1", 1.1, GRAD_WEIGHT),
            ("grad_input x 1.02", 1.02, GRAD_INPUT),
        ):
            runs = trained(right, size, planted(factor, place), left_out=left_out)
            cells = [
                ratio(runs, twin, norm, at)
                for at in ("median", "first")
                for norm in ("grad_norm", "fp8_grad_norm")
            ]
            print(f"| {recipe}, {name} | " + " | ".join(cells) + " |", flush=True)


def ratio(runs: Runs, twin: Runs, norm: str, at: str) -> str:
    logs = [np.log(getattr(runs[s], norm).values / getattr(twin[s], norm).values) for s in twin]
    size = stats.geometric_mean([np.exp(np.median(x) if at == "median" else x[0]) for x in logs])
    return f"{size.value:.4f} ({size.low:.4f} to {size.high:.4f})"


if __name__ == "__main__":
    table(Size(int(sys.argv[2]), int(sys.argv[3]), lr_warmup=30, model=sys.argv[1]), tuple(sys.argv[4:]))
