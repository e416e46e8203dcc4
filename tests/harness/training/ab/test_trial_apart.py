"""Ranks that are given other trials, or leave one before the others. Oracle: what is planted on rank 1."""

from __future__ import annotations

import pytest
import rank_loops_apart

from harness.machine import ranks


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
    for answer in ranks.run(rank_loops_apart.other_trial, 2, what):
        assert words in answer["problem"]
        assert "\n" not in answer["problem"]
        assert not answer["proved"]
        assert answer["speedup"] is None
        assert answer["done"]
        assert answer["steps_run"] == (0, 0), "the step runs plain, before anything was switched"
        assert answer["turn"] == 1
        assert "no ratio: the ranks are not in one trial" in answer["text"]


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
