"""Trials on two ranks over gloo: faults, other trials, FSDP2, tensor parallelism.

Oracles: planted clocks and faults; bits of weights.
"""

from __future__ import annotations

import re

import on_ranks
import pytest
import rank_loops

from harness.training.ab.result import BASE, FP8


@pytest.mark.parametrize(
    "group_is_seen", [True, False]
)  # Lightning and accelerate form it when training begins
def test_two_ranks_switch_together_and_the_slower_one_counts(group_is_seen: bool) -> None:
    answers = on_ranks.run(rank_loops.data_parallel, 2, group_is_seen)
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
        pytest.param("tensorwise", True, True, True, marks=pytest.mark.slow),
    ],
)
def test_a_sharded_model_is_switched_and_proved(
    recipe: str, gathers: bool, demanded: bool, by_trial: bool
) -> None:
    for answer in on_ranks.run(rank_loops.sharded, 2, recipe, gathers, demanded, by_trial):
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
    first, second = answers = on_ranks.run(rank_loops.odd_rank, 2, what)
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
    for answer in on_ranks.run(rank_loops.reports_early, 2):
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
    for rank, answer in enumerate(on_ranks.run(rank_loops.other_trial, 2, what)):
        result, fails = answer["result"], what == "cannot begin" and rank == 1
        assert words.removeprefix("rank 1: " if fails else "") in result.problem
        assert "\n" not in result.problem
        assert (result.proved, result.rounds, answer["done"], answer["hooks"]) == (False, (), True, 0)
        assert result.steps_run == (0, 0), "the step runs plain, before anything was switched"
        assert (answer["turn"], answer["raised"]) == ((0, "planted") if fails else (1, ""))
        assert (result.decision, result.data()["speedup"], result.tables()) == ("cannot tell", None, [])
        assert result.ranks == 2


def test_a_tensor_parallel_model_is_switched_and_proved_on_every_rank() -> None:
    """FLOPs by hand: 7 products (none for the gradient of the batch) of 16 rows, 32 by 64, half of them on each rank."""
    for answer in on_ranks.run(rank_loops.tensor_parallel, 2, timeout_s=300):
        result = answer["result"]
        assert result.proved, result.doubt
        assert answer["faults"] == [{}] * 3
        assert result.effect.speedup == pytest.approx(1.25)
        assert result.tokens is None
        assert "tokens/s" not in answer["text"]
        assert sum(result.flops[FP8].values()) == 7 * 2 * 16 * 32 * 64 / 2
        assert result.restored == ("model", "random numbers", "AdamW")


def test_a_step_that_raises_within_a_pass_of_fsdp2_is_put_back() -> None:
    for answer in on_ranks.run(rank_loops.raises_within, 2, timeout_s=300):
        assert answer["result"].restored == ("model", "random numbers", "AdamW", "MultiStepLR")
        assert "raised ZeroDivisionError: planted" in answer["result"].doubt
        assert answer["equal"], "two steps after it are those of a loop without a trial, bit for bit"
