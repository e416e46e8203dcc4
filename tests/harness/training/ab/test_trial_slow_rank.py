"""The rank that all wait for. Oracles: planted work on one rank; time lines drawn by hand; planted noise without a slow rank."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rank_loops_more
from noises import NOISES
from torch._C._autograd import DeviceType

from harness.machine import ranks
from harness.training.ab.facts import Known
from harness.training.ab.waits import own_ms, slowest

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
    for answer in ranks.run(rank_loops_more.slowed, 2, "fsdp", 150.0, 0.2, timeout_s=300):
        found = re.match(r"rank 1 takes about (\d+) % longer for its own part of a step", answer["slow_rank"])
        assert found, (answer["slow_rank"], answer["own"])
        assert 10 <= int(found[1]) <= 34, answer["own"]
        assert answer["slow_rank"] in answer["text"]
        assert answer["rounds"] == 8
        assert not answer["problem"]


def test_a_rank_with_a_slow_loader_is_named() -> None:
    for answer in ranks.run(rank_loops_more.slowed, 2, "ddp", 150.0, 0.0, "between", timeout_s=300):
        assert re.match(r"rank 1 spends about \d+ ms more between steps", answer["slow_rank"]), answer
