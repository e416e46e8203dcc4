"""The suite `parallel`. Oracles: one process that does the same; planted faults, whose losses must differ from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import on_ranks
import pytest
import torch

from fp8core import RECIPES
from harness.store.case import Case
from harness.suites.parallel import job_of, not_finite
from harness.training.parallel import cells
from harness.training.parallel.job import (
    InParts,
    InShares,
    ParallelRun,
    alone,
    in_parts,
    train,
)

NAN = float("nan")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wrong(how: str, job: ParallelRun) -> list[float]:
    """Two ranks that train with a fault."""
    trainee, _ = cells._ddp(job)
    if how == "no average":  # gradients of this rank alone
        trainee = job.trainee(job.convert(job.build()), 1)
    mine = range(1) if how == "wrong batch" else cells._mine(job, trainee)
    factor = {"sum": 2.0, "ten percent": 1.1}.get(how, 1.0)

    def spoil() -> None:
        for p in trainee.model.parameters():
            assert p.grad is not None
            p.grad.mul_(factor)

    return train(job, trainee, mine, spoil)


@pytest.mark.parametrize(
    ("how", "recipe"),
    [
        ("no average", "tensorwise"),
        pytest.param("wrong batch", "tensorwise", marks=pytest.mark.slow),
        pytest.param("sum", "tensorwise", marks=pytest.mark.slow),
        ("ten percent", None),
    ],
)
def test_a_wrong_gradient_lies_beyond_even_the_widest_bound(how: str, recipe: str | None) -> None:
    """So that what passes the bound of rounding has the right gradients. Of FP8 that bound lets a tenth pass; without FP8
    it lets nothing pass, in the same cell."""
    job = ParallelRun(RECIPES[recipe] if recipe else None, microbatches=2)
    curves = on_ranks.run(wrong, 2, how, job)
    losses = [sum(each) / 2 for each in zip(*curves, strict=True)]
    assert cells.deviation(losses, cells.reference(job)) > cells.noise(job)


def test_a_recipe_that_draws_numbers_is_held_by_what_other_draws_do() -> None:
    """Ranks draw others than one process: the right gradients differ from its, a wrong one by more than the bound."""
    cell, job = cells.CELLS["ddp"], job_of(Case.of("parallel", {"cell": "ddp", "steps": 3}), "nvfp4", "cpu")
    reference = cell.reference(job)
    bound, source = cell.bound(reference)
    assert source == cells.DRAWN
    apart = {}
    for how in ("nothing", "no average"):
        curves = on_ranks.run(wrong, 2, how, cell.of(job))
        apart[how] = cells.deviation(
            [sum(each) / 2 for each in zip(*curves, strict=True)], cells.reference(reference)
        )
    assert 0 < apart["nothing"] <= bound < apart["no average"]
    assert cell.bound(replace(reference, recipe=RECIPES["mxfp8"])) == (0.0, cells.SAME)


def test_the_bound_is_what_rounding_does_and_no_more() -> None:
    high = ParallelRun(None, microbatches=2)
    assert cells.MARGIN * 2**-23 <= cells.noise(high) < 1e-6
    losses = cells.reference(high)
    assert losses == tuple(alone(high))
    assert losses[-1] < 0.85 * losses[0]  # training moves the loss by far more than any bound


def test_parts_compute_what_the_whole_does() -> None:
    """Oracle: the model uncut, in float32, where cutting changes the order of sums alone."""
    for job in (ParallelRun(None), ParallelRun(None, moe=True)):
        whole, cut = job.build(), job.build()
        in_parts(cut, 2)
        kinds = {type(m) for m in cut.modules()}
        assert kinds & ({InShares} if job.moe else {InParts})
        tokens, targets = job.batch(0)
        torch.testing.assert_close(cut(tokens, targets), whole(tokens, targets), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("curves", "said"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], ""),
        ([[], [1.0, 2.0]], ""),  # the first stage of a pipeline knows no loss
        ([[], [1.0, NAN]], "rank 1 of 2: loss is nan at step 1"),
        (
            [[1.0, NAN, NAN], [1.0, 2.0, NAN]],
            "rank 0 of 2: loss is nan at step 1; the others' is finite there",
        ),
        ([[1.0, NAN], [1.0, float("inf")]], "ranks 0, 1 of 2: loss is nan at step 1"),
    ],
)
def test_the_rank_whose_loss_was_the_first_nan_is_named(curves: list[list[float]], said: str) -> None:
    assert not_finite(curves) == said
