"""What is known of training in four bits: public runs on a GPU, and verdicts on the loss of fp8core's recipes. No prediction.

`four_bits.csv` beside this file is made from the ledger of public runs by `python reports/studies/ledger.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.advise.losses import NEAR, GapInterval, Loss, distance, of
from harness.store.tables import rows_beside

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FILE = Path(__file__).with_suffix(".csv")


@dataclass(frozen=True, slots=True)
class PublicComparison:
    """One comparison of public runs.

    Attributes:
        precision, against: of the two sides, as the ledger calls them.
        model, parameters, tokens: that was trained, and how long to the target; 0: not known.
        target: the loss at which runs end.
        word, gap, interval, arms: the verdict on losses at equal tokens and its gap, over all arms; "" where there are no curves.
        samples: ratio of samples to the target over all arms, with its interval; above 1, `precision` needs more.
        differs: how many settings differ beside the precision.
        gpu: of the machine that both sides used, by its key in the peak table; "" where no machine has both.
        gpus: how many of which.
        time, time_arms: ratio of times to the target there, with its interval, and of which arms: below 1, `precision` is sooner.
        source: where the runs are.
    """

    precision: str
    against: str
    model: str
    parameters: int
    tokens: int
    target: str
    word: str
    gap: str
    interval: GapInterval | None
    arms: str
    samples: str
    differs: int
    gpu: str
    gpus: str
    time: str
    time_arms: str
    source: str

    @property
    def loss(self) -> str:
        """The verdict on losses at equal tokens, with its gap."""
        interval = f"({self.interval})" if self.interval else ""
        return " ".join(filter(None, (self.word or "not judged", self.gap, interval)))

    def lines(self, parameters: int, tokens: int | None) -> tuple[str, str]:
        """The comparison, its loss first; the size that was asked about says whether it is near."""
        far = "" if distance((self.parameters, self.tokens), (parameters, tokens)) <= NEAR else "; not near"
        return (
            f"{self.precision} against {self.against}, {self.model}, {self.arms}: loss at equal tokens {self.loss}, "
            f"samples to {self.target}: {self.samples}{far}",
            f"{self.gpus}: in {self.time} of the time, {self.time_arms}; {self.differs} other settings differ: {self.source}",
        )


@dataclass(frozen=True, slots=True)
class FourBitEvidence:
    """All that is known.

    Attributes:
        public: comparisons timed on the GPU that was asked about.
        elsewhere: how many others the ledger has.
        losses: of each recipe of four bits the comparison that says most of it; None: it was judged at no size.
    """

    public: tuple[PublicComparison, ...]
    elsewhere: int
    losses: Mapping[str, Loss | None]


def comparisons() -> tuple[PublicComparison, ...]:
    """Every line of the table."""
    found = []
    for row in rows_beside(__file__, FILE.name):
        numbers = {name: int(row[name]) for name in ("parameters", "tokens", "differs")}
        texts: dict[str, Any] = {n: text for n, text in row.items() if n not in ("low", "high", "confidence")}
        found.append(PublicComparison(**{**texts, **numbers, "interval": GapInterval.of(row)}))
    return tuple(found)


def known(gpu: str, recipes: Iterable[str], parameters: int, tokens: int | None) -> FourBitEvidence:
    """What is known for a GPU of the peak table, by its key; of some recipes at a size, as `harness.advise.losses.of`."""
    every = comparisons()
    here = tuple(each for each in every if each.gpu == gpu)
    left = {each.source for each in every} - {each.source for each in here}
    return FourBitEvidence(here, len(left), {name: of(name, parameters, tokens) for name in recipes})
