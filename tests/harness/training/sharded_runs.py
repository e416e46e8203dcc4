"""What the tests of sharded runs run in each rank."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fp8core import RECIPES, Float8Linear
from harness.store.proof import FIELD
from harness.training import batches
from harness.training.loop import Regime, TrainingJob, TrainingRun
from harness.training.setup import Setup, prepare
from harness.training.sharded import NotSavedError, train_sharded

if TYPE_CHECKING:
    from harness.training.setup import Trainee

STEPS = 4


class _EnoughError(Exception):
    pass


def job(recipe: str = "", *, gather: bool = True, checkpoint_s: float = 0.0) -> TrainingJob:
    """A small Llama; by default each step writes a checkpoint."""
    found = RECIPES[recipe].with_fp8_all_gather(gather) if recipe else None
    setup = Setup("llama_tiny", 1, 32, "bf16" if recipe else "fp32", recipe=found, layers=1, lr=3e-3)
    text = batches.corpus_of("llama_tiny", "stdlib")
    size, rank, world = (1, 1, 32), dist.get_rank(), dist.get_world_size()
    assert text is not None
    return TrainingJob(
        setup,
        Regime(STEPS, 3e-3, 3e-4, 1, 2, checkpoint_s=checkpoint_s),
        lambda step: batches.microbatches_of("llama_tiny", text, step * world + rank, 0, size, "cpu"),
        text.heldout_batches(4, 1, 32, "cpu"),
        identity="test",
    )


def cut_and_continued(folder: str) -> dict[str, Any]:
    """One run whole; one that rank 1 is asked to end after two steps; what a kill and a damaged file leave of it."""
    told: dict[str, Any] = {"steps": []}
    whole, ended = train_sharded(job("tensorwise", checkpoint_s=1e9), "cpu", Path(folder, "whole"))
    told |= {"whole": whole.curves.points, "ended": ended, "proof": whole.facts[FIELD]}

    TrainingRun._prove = lambda self: None  # type: ignore[method-assign]  # proved above, and dear
    taken: list[int] = []
    place = Path(folder, "cut")
    part, told["part_ended"] = train_sharded(
        job("tensorwise"), "cpu", place, lambda step, _: taken.append(step),
        asked_to_end=lambda: dist.get_rank() == 1 and len(taken) == 2,
    )  # fmt: skip
    told["part"] = part.curves.points["loss", ""]
    dist.barrier()
    if (
        dist.get_rank() == 0
    ):  # a job that was killed in the middle of a save leaves its folder under the other name
        (place / "step-00000002").rename(place / "writing-step-00000002")
        (place / "writing-step-00000002" / ".metadata").unlink()
    dist.barrier()
    continued, _ = train_sharded(job("tensorwise"), "cpu", place)
    told |= {"continued": continued.curves.points, "resumed": continued.facts["resumed_from_steps"]}

    if dist.get_rank() == 0:
        (shard, _) = sorted((place / "step-00000004").glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:100])
    dist.barrier()
    again, _ = train_sharded(job("tensorwise"), "cpu", place)
    told |= {"again": again.curves.points, "problems": again.facts["checkpoint_problems"]}
    told["left"] = sorted(path.name for path in place.iterdir())
    return told


def first_losses() -> tuple[float, float]:
    """The first loss of a sharded run without FP8, and the mean of what each rank computes alone with the whole model."""
    plain = job()
    trainee = prepare(plain.setup, "cpu")
    mine = torch.tensor([float(trainee.gradients(plain.batches(0)))], dtype=torch.float64)
    dist.all_reduce(mine)

    def enough(step: int, steps: int) -> None:
        raise _EnoughError

    run: list[Any] = []
    with suppress(_EnoughError):
        train_sharded(plain, "cpu", Path("/nonexistent"), enough, before=run.append)
    found = [value for _, value in run[0].curves.points["loss", ""]]
    return found[0], float(mine) / dist.get_world_size()


def unproved() -> str:
    """What every rank knows of FP8 where one layer of rank 1 multiplies in bf16."""

    def bypass(trainee: Trainee) -> None:
        if dist.get_rank() == 1:
            layer: Any = trainee.model.get_submodule("layers.0.attention.o")
            assert isinstance(layer, Float8Linear)
            layer.forward = lambda x: nn.functional.linear(x, layer.weight)

    known: list[str] = []

    def stop(run: Any) -> None:
        known.append(str(run.facts[FIELD]))
        raise _EnoughError

    planted = replace(job("tensorwise", gather=False), alter=bypass)
    with suppress(_EnoughError):
        train_sharded(planted, "cpu", Path("/nonexistent"), before=stop)
    return known[0]


def unsaved() -> dict[str, Any]:
    """What is said where a run is asked to end and its checkpoints cannot be written."""
    told: dict[str, Any] = {"on_problem": []}
    try:
        train_sharded(
            job(checkpoint_s=1e9), "cpu", Path("/dev/null/checkpoints"), asked_to_end=lambda: True,
            on_problem=told["on_problem"].append,
        )  # fmt: skip
    except NotSavedError as error:
        told["error"] = str(error)
    return told


def everything(folder: str) -> dict[str, Any]:
    """All of it in one start of the ranks."""
    return {"first": first_losses(), "unproved": unproved(), "unsaved": unsaved()} | cut_and_continued(folder)
