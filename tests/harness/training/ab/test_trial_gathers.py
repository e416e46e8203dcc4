"""FSDP2's all-gather as an arm, tensor parallelism, and a step that raises half-way, on two ranks over gloo.

Oracles: bytes of each collective; bits of outputs and gradients; `verify` on every rank; the same loop without a trial.
"""

from __future__ import annotations

import pytest
import rank_loops_more

from harness.machine import ranks
from harness.training.ab.plan import FP8, GATHER, WITH_GATHER, Plan


def test_a_plan_of_both_gathers_proves_each_and_gives_each_a_block() -> None:
    plan = Plan(steps=43, block=1, arms=WITH_GATHER)
    assert (plan.before, plan.per_round, plan.rounds) == (11, 8, 4)
    assert [t.purpose for t in plan.turns() if t.arm == GATHER][:4] == ["warm", "warm", "compare", "count"]
    assert all(sorted(plan.order(i)) == sorted(WITH_GATHER) for i in range(20))


def test_both_gathers_are_arms_of_one_trial() -> None:
    """Net has 4096 weights and 96 biases: half of them on each rank, gathered in the forward and in the backward pass."""
    for answer in ranks.run(rank_loops_more.both_gathers, 2, timeout_s=300):
        assert answer["proved"], answer["doubt"]
        assert answer["faults"] == [{}] * 4
        assert answer["sent"] == {
            "base": {"[('float32', 16768)]"},
            "base:again": {"[('float32', 16768)]"},
            "fp8": {"[('float32', 16768)]"},
            "fp8:gather": {"[('uint8', 4480)]"},
        }
        assert answer["between"] == pytest.approx({"fp8": 1.25, "gather": 1.5625, "gains": 1.25})
        assert "2 weights gathered in FP8" in answer["gather_proof"]
        assert "gathered in FP8" not in answer["proof"]
        assert "with FP8 all-gather: 1.562x" in answer["text"]
        assert answer["gather_left"] == {True}, "left as it was converted"


def test_both_gathers_give_the_same_results() -> None:
    assert ranks.run(rank_loops_more.same_results, 2, timeout_s=300) == [True, True]


def test_a_tensor_parallel_model_is_switched_and_proved_on_every_rank() -> None:
    """FLOPs by hand: 7 products (none for the gradient of the batch) of 16 rows, 32 by 64, half of them on each rank."""
    for answer in ranks.run(rank_loops_more.tensor_parallel, 2, timeout_s=300):
        assert answer["proved"], answer["doubt"]
        assert answer["faults"] == [{}] * 3
        assert answer["speedup"] == pytest.approx(1.25)
        assert answer["tokens"] is None
        assert "tokens/s" not in answer["text"]
        assert sum(answer["flops"][FP8].values()) == 7 * 2 * 16 * 32 * 64 / 2
        assert answer["restored"] == ("model", "random numbers", "AdamW")


def test_a_step_that_raises_within_a_pass_of_fsdp2_is_put_back() -> None:
    for answer in ranks.run(rank_loops_more.raises_within, 2, timeout_s=300):
        assert answer["restored"] == ("model", "random numbers", "AdamW", "StepLR")
        assert "raised ZeroDivisionError: planted" in answer["doubt"]
        assert answer["equal"], "two steps after it are those of a loop without a trial, bit for bit"
