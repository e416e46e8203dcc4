"""A training run of two ranks: cut off and continued, a damaged checkpoint, a rank that is not in FP8, a disk that refuses.

Oracles: the same run whole, bit for bit; for losses, all batches through the whole model of one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import rank_jobs
import torch
from loop_jobs import curves

from harness.store.proof import FIELD, ProofOutcome
from harness.training.parallel import trained
from harness.training.setup import prepare

if TYPE_CHECKING:
    from pathlib import Path

    from harness.training.loop import Result


@pytest.fixture(autouse=True)
def _one_step_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "SAID_S", 0.0)


def run(folder: Path, make: Any = rank_jobs.job, until: int = rank_jobs.STEPS) -> Result:
    def stop(done: int, steps: int) -> None:
        if done == until:
            raise KeyboardInterrupt

    return trained.train_on_ranks(make, (), 2, "cpu", folder, stop)


def test_cut_off_damaged_and_continued_it_is_the_whole_run_bit_for_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    assert [step for step, _ in curves(whole)["loss", ""]] == [0, 1, 2, 3]
    assert [step for step, _ in curves(whole)["heldout_loss", ""]] == [0, 2, 4]
    assert whole.facts[FIELD] == ProofOutcome.PROVED
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(cut, until=3)
    newest, before = sorted(cut.glob("step-*"), reverse=True)
    (shard,) = newest.glob("__1_*.distcp")
    shard.write_bytes(shard.read_bytes()[:-64] + bytes(64))
    (cut / "writing-step-00000003").mkdir()  # left by a kill in a save
    continued = run(cut)
    assert curves(continued) == curves(whole)
    assert continued.facts["resumed_from_steps"] == [int(before.name[5:13])] == [2]
    (problem,) = continued.facts["checkpoint_problems"]
    assert problem.startswith(f"{newest.name} is not used: rank 1: ")
    assert shard.name in problem

    alone = rank_jobs.job(ranks=1)
    trainee = prepare(alone.setup, "cpu")
    with torch.no_grad():
        first = [float(trainee.forward(alone.batches(turn)[0])) for turn in range(2)]
        heldout = [float(trainee.forward(batch)) for batch in alone.heldout]
    assert curves(whole)["loss", ""][0][1] == pytest.approx(sum(first) / 2, rel=1e-6)
    assert curves(whole)["heldout_loss", ""][0][1] == pytest.approx(sum(heldout) / len(heldout), rel=1e-6)


def test_fp8_that_one_rank_does_not_run_and_a_disk_that_refuses_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = run(tmp_path / "file", rank_jobs.planted)
    assert found.facts[FIELD] == ProofOutcome.DISPROVED  # of rank 0 too, whose layers are all in FP8
    (problem,) = found.facts["checkpoint_problems"]
    assert problem.startswith("step 1 was not saved: rank 0: ")
    assert len(curves(found)["loss", ""]) == 2
