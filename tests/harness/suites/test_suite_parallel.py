"""The suite `parallel`. Oracles: one process that does the same; planted faults, whose losses must differ from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8core import RECIPES
from harness import store
from harness.__main__ import main
from harness.cli.config import load
from harness.engine.plan import make_plan
from harness.machine import ranks
from harness.store.case import Case
from harness.suites import SUITES, parallel
from harness.suites.parallel import not_finite
from harness.training.parallel import bounds, cells
from harness.training.parallel.cells import CELLS
from harness.training.parallel.job import (
    InColumns,
    InRows,
    InShares,
    ParallelRun,
    Trainee,
    _passes,
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


def planned(name: str) -> set[tuple[str, str]]:
    """(cell, arm) of a sweep."""
    plan = make_plan(load([f"sweep={name}"], lambda kind: "cpu").config, SUITES)
    return {(case.case.text("cell"), arm) for case in plan.cases for arm in case.runnable}


def test_the_sweep_runs_every_way_with_every_recipe() -> None:
    assert planned("parallel") == {(cell, arm) for cell in CELLS for arm in parallel.ARMS}
    asked = {"ddp", "fsdp2", "hsdp", "tp", "sp", "ep", "pp", "compile", "checkpointing", "accumulation", "offload",
             "schedule"}  # fmt: skip
    assert asked <= CELLS.keys()
    assert parallel.ARMS.keys() - {parallel.BASE} == RECIPES.keys()
    assert len(planned("parallel")) >= 40


def test_the_sweep_of_ci_has_every_way_and_every_recipe() -> None:
    some = planned("parallel_ci")
    assert {cell for cell, _ in some} == set(CELLS)
    assert {arm for _, arm in some} == set(parallel.ARMS)
    assert len(some) < 40


def run(folder: Path, *words: str) -> tuple[int, pd.DataFrame]:
    code = main(
        ["sweep=parallel", *words, f"results_dir={folder / 'results'}", f"reports_dir={folder / 'reports'}"]
    )
    return code, store.read(folder / "results")


@pytest.mark.slow  # CI runs sweep=parallel_ci, which holds these cells and more
def test_cells_equal_one_process(tmp_path: Path) -> None:
    """Bit for bit where sums are the same; a refusal is a skipped row with fp8core's words and no failure."""
    code, frame = run(tmp_path, "axes.cell=[fsdp2,pp,ep_experts]", "arms=[tensorwise,delayed]")
    assert code == 0
    row = {
        (json.loads(r.axes)["cell"], r.arm): r
        for r in frame.itertuples()
        if r.metric in ("loss_deviation", "loss")
    }
    for cell in ("fsdp2", "pp"):
        for arm in ("tensorwise", "delayed"):
            found = row[cell, arm]
            resolved = json.loads(found.resolved)
            assert (found.status, found.metric, found.value, resolved["bound"]) == (
                "ok",
                "loss_deviation",
                0.0,
                0.0,
            )
            assert resolved["bound_from"] == bounds.SAME
    assert (
        row["ep_experts", "tensorwise"].value <= json.loads(row["ep_experts", "tensorwise"].resolved)["bound"]
    )
    refused = row["ep_experts", "delayed"]
    assert refused.status == "skipped"
    assert refused.reason.startswith("refuses: no experts were converted to FP8")
    wire = frame[(frame["metric"] == "wire_bytes") & (frame["arm"] == "tensorwise")]
    assert any("all_gather uint8" in part for part in wire["part"])


def wrong(how: str, job: ParallelRun) -> list[float]:
    """Two ranks that train with a fault."""
    trainee = cells._ddp(job)
    model: nn.Module = trainee.model
    if how == "no average":  # gradients of this rank alone
        model = job.convert(job.build())
    if how == "wrong batch":
        trainee.mine = [0]
    plain = Trainee(model, trainee.mine)
    factor = {"sum": 2.0, "ten percent": 1.1}.get(how, 1.0)

    def passes(step: int) -> list[float]:
        losses = _passes(job, plain)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(factor)
        return losses

    return train(job, Trainee(model, trainee.mine, passes=passes))


@pytest.mark.parametrize(
    ("how", "recipe"),
    [
        ("no average", "tensorwise"),
        ("wrong batch", "tensorwise"),
        ("sum", "tensorwise"),
        ("ten percent", None),
    ],
)
def test_a_wrong_gradient_lies_beyond_even_the_widest_bound(how: str, recipe: str | None) -> None:
    """So that what passes the bound of rounding has the right gradients. Of FP8 that bound lets a tenth pass; without FP8
    it lets nothing pass, in the same cell."""
    job = ParallelRun(RECIPES[recipe] if recipe else None, microbatches=2)
    curves = ranks.run(wrong, 2, how, job)
    losses = [sum(each) / 2 for each in zip(*curves, strict=True)]
    assert bounds.deviation(losses, bounds.reference(job)) > bounds.rounding(job)


def test_the_bound_is_what_rounding_does_and_no_more() -> None:
    high = ParallelRun(None, microbatches=2)
    assert bounds.MARGIN * 2**-23 <= bounds.rounding(high) < 1e-6
    losses = bounds.reference(high)
    assert losses == tuple(alone(high))
    assert losses[-1] < 0.85 * losses[0]  # training moves the loss by far more than any bound


def test_parts_compute_what_the_whole_does() -> None:
    """Oracle: the model uncut, in float32, where cutting changes the order of sums alone."""
    for job in (ParallelRun(None), ParallelRun(None, moe=True)):
        whole, cut = job.build(), job.build()
        in_parts(cut, 2)
        kinds = {type(m) for m in cut.modules()}
        assert kinds & ({InShares} if job.moe else {InColumns, InRows})
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


def planted_nan(job: ParallelRun) -> list[float]:
    trainee = cells._ddp(job)
    if dist.get_rank() == 1:

        def before_pass(last: bool) -> None:
            with torch.no_grad():
                next(trainee.model.parameters()).fill_(NAN)

        trainee.before_pass = before_pass
    return train(job, trainee)


def test_a_nan_on_one_rank_is_told_by_its_rank() -> None:
    curves = ranks.run(planted_nan, 2, ParallelRun(None, microbatches=2))
    assert not_finite(curves) == "rank 1 of 2: loss is nan at step 0; the others' is finite there"


def test_what_the_suite_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep=parallel", "axes.cell=[dpp]", f"results_dir={tmp_path}"]) == 2
    assert "axes.cell='dpp': expected one of ddp, fsdp2" in capsys.readouterr().err
    assert main(["sweep=parallel", "shapes=[llama3_8b]", f"results_dir={tmp_path}"]) == 2
    assert not list(tmp_path.iterdir())
    case = Case.of("parallel", {"cell": "ddp", "steps": 3})
    assert parallel.unsupported(case, "tensorwise", "cpu") is None
    unsupported = parallel.unsupported(case, "tensorwise", "cuda")
    assert torch.cuda.device_count() >= 2 or (
        unsupported is not None and "2 ranks need 2 GPUs" in unsupported.reason
    )
