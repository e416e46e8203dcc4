"""What is known of a recipe's loss against bf16's: verdicts on stored and public runs, each with the size that it holds for.

`losses.csv` beside this file is made from them by `python reports/studies/ledger.py`; the words are those of `harness.judge.verdict`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from harness.store.tables import rows_beside

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = Path(__file__).with_suffix(".csv")
FAIL = "FAIL"
FACTOR = 4.0  # between sizes of which one says something of the other
NEAR = math.log(FACTOR) * (1 + 1e-9)
# A precision as others call it -> the recipe of fp8core that casts so; a recipe's own name stands for itself
PRECISIONS = {"FP8-current": "tensorwise", "FP8-delayed": "delayed", "MXFP8": "mxfp8"}


@dataclass(frozen=True, slots=True)
class GapInterval:
    """The interval of the gap of two losses: ends in percent of the base's loss, level as a share."""

    low: float
    high: float
    confidence: float

    @classmethod
    def of(cls, row: Mapping[str, str]) -> GapInterval | None:
        """The columns of these names; None where they are empty."""
        ends = (row["low"], row["high"], row["confidence"])
        return cls(*map(float, ends)) if all(ends) else None

    def __str__(self) -> str:
        return f"{100 * self.confidence:g} % interval {self.low:+.3f} to {self.high:+.3f} %"


@dataclass(frozen=True, slots=True)
class Loss:
    """One comparison of a recipe's loss with bf16's.

    Attributes:
        recipe: as fp8core calls it.
        model: that was trained.
        parameters, tokens: its size, and how long it was trained.
        word: PASS, FAIL or INCONCLUSIVE.
        gap: of the losses, as "+0.392 %".
        seeds: runs of each side.
        source: where the runs are.
        interval: of the gap; None where there is none.
        counts: it was found within `FACTOR` of what is asked about, in parameters and in tokens.
    """

    recipe: str
    model: str
    parameters: int
    tokens: int
    word: str
    gap: str
    seeds: str
    source: str
    interval: GapInterval | None = None
    counts: bool = False

    @property
    def fails(self) -> bool:
        """The loss is known to be worse at the size that was asked about."""
        return self.counts and self.word == FAIL


@cache
def known() -> tuple[Loss, ...]:
    """Every comparison of the table."""
    return tuple(
        Loss(
            PRECISIONS.get(row["precision"], row["precision"]),
            row["model"],
            int(row["parameters"]),
            int(row["tokens"]),
            row["word"],
            row["gap"],
            row["seeds"],
            row["source"],
            GapInterval.of(row),
        )
        for row in rows_beside(__file__, FILE.name)
    )


def of(
    recipe: str, parameters: int, tokens: int | None, among: tuple[Loss, ...] | None = None
) -> Loss | None:
    """The comparison that says most of a recipe at a size: a FAIL that counts, else the nearest; None where there is none.

    Args:
        recipe: as fp8core calls it.
        parameters: that a token meets.
        tokens: of the whole training; None: not known, so that nearness in parameters is enough for a comparison to count.
        among: comparisons; None: those of the table.
    """

    def far(one: Loss) -> float:
        return distance((one.parameters, one.tokens), (parameters, tokens))

    found = [
        replace(one, counts=far(one) <= NEAR)
        for one in (known() if among is None else among)
        if one.recipe == recipe
    ]
    return min(found, key=lambda one: (not one.fails, far(one)), default=None)


def distance(found: tuple[int, int], asked: tuple[int, int | None]) -> float:
    """How far two sizes are apart, (parameters, tokens) each: the larger |log| of their ratios; tokens None: in parameters."""
    sizes = [pair for pair in zip(found, asked, strict=True) if pair[1] is not None]
    return max(abs(math.log(there / here)) if there and here else math.inf for there, here in sizes)
