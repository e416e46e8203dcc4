"""Bytes of a block under checkpointing. Oracle: the docstring's list of tensors, added up by hand for a small block."""

from __future__ import annotations

import pytest

from harness.advise.scale.kept import Block, at_work, kept

# Results of its products: q 4, k 2, v 2, o 4, gate 10, up 10, down 4
BLOCK = Block(width=4, q=4, kv=2, up=20, ffn=10, heads=2)
INPUT, PRODUCTS, ATTENTION, NORM_ROWS = 2 * 4, 2 * (4 + 2 + 2 + 4 + 10 + 10), 2 * 4 + 4 * 2, 2 * 4
NORMS_AND_SILU, GRADIENTS = 2 * (4 + 4 + 10), 2 * (4 + 4 + 20 + 10)


@pytest.mark.parametrize(
    ("checkpointing", "recipe", "bytes_kept"),
    [
        ("none", "", INPUT + PRODUCTS + ATTENTION + NORM_ROWS + NORMS_AND_SILU),
        ("none", "rowwise", INPUT + PRODUCTS + ATTENTION + NORM_ROWS + 4),
        ("none", "blockwise", INPUT + PRODUCTS + ATTENTION + NORM_ROWS + 4 + 10),
        ("selective", "", INPUT + PRODUCTS + ATTENTION + NORM_ROWS),
        ("by_op", "", INPUT + 2 * (4 + 2 + 10) + ATTENTION),
        ("full", "", INPUT),
        ("full", "rowwise", INPUT),
    ],
)
def test_what_a_block_keeps(checkpointing: str, recipe: str, bytes_kept: int) -> None:
    assert kept(BLOCK, checkpointing, recipe) == bytes_kept


@pytest.mark.parametrize(
    ("checkpointing", "recipe", "codes"),
    [("none", "", 0), ("full", "", 0), ("full", "rowwise", 2 * (4 + 10))],
)
def test_what_a_block_takes_while_its_backward_pass_runs(checkpointing: str, recipe: str, codes: int) -> None:
    """What was not kept is there again, with its gradients and, in FP8, codes along both axes."""
    again = kept(BLOCK, "none", recipe) - kept(BLOCK, checkpointing, recipe)
    assert again == (0 if checkpointing == "none" else 124 if not recipe else 92)
    assert at_work(BLOCK, checkpointing, recipe) == again + GRADIENTS + codes
