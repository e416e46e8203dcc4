"""Stored noise: how many seeds a request needs, by the spread between the seeds of runs that are stored already."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.judge.verdict import gates
from harness.judge.verdict.curves import pair
from harness.judge.verdict.power import seeds_for
from harness.judge.verdict.result import ALPHA, MARGIN, MIN_SEEDS, percent
from harness.judge.verdict.rows import CONTROL, NEGATIVE, control_of
from harness.judge.verdict.spike_events import calm
from harness.store.arm import OTHER, Arm
from harness.store.case import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from harness.judge.verdict.rows import Setup

POWER = 0.8
MOST = 200  # seeds that are tried
NOT_TESTED = (CONTROL, NEGATIVE, str(Arm(CONTROL, variant=OTHER)))  # by no paired gap inside a margin


@dataclass(frozen=True, slots=True)
class Noise:
    """The spread between seeds of one arm in one stored run.

    Attributes:
        run_id, seeds: of that run, and its pairs.
        late, heldout: sd of the paired gaps, relative to the control's loss; None where there is no held-out loss.
        differs: axes of that run that are not as asked, as "steps=100".
    """

    run_id: str
    seeds: int
    late: float
    heldout: float | None
    differs: tuple[str, ...]

    @property
    def sd(self) -> float:
        """The larger of the two: both gaps must lie within the margin."""
        return max(self.late, self.heldout or 0.0)


def lines(
    request: Sequence[tuple[Mapping[str, Any], Sequence[str]]], stored: Sequence[Setup]
) -> Iterator[str]:
    """The lines that dry_run=true prints: for each arm of each set-up the seeds that it needs, or "unknown".

    Args:
        request: axes and arms of each set-up.
        stored: the set-ups of stored runs.
    """
    yield (
        f"seeds with which two one-sided tests at {100 * ALPHA:.0f} % pass with {100 * POWER:.0f} % (margin "
        f"{percent(MARGIN)[1:]} of the loss; without a gap / at a gap of half a margin), at the noise of stored runs:"
    )
    for axes, arms in request:
        if len(request) > 1:
            yield "  " + " ".join(f"{k}={v}" for k, v in _compared(axes).items() if v not in (None, ""))
        for arm in (a for a in arms if a not in NOT_TESTED):
            noise = best_noise(stored, axes, arm)
            yield f"  {arm:<20} {_needed(noise) if noise else _unknown()}"


def best_noise(stored: Iterable[Setup], axes: Mapping[str, Any], arm: str) -> Noise | None:
    """The noise of an arm in the stored run that is most like a set-up: the same axes, else the same model at least.

    Args:
        stored: set-ups of stored runs.
        axes: of the set-up that is asked for; its seed is not compared.
        arm: its name.

    Returns:
        That with the fewest axes that differ, then the most seeds, then the newest; None where no run is evidence.
    """
    wanted = _compared(axes)
    found = [
        noise
        for setup in stored
        if setup.axes.get("model") == wanted.get("model")
        and (noise := _noise(setup, wanted, arm)) is not None
    ]
    return min(found, key=lambda n: (len(n.differs), -n.seeds, _newest_first(n.run_id)), default=None)


def _noise(setup: Setup, wanted: Mapping[str, Any], arm: str) -> Noise | None:
    """None where the arm was not run as named, has fewer than `MIN_SEEDS` pairs, or does not differ from its control."""
    fields = setup.records.get(arm)
    if fields is None or arm == CONTROL:
        return None
    runs = setup.arms.get(arm, {})
    pairs = pair(runs, setup.arms.get(control_of(fields, setup), {}))
    if len(pairs.seeds) < MIN_SEEDS or any(run.doubted for run in runs.values()):
        return None
    late = float(gates.late_gaps(calm(pairs)).std(ddof=1))
    gaps = gates.heldout_gaps(pairs)
    heldout = None if gaps is None else float(gaps.std(ddof=1))
    if not all(math.isfinite(sd) and sd > 0 for sd in (late, heldout) if sd is not None):
        return None
    own = _compared(setup.axes)
    differs = tuple(f"{k}={own.get(k)}" for k in sorted({*own, *wanted}) if own.get(k) != wanted.get(k))
    return Noise(setup.run_id, len(pairs.seeds), late, heldout, differs)


def _needed(noise: Noise) -> str:
    counts = [seeds_for(noise.sd, MARGIN, gap, POWER, MOST) for gap in (0.0, MARGIN / 2)]
    said = " / ".join(f"more than {MOST}" if n is None else str(n) for n in counts)
    heldout = "unknown" if noise.heldout is None else percent(noise.heldout)[1:]
    other = f", which had {', '.join(noise.differs)}" if noise.differs else ""
    return f"{said} (sd late {percent(noise.late)[1:]}, held-out {heldout}; {noise.seeds} seeds of {noise.run_id}{other})"


def _unknown() -> str:
    return f"no stored run of this arm: unknown; run {MIN_SEEDS} seeds first"


def _compared(axes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in axes.items() if name not in (*LOCAL, "seed")}


def _newest_first(run_id: str) -> tuple[int, ...]:
    """Run ids begin with their time."""
    return tuple(-ord(c) for c in run_id)
