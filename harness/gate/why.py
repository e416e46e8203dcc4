"""Why: the reason of a verdict on a time, in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.gate.decide import FEWEST_TO_CLAIM, MOST_ROUNDS, Verdict
from harness.store.effect import MIN_ROUNDS

if TYPE_CHECKING:
    from harness.gate.decide import Decision


def why(d: Decision, limit: float) -> str:
    """What decided, or what would."""
    bar = f"{math.expm1(limit):.1%}"
    if d.rounds < MIN_ROUNDS:
        return f"{d.rounds} rounds; a verdict needs at least {MIN_ROUNDS}, and {d.more} more would do"
    if d.verdict is Verdict.INCONCLUSIVE and d.low > limit and d.rounds < FEWEST_TO_CLAIM:
        return (
            f"slower by more than {bar} in {d.rounds} rounds; to call it a regression takes {FEWEST_TO_CLAIM}"
        )
    if d.verdict in (Verdict.REGRESSED, Verdict.IMPROVED):
        test = f"p {d.p:.3g}" + (
            "" if math.isnan(d.p_confirm) else f", confirmed on fresh data p {d.p_confirm:.2g}"
        )
        return f"{'slower' if d.mean > 0 else 'faster'} by more than {bar}: {test}"
    if d.verdict is Verdict.OK:
        slower = "slower, and tolerated: " if d.effect.direction == "slower" else ""
        return f"{slower}at most {math.expm1(d.high):+.1%}, below {bar}"
    again = ""
    if d.flagged and not math.isnan(d.p_confirm):
        again = f"; flagged, and {d.fresh} fresh rounds did not confirm it (p {d.p_confirm:.2g})"
    if d.apart:
        return (
            "one process a side cannot tell a change from how it was born, in however many rounds: measure both "
            f"together (--against){again}"
        )
    if d.more is None:
        return f"the difference between change and tolerance is below the noise: over {MOST_ROUNDS} rounds{again}"
    return f"about {d.more} more rounds would settle it{again}"
