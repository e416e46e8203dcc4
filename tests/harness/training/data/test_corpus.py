"""Batches: pure functions of their arguments, windows of the text, never of its held-out part."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.store.errors import UsageError
from harness.training.data.corpus import Corpus, split


def counting(length: int = 1000) -> Corpus:
    """Token i is i, so a window shows where it was cut."""
    return split("counting", length, "", np.arange(length, dtype=np.uint16))


def test_windows_and_targets() -> None:
    """Oracle: the text itself: a window counts up by one and its targets are one further on."""
    corpus = counting()
    x, y = corpus.batch(7, 3, 64, 16)
    assert x.shape == y.shape == (64, 16)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(16))
    assert y.max() < 900  # the last tenth is held out
    assert x.is_contiguous()
    assert y.is_contiguous()


def test_batches_depend_on_step_and_seed_only() -> None:
    """Oracle: the contract: no state between calls, and a batch per step and per seed."""
    corpus = counting()
    first = corpus.batch(5, 0, 8, 16)[0]
    corpus.batch(6, 0, 8, 16)
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002  # the global state must not matter
    assert torch.equal(corpus.batch(5, 0, 8, 16)[0], first)
    others = [corpus.batch(step, seed, 8, 16)[0] for step, seed in ((6, 0), (5, 1), (0, 5))]
    assert not any(torch.equal(other, first) for other in others)


def test_known_places() -> None:
    """Oracle: numpy's Philox with the key (seed, step), drawn here anew; a stored number guards against a change of
    numpy's stream."""
    places = np.random.Generator(np.random.Philox(key=[2, 11])).integers(0, 900 - 16, 4)
    assert counting().batch(11, 2, 4, 16)[0][:, 0].tolist() == places.tolist() == [779, 266, 600, 359]


def test_every_window_can_be_drawn() -> None:
    """Oracle: enumeration: with 9 training tokens and windows of 6 there are three places, all met in 200 draws."""
    corpus = split("ten", 10, "", np.arange(10, dtype=np.uint8))
    starts = {int(x[0, 0]) for x, _ in (corpus.batch(step, 0, 1, 6) for step in range(200))}
    assert starts == {0, 1, 2}


def test_held_out_windows() -> None:
    """Oracle: the contract: the same at every call, from the held-out part, spread over it to its last token."""
    corpus = counting()
    batches = corpus.heldout_batches(3, 2, 16)
    assert len(batches) == 3
    starts = [int(row[0]) for x, _ in batches for row in x]
    assert starts[0] == 900
    assert starts == sorted(set(starts))
    assert batches[-1][1][-1, -1] == 999
    again = corpus.heldout_batches(3, 2, 16)
    assert all(torch.equal(one[0], two[0]) for one, two in zip(batches, again, strict=True))


@pytest.mark.parametrize(
    ("length", "block", "message"),
    [
        (10, 9, "the training part has 9 tokens, a window needs 9 and a target; .* seq=8 at most"),
        (0, 4, "the training part has 0 tokens"),
    ],
)
def test_text_shorter_than_a_block(length: int, block: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        counting(length).batch(0, 0, 1, block)


def test_held_out_part_shorter_than_a_block() -> None:
    with pytest.raises(UsageError, match="data=counting: the held-out part has 10 tokens"):
        counting(100).heldout_batches(1, 1, 16)


def test_negative_seed() -> None:
    with pytest.raises(UsageError, match=r"seed=-1: batches are drawn for .* seeds of 0 or more"):
        counting().batch(0, -1, 1, 16)
