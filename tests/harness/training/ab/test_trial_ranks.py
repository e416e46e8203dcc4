"""Trials on two ranks over gloo: faults, other trials, all-gather as an arm, tensor parallelism, the rank that all wait for.

Oracles: planted clocks, work and faults; bytes of each collective; bits of weights; time lines drawn by hand.
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

from fp8core.verify import Proof
from fp8core.verify.records import LayerProof
from harness.machine import ranks
from harness.training.ab.plan import BASE, FP8, GATHER
from harness.training.ab.proving import gather_fault
from harness.training.ab.waits import own_ms, slow_rank


@pytest.mark.parametrize(
    "group_is_seen", [True, False]
)  # Lightning and accelerate form it when training begins
def test_two_ranks_switch_together_and_the_slower_one_counts(group_is_seen: bool) -> None:
    answers = ranks.run(rank_loops.data_parallel, 2, group_is_seen)
    assert answers[0]["order"] == answers[1]["order"]
    for answer in answers:
        result = answer["result"]
        assert result.proved, result.proof
        assert (result.effect.speedup, result.median_ms(BASE)) == pytest.approx((1.25, 120.0))
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
        result = answer["result"]
        assert answer["done"]
        assert result.proved == (gathers or not demanded), result.proof
        if result.proved:
            assert answer["faults"] == [{}] * 3
            assert ("gathered in FP8" in result.proof) == gathers
        else:
            assert "the all-gather is not in FP8" in result.doubt


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("stops", "rank 1 did not answer within 2 s"),
        ("raises within", "rank 1: a step in .*planted"),
        ("raises between", "^rank 1: the loop raised ZeroDivisionError: planted$"),
        ("closes", "^rank 1: closed the trial before its end$"),
        ("bf16", "rank 1"),
        ("fp8", "rank 1 has steps in another precision='5 FP8 GEMMs ran in a step that was to be bf16'"),
        ("rows", "rank 1 has batches of a step='1 forward passes of 32x32"),
        ("bf16 later", ""),
        ("shapes", ""),
    ],
)
def test_what_one_rank_does_is_told_on_the_others_and_nothing_hangs(what: str, problem: str) -> None:
    first, second = answers = ranks.run(rank_loops.odd_rank, 2, what)
    assert first["done"]
    assert first["took_s"] < 30, "it did not wait for its time to be up"
    assert re.search(problem, first["result"].problem)
    if what == "raises within":
        assert second["result"].problem.endswith("ZeroDivisionError: planted")
    for answer in answers:
        faults = [(arm, why) for each in answer["faults"] for arm, why in each.items()]
        if what in ("bf16", "fp8", "rows"):
            assert (answer["result"].proved, answer["result"].rounds) == (False, ())
            assert "for speed: cannot tell" in answer["text"]
        if what == "bf16 later":
            found = [why for arm, why in faults if arm == FP8]
            assert found
            assert all("rank 1: 2 of 2 FP8 layers were not in FP8" in why for why in found)
        if what == "shapes":
            ((_, fault),) = faults
            assert fault.startswith("rank 1: a step of 1 forward passes of 8x32")


def test_a_report_on_one_rank_does_not_end_its_trial() -> None:
    for answer in ranks.run(rank_loops.reports_early, 2):
        assert answer["early"] is False
        assert "under way" in answer["told"]
        assert answer["result"].proved
        assert len(answer["result"].rounds) == 3


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("seed", "the ranks are not in one trial: rank 1 has seed=1, rank 0 seed=0"),
        ("layers", "rank 1 has FP8 layers=1, rank 0 FP8 layers=2"),
        ("restore", "'AdamW'"),
        ("casts", "rank 1 has recipes of the layers="),
        ("cannot begin", "rank 1: the trial could not begin: RuntimeError: planted"),
    ],
)
def test_ranks_with_other_trials_get_no_ratio(what: str, words: str) -> None:
    for rank, answer in enumerate(ranks.run(rank_loops.other_trial, 2, what)):
        result, fails = answer["result"], what == "cannot begin" and rank == 1
        assert words.removeprefix("rank 1: " if fails else "") in result.problem
        assert "\n" not in result.problem
        assert (result.proved, result.rounds, answer["done"], answer["hooks"]) == (False, (), True, 0)
        assert result.steps_run == (0, 0), "the step runs plain, before anything was switched"
        assert (answer["turn"], answer["raised"]) == ((0, "planted") if fails else (1, ""))
        assert "no ratio: " in answer["text"]
        assert result.ranks == 2


@pytest.mark.parametrize(
    ("without", "with_codes", "stray"),
    [
        ((64, "float32"), (4480, "fp8"), ""),  # activations of sequence parallelism are codes in both
        (
            (0, "fp8"),
            (4480, "fp8"),
            "up was gathered in FP8 in the arm of the high-precision all-gather (1 in all)",
        ),
        (
            (64, "float32"),
            (64, "fp8"),
            "64 bytes of codes were gathered in the arm with FP8 all-gather, 64 in",
        ),
    ],
)
def test_arms_that_gather_alike_prove_nothing(without: Any, with_codes: Any, stray: str) -> None:
    """Oracle: proofs drawn by hand, of bytes that were gathered as codes and of what one weight was gathered as."""
    proofs = [
        Proof(
            True, (), (), (LayerProof("up", "tensorwise", "", gathered),), 3, 3, "cpu", None, {"uint8": codes}
        )
        for codes, gathered in (without, with_codes)
    ]
    fault = gather_fault(*proofs)
    assert fault.startswith(stray)
    assert bool(fault) == bool(stray)


def test_both_gathers_are_arms_of_one_trial() -> None:
    """Net has 4096 weights and 96 biases: half of them on each rank, gathered in the forward and in the backward pass."""
    for answer in ranks.run(rank_loops.both_gathers, 2, timeout_s=300):
        result = answer["result"]
        assert result.proved, result.doubt
        assert answer["faults"] == [{}] * 3
        assert answer["sent"] == {
            "base": {"[('float32', 16768)]"},
            "base:again": {"[('float32', 16768)]"},
            "fp8": {"[('float32', 16768)]"},
            "fp8:gather": {"[('uint8', 4480)]"},
        }
        pairs = ((FP8, BASE), (GATHER, BASE), (GATHER, FP8))
        assert [result.between(*pair).speedup for pair in pairs] == pytest.approx([1.25, 1.5625, 1.25])
        assert "2 weights gathered in FP8" in result.gather_proof
        assert "gathered in FP8" not in result.proof
        assert "with FP8 all-gather: 1.56" in answer["text"]
        assert answer["gather_left"] == {True}, "left as it was converted"


def test_a_tensor_parallel_model_is_switched_and_proved_on_every_rank() -> None:
    """FLOPs by hand: 7 products (none for the gradient of the batch) of 16 rows, 32 by 64, half of them on each rank."""
    for answer in ranks.run(rank_loops.tensor_parallel, 2, timeout_s=300):
        result = answer["result"]
        assert result.proved, result.doubt
        assert answer["faults"] == [{}] * 3
        assert result.effect.speedup == pytest.approx(1.25)
        assert result.tokens is None
        assert "tokens/s" not in answer["text"]
        assert sum(result.flops[FP8].values()) == 7 * 2 * 16 * 32 * 64 / 2
        assert result.restored == ("model", "random numbers", "AdamW")


def test_a_step_that_raises_within_a_pass_of_fsdp2_is_put_back() -> None:
    for answer in ranks.run(rank_loops.raises_within, 2, timeout_s=300):
        assert answer["result"].restored == ("model", "random numbers", "AdamW", "MultiStepLR")
        assert "raised ZeroDivisionError: planted" in answer["result"].doubt
        assert answer["equal"], "two steps after it are those of a loop without a trial, bit for bit"


TRIALS = 200


def event(name: str, start: float, end: float, **more: Any) -> SimpleNamespace:
    """One event of the profiler, in microseconds."""
    given = {"device_type": DeviceType.CPU, "cpu_children": [], "is_async": False} | more
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), **given)


GPU = {"device_type": DeviceType.CUDA}


@pytest.mark.parametrize(
    ("events", "ms"),
    [
        # By hand: of 2000 to 6000 us in a collective, 2000 to 3000 are covered by a product
        (
            [
                event("aten::mm", 0, 3000),
                event("c10d::allreduce_", 2000, 5900),
                event("gloo:all_reduce", 2000, 6000, is_async=True),
                event("aten::add_", 6000, 9000),
            ],
            7.0,
        ),
        # NCCL's kernel runs from 3 to 8 ms, of which a product covers one; the last kernel ends after the host
        (
            [
                event("aten::mm", 0, 9000),
                event("nccl:all_reduce", 2900, 3000),
                event("nvjet_hsh_128x256", 1000, 4000, **GPU),
                event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3000, 8000, **GPU),
                event("vectorized_elementwise_kernel", 8000, 12_000, **GPU),
            ],
            12.0 - 4.0,
        ),
    ],
)
def test_waiting_is_what_a_collective_takes_while_nothing_else_runs(events: list[Any], ms: float) -> None:
    step = event("harness.ab step", 0, 10_000, cpu_children=[1])
    assert own_ms([step, *events]) == pytest.approx(ms)


def named_in(noise: str, size: int, slow: float, seed: int) -> str:
    """Who is named in twelve rounds of three steps of 100 ms, each rank with noise of its own; rank 1 takes `slow` more."""
    rng = np.random.default_rng(seed)
    logs = np.stack([NOISES[noise](rng, 36) for _ in range(size)])
    own = 100 * np.median(np.exp(logs).reshape(size, 12, 3), axis=2)
    own[1] *= 1 + slow
    return slow_rank([[100.0] * size] * 12, own.T.tolist(), [])


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("size", [2, 8])
def test_equal_ranks_are_never_named_and_a_slow_one_always(noise: str, size: int) -> None:
    assert {named_in(noise, size, 0.0, seed) for seed in range(TRIALS)} == {""}
    found = [told for seed in range(TRIALS) if (told := named_in(noise, size, 0.2, seed))]
    assert len(found) >= {"stalls": 0.85}.get(noise, 0.98) * TRIALS
    percent = [re.match(r"rank 1 takes about (\d+) % longer for its own part", told) for told in found]
    assert all(percent), "another rank is never named"
    assert np.median([int(p[1]) for p in percent if p]) == pytest.approx(20, abs=3)


@pytest.mark.parametrize(
    ("steps", "own", "gaps", "named"),
    [
        # A rank that slept wakes slowly: 2 of 153 ms are not what all wait for
        ([153.0, 153.0], [4.0, 6.0], [1.0, 150.0], "rank 1 spends about 149 ms more between steps"),
        ([153.0, 153.0], [4.0, 6.0], [1.0, 1.0], ""),
        # Both: the one that costs more
        (
            [153.0, 153.0],
            [60.0, 90.0],
            [1.0, 21.0],
            "rank 1 takes about 50 % longer for its own part of a step",
        ),
        ([153.0, 153.0], [60.0, 81.0], [1.0, 31.0], "rank 1 spends about 30 ms more between steps"),
        ([100.0, 130.0], [], [], "rank 1 takes about 30 % longer a step than the other ranks"),
        ([100.0], [], [], ""),
    ],
)
def test_what_costs_most_of_a_whole_step_is_named(steps: Any, own: Any, gaps: Any, named: str) -> None:
    told = slow_rank(*([each] * 4 if each else [] for each in (steps, own, gaps)))
    assert told.startswith(named)
    assert bool(told) == bool(named)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("fsdp", r"rank 1 takes about (1\d|2\d|3[0-4]) % longer for its own part of a step"),
        ("ddp", r"rank 1 spends about \d+ ms more between steps"),
    ],
)
def test_a_slow_rank_is_named_where_collectives_make_all_wait(kind: str, words: str) -> None:
    for answer in ranks.run(rank_loops.slowed, 2, kind, timeout_s=300):
        result = answer["result"]
        assert re.match(words, result.slow_rank), (result.slow_rank, [r.of_ranks for r in result.rounds])
        assert result.slow_rank in answer["text"]
        assert not result.problem
