"""What all ranks of a step must have in common before its time counts."""

from __future__ import annotations

from typing import Any

from harness.machine.ranks import RanksError

SHARED = ("tokens_per_step", "parameters", "linear_layers", "fp8_layers", "batch_shapes")


def first_fault(faults: list[str]) -> str:
    """The first rank's that has one, named; "" where none has."""
    return next((f"rank {rank} of {len(faults)}: {why}" for rank, why in enumerate(faults) if why), "")


def same_on_all(every: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of rank 0, which are those of all.

    Raises:
        RanksError: ranks that train another model, or batches of another size.
    """
    for name in SHARED:
        values = [str(one[name]) for one in every]
        if len(set(values)) > 1:
            rank = next(i for i, value in enumerate(values) if value != values[0])
            raise RanksError(
                f"rank {rank} has {name} = {values[rank]}, rank 0 {values[0]}: ranks must take the same step",
                rank,
            )
    return every[0] | {"batch_sha256": [one["batch_sha256"] for one in every]}


def proofs_differ(found: list[dict[str, object]]) -> str:
    """Why ranks whose proofs hold still did not do the same; "" if they did."""
    counts = [one.get("fp8_gemms") for one in found]
    return "" if len(set(counts)) == 1 else f"ranks ran other numbers of FP8 GEMMs: {counts}"
