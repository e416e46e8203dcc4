"""One published FP8 speedup with its conditions, and the conditions that several share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.advise.casts import RecipeCost

META_H100 = "H100 500 W, HBM2e"  # Meta's own, in which most published runs were made


@dataclass(frozen=True, slots=True)
class Case:
    """One published ratio.

    Attributes:
        key: short name.
        model: a name of `harness.training.models.MODELS` or of `published_speedups.OTHER_MODELS`; "" for a single layer.
        machine: `META_H100`, or a key of the peak table.
        recipe: what ran.
        measured: FP8 over bf16.
        source: where it stands.
        batch, seq: of one GPU's forward pass, of a tensor-parallel group's.
        bf16: published tokens/s of a GPU in bf16; None where it is not.
        plan: arguments of `harness.training.step.Step`.
        left_out: last words of names that stayed in bf16.
        layer: tokens, K and N of a single layer.
        known: all conditions that the prediction needs are published.
        note: what is not.
    """

    key: str
    model: str
    machine: str
    recipe: RecipeCost
    measured: float
    source: str
    batch: int = 1
    seq: int = 8192
    bf16: float | None = None
    plan: Mapping[str, object] = field(default_factory=dict)
    left_out: tuple[str, ...] = ("head",)
    layer: tuple[int, int, int] | None = None
    known: bool = True
    note: str = ""
