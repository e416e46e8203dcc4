"""The closed forms of what compiled blocks keep. Oracle: AOTAutograd's partitioner on the same block."""

from __future__ import annotations

import pytest
from compiled_memory import block, bytes_of_a_token, kept_by_the_partitioner

from harness.advise.scale.held import kept


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
@pytest.mark.parametrize("recipe", ["", pytest.param("tensorwise", marks=pytest.mark.slow)])
def test_a_compiled_block_keeps_what_the_closed_form_says(recipe: str) -> None:
    """To the byte; FP8 keeps less than bf16, since norms and the activation are made and cast again."""
    expected = kept(block(), "none", recipe)
    assert bytes_of_a_token(kept_by_the_partitioner(recipe)) == pytest.approx(expected, abs=0.5)


def test_checkpointing_keeps_less_each_time() -> None:
    sizes = block()
    for recipe in ("", "tensorwise"):
        modes = [kept(sizes, mode, recipe) for mode in ("none", "selective", "by_op", "full")]
        assert modes == sorted(modes, reverse=True)
        assert modes[-1] == 2 * sizes.width
