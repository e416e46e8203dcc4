"""Trials on two ranks over gloo: faults, other trials, all-gather as an arm, tensor parallelism, the rank that all wait for.

Oracles: planted clocks, work and faults; bytes of each collective; bits of outputs and gradients; time lines drawn by hand.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rank_loops
from noises import NOISES
from torch._C._autograd import DeviceType

from harness.machine import ranks
from harness.training.ab.facts import Known
from harness.training.ab.plan import FP8, GATHER, WITH_GATHER, Plan
from harness.training.ab.waits import own_ms, slowest


@pytest.mark.parametrize(
    "group_is_seen", [True, False]
)  # Lightning and accelerate form it when training begins
def test_two_ranks_switch_together_and_the_slower_one_counts(group_is_seen: bool) -> None:
    answers = ranks.run(rank_loops.data_parallel, 2, 1.2, group_is_seen)
    assert answers[0]["order"] == answers[1]["order"]
    for answer in answers:
        assert answer["proved"], answer["proof"]
        assert answer["speedup"] == pytest.approx(1.25)
        assert answer["base_ms"] == pytest.approx(120.0)
        assert "the slowest of 2 ranks" in answer["text"]


@pytest.mark.parametrize(
    ("recipe", "gathers", "demanded", "by_trial"),
    [
        ("tensorwise", True, True, False),
        ("rowwise", False, False, False),
        ("tensorwise", False, True, False),  # no proof where FP8 all-gather is demanded
        ("tensorwise", True, True, True),
    ],
)
def test_a_sharded_model_is_switched_and_proved(
    recipe: str, gathers: bool, demanded: bool, by_trial: bool
) -> None:
    for answer in ranks.run(rank_loops.sharded, 2, recipe, gathers, demanded, by_trial):
        assert answer["done"]
        assert answer["proved"] == (gathers or not demanded), answer["proof"]
        if answer["proved"]:
            assert answer["faults"] == [{}] * 3
            assert ("gathered in FP8" in answer["proof"]) == gathers
        else:
            assert "the all-gather is not in FP8" in answer["doubt"]


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("stops", "rank 1 did not answer within 2 s"),
        ("raises within", "rank 1: a step in .*planted"),
        ("raises between", "^rank 1: the loop raised ZeroDivisionError: planted$"),
        ("closes", "^rank 1: closed the trial before its end$"),
        ("bf16", ""),
        ("bf16 later", ""),
        ("shapes", ""),
    ],
)
def test_what_one_rank_does_is_told_on_the_others_and_nothing_hangs(what: str, problem: str) -> None:
    first, second = answers = ranks.run(rank_loops.odd_rank, 2, what)
    assert first["done"]
    assert first["took_s"] < 30, "it did not wait for its time to be up"
    assert re.search(problem, first["problem"])
    if what == "stops":
        assert first["rounds"] == 0
    if what == "raises within":
        assert second["problem"].endswith("ZeroDivisionError: planted")
    if what == "bf16":
        assert "rank 1" in first["doubt"]
    for answer in answers:
        faults = [(arm, why) for each in answer["faults"] for arm, why in each.items()]
        if what == "bf16":
            assert (answer["proved"], answer["rounds"]) == (False, 0)
            assert "for speed: cannot tell" in answer["text"]
        if what == "bf16 later":
            found = [why for arm, why in faults if arm == "fp8"]
            assert found
            assert all("rank 1: 2 of 2 FP8 layers were not in FP8" in why for why in found)
        if what == "shapes":
            ((_, fault),) = faults
            assert fault.startswith("rank 1: a step of 1 forward passes of 8x32")


def test_a_report_on_one_rank_does_not_end_its_trial() -> None:
    for answer in ranks.run(rank_loops.reports_early, 2):
        assert answer["early"] is False
        assert "under way" in answer["told"]
        assert answer["proved"]
        assert answer["rounds"] == 3


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("seed", "rank 1 has seed=1, rank 0 seed=0"),
        ("layers", "rank 1 has FP8 layers=1, rank 0 FP8 layers=2"),
        ("restore", "'AdamW'"),
        ("casts", "rank 1 has recipes of the layers="),
    ],
)
def test_ranks_with_other_trials_get_no_ratio(what: str, words: str) -> None:
    for answer in ranks.run(rank_loops.other_trial, 2, what):
        assert words in answer["problem"]
        assert "\n" not in answer["problem"]
        assert not answer["proved"]
        assert answer["speedup"] is None
        assert answer["done"]
        assert answer["steps_run"] == (0, 0), "the step runs plain, before anything was switched"
        assert answer["turn"] == 1
        assert "no ratio: the ranks are not in one trial" in answer["text"]


def test_a_rank_that_cannot_begin_tells_the_others_and_leaves_nothing_behind() -> None:
    first, second = ranks.run(rank_loops.cannot_begin, 2)
    assert "rank 1: the trial could not begin: RuntimeError: planted" in first["problem"]
    assert second["raised"] == "planted"
    for answer in (first, second):
        assert answer["done"]
        assert not answer.get("hooks")


def test_a_plan_of_both_gathers_proves_each_and_gives_each_a_block() -> None:
    plan = Plan(steps=43, block=1, arms=WITH_GATHER)
    assert (plan.before, plan.per_round, plan.rounds) == (11, 8, 4)
    assert [t.purpose for t in plan.turns() if t.arm == GATHER][:4] == ["warm", "warm", "compare", "count"]
    assert all(sorted(plan.order(i)) == sorted(WITH_GATHER) for i in range(20))


def test_both_gathers_are_arms_of_one_trial() -> None:
    """Net has 4096 weights and 96 biases: half of them on each rank, gathered in the forward and in the backward pass."""
    for answer in ranks.run(rank_loops.both_gathers, 2, timeout_s=300):
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
    assert ranks.run(rank_loops.same_results, 2, timeout_s=300) == [True, True]


def test_a_tensor_parallel_model_is_switched_and_proved_on_every_rank() -> None:
    """FLOPs by hand: 7 products (none for the gradient of the batch) of 16 rows, 32 by 64, half of them on each rank."""
    for answer in ranks.run(rank_loops.tensor_parallel, 2, timeout_s=300):
        assert answer["proved"], answer["doubt"]
        assert answer["faults"] == [{}] * 3
        assert answer["speedup"] == pytest.approx(1.25)
        assert answer["tokens"] is None
        assert "tokens/s" not in answer["text"]
        assert sum(answer["flops"][FP8].values()) == 7 * 2 * 16 * 32 * 64 / 2
        assert answer["restored"] == ("model", "random numbers", "AdamW")


def test_a_step_that_raises_within_a_pass_of_fsdp2_is_put_back() -> None:
    for answer in ranks.run(rank_loops.raises_within, 2, timeout_s=300):
        assert answer["restored"] == ("model", "random numbers", "AdamW", "StepLR")
        assert "raised ZeroDivisionError: planted" in answer["doubt"]
        assert answer["equal"], "two steps after it are those of a loop without a trial, bit for bit"


TRIALS = 200


def event(name: str, start: float, end: float, **more: Any) -> SimpleNamespace:
    """One event of the profiler, in microseconds."""
    given = {"device_type": DeviceType.CPU, "cpu_children": [], "is_async": False} | more
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), **given)


STEP = event("harness.ab step", 0, 10_000, cpu_children=[1])


def test_waiting_is_what_a_collective_takes_while_nothing_else_runs() -> None:
    """By hand: of 2000 to 6000 us in a collective, 2000 to 3000 are covered by a product."""
    events = [
        STEP,
        event("aten::mm", 0, 3000),
        event("c10d::allreduce_", 2000, 5900),
        event("gloo:all_reduce", 2000, 6000, is_async=True),
        event("aten::add_", 6000, 9000),
    ]
    assert own_ms(events) == pytest.approx(7.0)


def test_of_a_gpu_kernels_count_and_not_what_the_host_does_meanwhile() -> None:
    """By hand: NCCL's kernel runs from 3 to 8 ms, of which a product covers one; the last kernel ends after the host."""
    gpu = {"device_type": DeviceType.CUDA}
    events = [
        STEP,
        event("aten::mm", 0, 9000),
        event("nccl:all_reduce", 2900, 3000),
        event("nvjet_hsh_128x256", 1000, 4000, **gpu),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3000, 8000, **gpu),
        event("vectorized_elementwise_kernel", 8000, 12_000, **gpu),
    ]
    assert own_ms(events) == pytest.approx(12.0 - 4.0)


