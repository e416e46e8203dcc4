"""Memory: what a step takes of a GPU, and whether it fits. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


GIB = 2**30
# The step may take so much more than predicted: the largest shortfall among the published figures of
# docs/advise-accuracy.md, which a test recomputes. Up to there it is "tight".
MARGIN = 1.17
FITS, TIGHT, TOO_LARGE, UNKNOWN = "fits", "tight", "does not fit", "not predicted"


@dataclass(frozen=True, slots=True)
class Memory:
    """What a step takes.

    Attributes:
        bf16, fp8: bytes by part; `fp8` is None where nothing is converted.
        device: bytes of the GPU.
        whole: every part is predicted; False: a lower bound.
        ways: changes of the question, each of which makes it fit by the model, with the bytes that it then takes.
        unknown: whose activations are not predicted, where `whole` is False.
    """

    bf16: Mapping[str, int]
    fp8: Mapping[str, int] | None
    device: int
    whole: bool
    ways: Mapping[str, int]
    unknown: str = "this model"

    @property
    def needed(self) -> int:
        """Bytes of the step that is advised."""
        return sum((self.bf16 if self.fp8 is None else self.fp8).values())

    @property
    def word(self) -> str:
        """ "fits", "tight", "does not fit", or "not predicted" where a lower bound leaves room."""
        if self.needed > self.device:
            return TOO_LARGE
        if not self.whole:
            return UNKNOWN
        return FITS if self.needed * MARGIN <= self.device else TIGHT
