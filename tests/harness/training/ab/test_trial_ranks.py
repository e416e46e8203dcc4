"""Trials on two ranks over gloo. Oracles: planted clocks and planted faults; the honest twin of each is proved and decided."""

from __future__ import annotations

import pytest
import rank_loops

from harness.machine import ranks


def test_two_ranks_switch_together_and_the_slower_one_counts() -> None:
    answers = ranks.run(rank_loops.data_parallel, 2, 1.2)
    assert answers[0]["order"] == answers[1]["order"]
    for answer in answers:
        assert answer["proved"], answer["proof"]
        assert answer["speedup"] == pytest.approx(1.25)
        assert answer["base_ms"] == pytest.approx(120.0)
        assert "the slowest of 2 ranks" in answer["text"]


@pytest.mark.parametrize(("recipe", "gather"), [("tensorwise", True), ("rowwise", False)])
def test_a_sharded_model_is_switched_and_proved(recipe: str, gather: bool) -> None:
    for answer in ranks.run(rank_loops.sharded, 2, recipe, gather, gather):
        assert answer["proved"], answer["proof"]
        assert answer["rounds"] == 3
        assert answer["faults"] == [{}] * 3
        assert ("gathered in FP8" in answer["proof"]) == gather


def test_an_all_gather_that_is_not_fp8_is_no_proof_where_it_is_demanded() -> None:
    for answer in ranks.run(rank_loops.sharded, 2, "tensorwise", False, True):
        assert not answer["proved"]
        assert "the all-gather is not in FP8" in answer["doubt"]
        assert answer["done"]


def test_a_rank_left_in_bf16_disproves_the_trial_on_every_rank() -> None:
    answers = ranks.run(rank_loops.left_in_bf16, 2, "always")
    for answer in answers:
        assert not answer["proved"]
        assert answer["rounds"] == 0
        assert "for speed: cannot tell" in answer["text"]
    assert "rank 1" in answers[0]["doubt"]


def test_a_rank_that_goes_back_to_bf16_within_a_block_takes_the_block_with_it() -> None:
    for answer in ranks.run(rank_loops.left_in_bf16, 2, "later"):
        faults = [why for each in answer["faults"] for arm, why in each.items() if arm == "fp8"]
        assert faults
        assert all("rank 1: 2 of 2 FP8 layers were not in FP8" in why for why in faults)


def test_a_rank_that_leaves_the_loop_is_named_and_nothing_hangs() -> None:
    first, _ = ranks.run(rank_loops.stops_early, 2)
    assert first["done"]
    assert "rank 1 did not answer within 2 s" in first["problem"]
    assert first["rounds"] == 0


def test_a_batch_of_another_shape_on_one_rank_takes_the_block_with_it() -> None:
    for answer in ranks.run(rank_loops.other_shapes, 2):
        (fault,) = [why for each in answer["faults"] for why in each.values()]
        assert fault.startswith("rank 1: a step of 1 forward passes of 8x32")
        assert "8x32" in fault


def test_a_rank_that_raises_ends_the_trial_of_the_others() -> None:
    first, second = ranks.run(rank_loops.raises, 2)
    assert first["done"]
    assert "rank 1: a step in " in first["problem"]
    assert "planted" in first["problem"]
    assert second["problem"].endswith("ZeroDivisionError: planted")


def test_a_report_on_one_rank_does_not_end_its_trial() -> None:
    for answer in ranks.run(rank_loops.reports_early, 2):
        assert answer["early"] is False
        assert "under way" in answer["told"]
        assert answer["proved"]
        assert answer["rounds"] == 3
