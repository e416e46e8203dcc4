"""Bytes of fp8core's casts under torch.compile, counted by `python tests/studies/compiled_casts.py`; a test holds them to its page.

What a cast of an input costs depends on what makes the input. The figures of a recipe are means over the inputs of a
Llama block by elements: two are made by a norm, one by attention, with which nothing fuses, and one by SwiGLU.
"""

from __future__ import annotations

# recipe -> case of reports/published/studies/compiled-casts.md -> bytes an element beyond bf16 of input, weight, output gradient
COUNTED: dict[str, dict[str, tuple[float, float, float]]] = {
    "tensorwise": {
        "Linear": (6.0, 8.0, 6.0),
        "RMSNorm -> Linear": (2.0, 8.0, 6.0),
        "SwiGLU -> Linear": (4.0, 8.0, 6.0),
    },
    "rowwise": {
        "Linear": (6.0, 8.0, 6.0),
        "RMSNorm -> Linear": (4.0, 8.0, 6.0),
        "SwiGLU -> Linear": (0.0, 6.0, 6.0),
    },
    "rowwise_with_gw_hp": {
        "Linear": (3.0, 8.0, 3.0),
        "RMSNorm -> Linear": (1.0, 8.0, 3.0),
        "SwiGLU -> Linear": (1.0, 8.0, 3.0),
    },
    "delayed": {
        "Linear": (6.0, 6.0, 6.0),
        "RMSNorm -> Linear": (0.0, 6.0, 6.0),
        "SwiGLU -> Linear": (4.0, 6.0, 6.0),
    },
    "blockwise": {
        "Linear": (8.0, 8.0, 8.0),
        "RMSNorm -> Linear": (6.0, 8.0, 8.0),
        "SwiGLU -> Linear": (4.0, 8.0, 8.0),
    },
}
# case -> columns of the inputs that are made so in a block of Llama-3-8B
_COLUMNS = {"Linear": 4096, "RMSNorm -> Linear": 2 * 4096, "SwiGLU -> Linear": 14336}


def counted(recipe: str, tensor: int) -> float | None:
    """Mean bytes an element of one tensor of a Linear, beyond what bf16 moves.

    Args:
        recipe: a key of `fp8core.RECIPES`.
        tensor: 0 the input, 1 the weight, 2 the output gradient.

    Returns:
        None where the recipe is not on that page.
    """
    if recipe not in COUNTED:
        return None
    total = sum(columns * COUNTED[recipe][case][tensor] for case, columns in _COLUMNS.items())
    return total / sum(_COLUMNS.values())
