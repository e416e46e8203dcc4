"""ProofOutcome: what `fp8core.verify` found of the FP8 layers of an arm, as one word in `resolved` beside its line."""

from __future__ import annotations

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
    row's own; rows from before `LAYERS` was stored say how many GEMMs it counted."""
    word, layers = str(resolved.get(FIELD) or ""), resolved.get("fp8_layers")
    if word == ProofOutcome.PROVED and layers is not None:
        count = layers if isinstance(layers, int) else len(layers)
        own = {str(resolved.get("recipe")).split(",")[0]: count}
        if resolved.get("fp8_gemms", count) < count or (resolved.get(LAYERS) or own) != own:
            return ProofOutcome.UNPROVEN
    return ProofOutcome(word) if word in set(ProofOutcome) else ProofOutcome.UNPROVEN
