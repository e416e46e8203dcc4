"""Bytes that fused casts of a layer move, by recipe: a closed form of `fp8core.kernels.traffic`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8core.recipe import Cast, Recipe

# The tensors of a layer, and which operand of which GEMM each of them is.
TENSORS = {
    "input": (("output", "a"), ("grad_weight", "b")),
    "weight": (("output", "b"), ("grad_input", "b")),
    "grad_output": (("grad_input", "a"), ("grad_weight", "a")),
}
_BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}  # rows and columns under one scale


def cast_bytes(recipe: Recipe, sizes: Mapping[str, tuple[int, int]]) -> float:
    """What the casts of a layer move if fused kernels make them (`fp8core.kernels.traffic`), for bfloat16 tensors.

    Each element of a tensor is read once to be cast, and once more before that where its scale depends on elements
    that are not at hand: those of the whole tensor, or of rows and columns at once. One byte is written for each
    GEMM that takes the tensor in FP8, since the two contract it along different axes; scales of blocks are written
    too, those of rows and of whole tensors are left out. Two casts that differ are made one by one, and the one for
    the GEMM that contracts rows then writes codes for both, of which one is dropped.

    Args:
        recipe: the casts of the three GEMMs.
        sizes: rows and columns of each of `TENSORS`.
    """
    total = 0.0
    for tensor, places in TENSORS.items():
        along_1, along_0 = (getattr(recipe.gemms[name], side) for name, side in places)
        if along_1 == along_0 or along_1 is None or along_0 is None:
            each = (
                0.0
                if along_1 is None and along_0 is None
                else _bytes(along_1 or along_0, along_0 is not None)
            )
        else:
            each = _bytes(along_1, False) + _bytes(along_0, True)
        rows, columns = sizes[tensor]
        total += rows * columns * each
    return total


def one_layout_bytes(cast: Cast) -> float:
    """What a cast of one element moves where only the GEMM that contracts columns takes it."""
    return _bytes(cast, False)


def _bytes(cast: Cast, both: bool) -> float:
    """Bytes for an element: reads, codes of one or both layouts, and their scales."""
    first = cast.scaling == "dynamic" and (
        cast.granularity == "tensorwise" or (cast.granularity == "rowwise" and both)
    )
    layouts = 1 + (both or cast.granularity == "128x128")  # for which there is one kernel
    scales = 1 if cast.granularity == "128x128" else layouts
    return 2 * (1 + first) + layouts + scales * _scale_bytes(cast)


def _scale_bytes(cast: Cast) -> float:
    """Bytes of block scales for an element: float32, or one byte for MX."""
    across, along = _BLOCKS.get(cast.granularity, (0, 0))
    size = 1 if cast.granularity == "1x32" else 4
    return size / (across * along) if across else 0.0
