"""Bytes that fused casts of a layer move, by recipe (`fp8core.kernels.traffic`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8core.kernels.traffic import TRAFFIC
from fp8core.proof.cast_stats import reads_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8core.recipe import Cast, Recipe


def cast_bytes(recipe: Recipe, sizes: Mapping[str, tuple[int, int]]) -> float:
    """What the casts of a layer move if fused kernels make them, for bfloat16 tensors.

    Two casts that differ are made one by one, and the one for the GEMM that contracts rows then writes codes for both, of
    which one is dropped.

    Args:
        recipe: the casts of the three GEMMs.
        sizes: rows and columns of each of `fp8core.history.ROLES`.
    """
    total = 0.0
    for tensor, (rows, columns) in sizes.items():
        along_1, along_0 = casts_of(recipe, tensor)
        if along_1 is not None and along_0 is not None and along_1 != along_0:
            each = bytes_of(along_1, False) + bytes_of(along_0, True)
        else:
            each = bytes_of(along_1 or along_0, along_0 is not None)
        total += rows * columns * each
    return total


def casts_of(recipe: Recipe, tensor: str) -> tuple[Cast | None, Cast | None]:
    """The casts of a tensor for the GEMM that contracts its columns, and for the one that contracts its rows."""
    first, second = (cast for _, cast in reads_of(recipe, tensor))
    return first, second


def bytes_of(cast: Cast | None, both: bool) -> float:
    """Bytes of a cast for an element, along columns alone or along both axes; of no cast 0."""
    if cast is None:
        return 0.0
    kind = {"1x32": "mx"}.get(cast.granularity, cast.granularity) if cast.scaling == "dynamic" else "delayed"
    both = both or kind == "128x128"  # for which there is one kernel
    own = ["amax", "cast"] if kind == "tensorwise" else [f"cast_{kind}"]
    own[-1] += "_both" * both
    return float(sum(TRAFFIC[name].bytes_per_element(2) for name in own))