def rounds_of(noise: str, size: int, slow: float, seed: int) -> list[list[float]]:
    """Medians of twelve rounds of three steps of 100 ms, each rank with noise of its own; rank 1 takes `slow` more."""
    rng = np.random.default_rng(seed)
    logs = np.stack([NOISES[noise](rng, 36) for _ in range(size)])
    own = 100 * np.median(np.exp(logs).reshape(size, 12, 3), axis=2)
    own[1] *= 1 + slow
    return [[float(t) for t in each] for each in own.T]


# Not `drift` and `thermal`: there a rank is truly slower than the others for a good part of the trial
@pytest.mark.parametrize("noise", ["quiet", "heavy_tails", "stalls", "correlated"])
@pytest.mark.parametrize("size", [2, 8])
def test_equal_ranks_are_never_named_and_a_slow_one_always(noise: str, size: int) -> None:
    names = [slowest(rounds_of(noise, size, 0.0, seed), 100.0) for seed in range(TRIALS)]
    assert sum(found is not None for found in names) == 0
    found = [slowest(rounds_of(noise, size, 0.2, seed), 100.0) for seed in range(TRIALS)]
    right = [f for f in found if f is not None and f[0] == 1]
    assert len(right) >= {"stalls": 0.85}.get(noise, 0.98) * TRIALS
    assert len(right) == sum(f is not None for f in found), "another rank is never named"
    assert np.median([f[1] for f in right]) == pytest.approx(1.2, abs=0.03)


