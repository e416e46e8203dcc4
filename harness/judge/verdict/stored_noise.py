"""Stored noise: how many seeds a request needs, by the spread between the seeds of runs that are stored already."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge.verdict.curves import pair
from harness.judge.verdict.paired import heldout_gaps, late_gaps
from harness.judge.verdict.power import ALPHA, MOST, POWER, runs_needed
from harness.judge.verdict.result import MARGIN, MIN_SEEDS, percent
from harness.judge.verdict.rows import CONTROL, NEGATIVE, control_of
from harness.store.case import LOCAL, OTHER, Arm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from harness.judge.verdict.rows import Setup

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
            said = f"no stored run of this arm: unknown; run {MIN_SEEDS} seeds first"
            if noise := best_noise(stored, axes, arm):
                heldout = "unknown" if noise.heldout is None else percent(noise.heldout)[1:]
                other = f", which had {', '.join(noise.differs)}" if noise.differs else ""
                said = (
                    f"{' / '.join(f'more than {MOST}' if n is None else str(n) for n in runs_needed(noise.sd, MARGIN))} (sd late "
                    f"{percent(noise.late)[1:]}, held-out {heldout}; {noise.seeds} seeds of {noise.run_id}{other})"
                )
            yield f"  {arm:<20} {said}"


def seconds(stored: Iterable[Setup], axes: Mapping[str, Any], arm: str) -> float | None:
    """Median time that the training runs of an arm took in the newest stored run with these axes; None where there is none."""
    same = [setup for setup in stored if _compared(setup.axes) == _compared(axes)]
    for setup in sorted(same, key=lambda setup: setup.run_id, reverse=True):
        if took := [run.elapsed.values[-1] for run in setup.arms.get(arm, {}).values() if run.elapsed]:
            return float(np.median(took))
    return None


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
    found = [_noise(setup, wanted, arm) for setup in stored if setup.axes.get("model") == wanted.get("model")]
    # Run ids begin with their time.
    newest_first = sorted(filter(None, found), key=lambda n: n.run_id, reverse=True)
    return min(newest_first, key=lambda n: (len(n.differs), -n.seeds), default=None)


def _noise(setup: Setup, wanted: Mapping[str, Any], arm: str) -> Noise | None:
    """None where the arm was not run as named, has fewer than `MIN_SEEDS` pairs, or does not differ from its control."""
    if arm == CONTROL or arm not in setup.records:
        return None
    runs = setup.arms.get(arm, {})
    pairs = pair(runs, setup.arms.get(control_of(setup.records[arm], setup), {}))
    if len(pairs.seeds) < MIN_SEEDS or any(run.doubted for run in runs.values()):
        return None
    gaps = late_gaps(pairs), heldout_gaps(pairs)
    late, heldout = (None if of is None else float(of.std(ddof=1)) for of in gaps)
    if late is None or not all(math.isfinite(sd) and sd > 0 for sd in (late, heldout) if sd is not None):
        return None
    own = _compared(setup.axes)
    differs = tuple(f"{k}={own.get(k)}" for k in sorted({*own, *wanted}) if own.get(k) != wanted.get(k))
    return Noise(setup.run_id, len(pairs.seeds), late, heldout, differs)


def _compared(axes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in axes.items() if name not in (*LOCAL, "seed")}
