"""ProofOutcome: what `fp8core.verify` found of the FP8 layers of an arm, as one word in `resolved` beside its line."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELD = "verify_outcome"


class ProofOutcome(StrEnum):
    """Value of `resolved[FIELD]`; "" where nothing was asked."""

    NONE = ""
    PROVED = "proved"
    DISPROVED = "disproved"  # it found something wrong
    UNPROVEN = "unproven"  # it found nothing wrong, and could not compare everything or not run at all


def proof_outcome(resolved: Mapping[str, Any]) -> ProofOutcome:
    """The outcome that a row stores; a word that is none counts as unproven."""
    word = str(resolved.get(FIELD) or "")
    return ProofOutcome(word) if word in set(ProofOutcome) else ProofOutcome.UNPROVEN