def test_without_profiled_steps_whole_ones_are_compared() -> None:
    known = Known()
    for index in range(3):
        known.add_round(index, [{"times_ms": {"base": [t]}, "own_ms": {}} for t in (100.0, 130.0)])
    assert known.slow_rank().startswith("rank 1 takes about 30 % longer a step than the other ranks")


@pytest.mark.parametrize(
    ("own", "gaps", "named"),
    [
        # A rank that slept wakes slowly: 2 of 153 ms are not what all wait for
        ([4.0, 6.0], [1.0, 150.0], "rank 1 spends about 149 ms more between steps"),
        ([4.0, 6.0], [1.0, 1.0], ""),
        # Both: the one that costs more
        ([60.0, 90.0], [1.0, 21.0], "rank 1 takes about 50 % longer for its own part of a step"),
        ([60.0, 81.0], [1.0, 31.0], "rank 1 spends about 30 ms more between steps"),
    ],
)
def test_what_costs_most_of_a_whole_step_is_named(own: list[float], gaps: list[float], named: str) -> None:
    known = Known()
    for index in range(4):
        messages = [
            {"times_ms": {"base": [153.0]}, "own_ms": {"base": [mine]}, "gaps_ms": {"base": [gap]}}
            for mine, gap in zip(own, gaps, strict=True)
        ]
        known.add_round(index, messages)
    assert known.slow_rank().startswith(named)
    assert bool(known.slow_rank()) == bool(named)


def test_a_slow_rank_is_named_where_collectives_make_all_wait() -> None:
    for answer in ranks.run(rank_loops.slowed, 2, "fsdp", 150.0, 0.2, timeout_s=300):
        found = re.match(r"rank 1 takes about (\d+) % longer for its own part of a step", answer["slow_rank"])
        assert found, (answer["slow_rank"], answer["own"])
        assert 10 <= int(found[1]) <= 34, answer["own"]
        assert answer["slow_rank"] in answer["text"]
        assert answer["rounds"] == 8
        assert not answer["problem"]


def test_a_rank_with_a_slow_loader_is_named() -> None:
    for answer in ranks.run(rank_loops.slowed, 2, "ddp", 150.0, 0.0, "between", timeout_s=300):
        assert re.match(r"rank 1 spends about \d+ ms more between steps", answer["slow_rank"]), answer
