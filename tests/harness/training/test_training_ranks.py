"""A training run of two ranks: cut off and continued, a damaged checkpoint, a rank that is not in FP8, a disk that refuses.

Oracles: the same run whole, bit for bit; for losses, all batches through the whole model of one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import on_ranks
import pytest
import rank_jobs
import torch
from loop_jobs import curves
from train_cases import divergence_case

from harness.store.errors import RemoteError
from harness.store.measurement import FIELD, ProofOutcome
from harness.suites import divergence
from harness.training import loop
from harness.training.setup import prepare

if TYPE_CHECKING:
    from pathlib import Path

    from harness.store.case import Case
    from harness.timing.workload import TrialOutcome
    from harness.training.loop import TrainingResult


def trained(folder: Path, make: Any, until: int) -> TrainingResult:
    """The run, as each rank makes it."""

    def stop(done: int, steps: int) -> None:
        if done == until:
            raise KeyboardInterrupt

    return loop.train(make(), "cpu", folder, stop)


def run(folder: Path, make: Any = rank_jobs.job, until: int = rank_jobs.STEPS + 1) -> TrainingResult:
    first: TrainingResult = on_ranks.run(trained, 2, folder, make, until)[0]
    return first


@pytest.mark.slow
def test_cut_off_damaged_and_continued_it_is_the_whole_run_bit_for_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    assert [step for step, _ in curves(whole)["loss", ""]] == [0, 1, 2, 3]
    assert [step for step, _ in curves(whole)["heldout_loss", ""]] == [0, 2, 4]
    assert whole.facts[FIELD] == ProofOutcome.PROVED
    cut = tmp_path / "cut"
    with pytest.raises(RemoteError, match="KeyboardInterrupt"):
        run(cut, until=4)
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


def test_fp8_that_one_rank_does_not_run_and_a_disk_that_refuses_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = run(tmp_path / "file", rank_jobs.planted)
    assert found.facts[FIELD] == ProofOutcome.DISPROVED  # of rank 0 too, whose layers are all in FP8
    (problem,) = found.facts["checkpoint_problems"]
    assert problem.startswith("step 1 was not saved: rank 0: ")
    assert len(curves(found)["loss", ""]) == 2


ON_RANKS: dict[str, Any] = {
    "model": "llama_tiny", "ranks": 2, "fp8_all_gather": True, "compute": "bf16", "batch": 1, "seq": 32, "layers": 1,
    "steps": 2, "eval_batches": 2, "diagnose_every": 0,
}  # fmt: skip


def of_the_suite(case: Case, folder: Path) -> tuple[TrialOutcome, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    return divergence.trial(case, "base", "cpu", folder, lambda *at: seen.append(at)), seen


def test_the_suite_trains_on_ranks(tmp_path: Path) -> None:
    """Oracle: in float32 the whole model of one process, which both ranks' batches and all held-out ones go through."""
    case = divergence_case(**(ON_RANKS | {"compute": "fp32"}))
    trial, seen = on_ranks.run(of_the_suite, 2, case, tmp_path)[0]
    assert not trial.failure
    assert (trial.resolved["ranks"], trial.resolved["tokens_per_step"]) == (2, 64)
    assert seen == [(1, 2), (2, 2)]
    alone = divergence.job_of(case, "base", "cpu")
    trainee = prepare(alone.setup, "cpu")
    with torch.no_grad():
        each = {
            "loss": [float(trainee.forward(alone.batches(turn)[0])) for turn in range(2)],
            "heldout_loss": [float(trainee.forward(batch)) for batch in alone.heldout],
        }
    first = {s.metric: s.samples[0] for s in trial.series}
    for metric, losses in each.items():  # of some 64 float32 terms, summed in another order
        assert first[metric] == pytest.approx(sum(losses) / 2, rel=1e-6)
