"""ProofOutcome: what `fp8core.verify` found of the FP8 layers of an arm, as one word in `resolved` beside its line."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELD = "verify_outcome"
LAYERS = "verify_layers"  # how many layers it compared, by the name of their recipe


class ProofOutcome(StrEnum):
    """Value of `resolved[FIELD]`; "" where nothing was asked."""

    NONE = ""
    PROVED = "proved"
    DISPROVED = "disproved"  # it found something wrong
    UNPROVEN = "unproven"  # it found nothing wrong, and could not compare everything or not run at all


def proof_outcome(resolved: Mapping[str, Any]) -> ProofOutcome:
    """The outcome that a row stores. Unproven: a word that is none, and a proof of other layers or of another recipe than the
    row's own; rows from before `LAYERS` was stored say nothing of these."""
    word = str(resolved.get(FIELD) or "")
    recipe, layers, compared = (resolved.get(field) for field in ("recipe", "fp8_layers", LAYERS))
    if word == ProofOutcome.PROVED and recipe and layers is not None and compared is not None:
        own = {recipe.split(",")[0]: layers if isinstance(layers, int) else len(layers)}
        if Counter(compared) != Counter(own):
            return ProofOutcome.UNPROVEN
    return ProofOutcome(word) if word in set(ProofOutcome) else ProofOutcome.UNPROVEN
