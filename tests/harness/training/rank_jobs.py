"""Jobs that the ranks of `test_training_ranks` make for themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from fp8core import RECIPES
from harness.training import batches
from harness.training.loop import TrainingJob, TrainingRegime
from harness.training.setup import Setup

if TYPE_CHECKING:
    from harness.training.setup import Trainee

STEPS, HELDOUT = 4, 4


def job(ranks: int = 2) -> TrainingJob:
    """A Llama of one block in FP8, its weights gathered in FP8; each step writes a checkpoint."""
    recipe = RECIPES["tensorwise"].with_fp8_all_gather()
    setup = Setup("llama_tiny", 1, 32, "bf16", recipe=recipe, layers=1, lr=3e-3)
    text = batches.corpus_of("llama_tiny", "stdlib")
    assert text is not None
    return TrainingJob(
        setup,
        TrainingRegime(STEPS, 3e-3, 3e-4, 1, 2, checkpoint_s=0.0),
        lambda turn: batches.microbatches_of("llama_tiny", text, turn, 0, (1, 1, 32), "cpu"),
        text.heldout_batches(HELDOUT, 1, 32, "cpu"),
        identity="test",
        ranks=ranks,
    )


def planted() -> TrainingJob:
    """One layer of rank 1 multiplies in bf16."""

    def bypass(trainee: Trainee) -> None:
        if dist.get_rank() == 1:
            layer: Any = trainee.model.get_submodule("layers.0.attention.o")
            layer.forward = lambda x: nn.functional.linear(x, layer.weight)

    whole = job()
    setup = replace(
        whole.setup, recipe=RECIPES["tensorwise"]
    )  # codes that are gathered would be missed by bf16
    return replace(whole, setup=setup, regime=TrainingRegime(2, 3e-3, 3e-4, checkpoint_s=0.0), alter=bypass)
