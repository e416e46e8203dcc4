"""What is known of training in four bits: public runs on a GPU, and verdicts on the loss of fp8core's recipes. No prediction.

`four_bits.csv` beside this file is made from the ledger of public runs by `python reports/studies/ledger.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.advise.losses import FACTOR, Loss, of
from harness.store.tables import rows_beside

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE = Path(__file__).with_suffix(".csv")


@dataclass(frozen=True, slots=True)
class PublicComparison:
    """One comparison of public runs.

    Attributes:
        precision, against: of the two sides, as the ledger calls them.
        model, parameters: that was trained.
        gpus: how many of which, on both sides.
        target: the loss at which runs end.
        time: ratio of times to the target with its interval and arms: below 1, `precision` is there sooner.
        samples: ratio of samples to the target, with its interval; above 1, `precision` needs more.
        word, gap: the verdict on losses at equal tokens; "" where there are no curves.
        source: where the runs are.
    """

    precision: str
    against: str
    model: str
    parameters: int
    gpus: str
    target: str
    time: str
    samples: str
    word: str
    gap: str
    source: str

    def lines(self, parameters: int) -> tuple[str, str]:
        """The comparison, its loss first; `parameters` of the model that was asked about say whether it is near."""
        loss = f"{self.word} ({self.gap})" if self.word else "not judged"
        far = "" if 1 / FACTOR <= self.parameters / max(parameters, 1) <= FACTOR else "; not near"
        return (
            f"{self.precision} against {self.against}, {self.model}, {self.gpus}: loss at equal tokens {loss}{far}",
            f"time to loss {self.target} {self.time}; samples {self.samples}: {self.source}",
        )


@dataclass(frozen=True, slots=True)
class FourBitEvidence:
    """All that is known.

    Attributes:
        public: runs on the GPU that was asked about.
        losses: of each recipe of four bits the comparison that says most of it.
    """

    public: tuple[PublicComparison, ...]
    losses: tuple[Loss, ...]


def known(gpu: str, recipes: Iterable[str], parameters: int, tokens: int | None) -> FourBitEvidence:
    """What is known for a GPU of the peak table, by its key; of some recipes at a size, as `harness.advise.losses.of`."""
    public = tuple(
        PublicComparison(**{**row, "parameters": int(row["parameters"])})  # type: ignore[arg-type]
        for row in rows_beside(__file__, FILE.name)
        if row["gpus"].split()[-1].lower() == gpu.lower()
    )
    found = (of(name, parameters, tokens) for name in recipes)
    return FourBitEvidence(public, tuple(loss for loss in found if loss is not None))
