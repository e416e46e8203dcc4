"""Ranks that are given other trials, or leave one before the others. Oracle: what is planted on rank 1."""

from __future__ import annotations

import pytest
import rank_loops_apart

from harness.machine import ranks


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("seed", "rank 1 has seed=1, rank 0 seed=0"),
        ("block", "rank 1 has block=1, rank 0 block=4"),
        ("recipe", "rank 1 has recipe='rowwise'"),
        ("layers", "rank 1 has FP8 layers=1, rank 0 FP8 layers=2"),
        ("after", "rank 1 has ends in FP8=True, rank 0 ends in FP8=False"),
        ("restore", "'AdamW'"),
        ("casts", "rank 1 has recipes of the layers="),
        ("history", "rank 1 has recipes of the layers="),
    ],
)
def test_ranks_with_other_trials_get_no_ratio(what: str, words: str) -> None:
    for answer in ranks.run(rank_loops_apart.other_trial, 2, what):
        assert words in answer["problem"]
        assert "\n" not in answer["problem"]
        assert not answer["proved"]
        assert answer["speedup"] is None
        assert answer["done"]
        assert answer["steps_run"] == (0, 0), "the step runs plain, before anything was switched"
        assert answer["turn"] == 1
        assert "no ratio: the ranks are not in one trial" in answer["text"]


def test_ranks_with_one_trial_are_proved() -> None:
    for answer in ranks.run(rank_loops_apart.other_trial, 2, "nothing"):
        assert answer["proved"], answer["doubt"]
        assert answer["rounds"] == 3
        assert answer["steps_run"] == (19, 33)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "rank 1: the loop raised ZeroDivisionError: planted"),
        ("closes", "rank 1: closed the trial before its end"),
    ],
)
def test_a_rank_that_leaves_between_steps_tells_the_others(how: str, words: str) -> None:
    first, _ = ranks.run(rank_loops_apart.leaves, 2, how)
    assert first["problem"] == words
    assert first["done"]
    assert first["took_s"] < 30, "it did not wait for its time to be up"


def test_a_rank_that_cannot_begin_tells_the_others_and_leaves_nothing_behind() -> None:
    first, second = ranks.run(rank_loops_apart.cannot_begin, 2)
    assert "rank 1: the trial could not begin: RuntimeError: planted" in first["problem"]
    assert second["raised"] == "planted"
    for answer in (first, second):
        assert answer["done"]
        assert not answer.get("hooks")


@pytest.mark.parametrize("block", [1, 2])
def test_what_profiling_costs_a_rank_is_not_its_loader(block: int) -> None:
    for answer in ranks.run(rank_loops_apart.costly_profiler, 2, block, timeout_s=300):
        assert "between steps" not in answer["slow_rank"], answer["slow_rank"]
        unseen = [note for note in answer["notes"] if note.startswith("time between steps was not seen")]
        assert bool(unseen) == (block == 1)
