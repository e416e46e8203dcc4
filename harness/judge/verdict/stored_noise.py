"""Stored noise: how many seeds a request needs, by the spread between the seeds of runs that are stored already."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from harness.judge.verdict.curves import pair
from harness.judge.verdict.paired import heldout_gaps, late_gaps
from harness.judge.verdict.power import ALPHA, MOST, POWER, runs_needed
from harness.judge.verdict.result import MARGIN, MIN_SEEDS, percent
from harness.judge.verdict.rows import CONTROL, control_of, has_margin
from harness.store.case import LOCAL, Arm
from harness.store.printer import picked, table
from harness.store.text import duration, some

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.judge.verdict.rows import StoredSetup
    from harness.store.printer import Table, Tone


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


@dataclass(frozen=True, slots=True)
class SeedsNeeded:
    """How many seeds training runs need before they are judged: a result of the printer.

    Attributes:
        arms: axes of the set-up, arm, and the noise of a stored run of it (None: there is none).
        runs: that are planned.
        timed: those of them of which a stored run with the same axes says how long they take.
        seconds: that these take together.
    """

    arms: Sequence[tuple[Mapping[str, Any], str, Noise | None]]
    runs: int
    timed: int
    seconds: float

    tone: ClassVar[Tone] = ""

    @classmethod
    def of(
        cls, request: Sequence[tuple[Mapping[str, Any], Mapping[Arm, int]]], stored: Sequence[StoredSetup]
    ) -> SeedsNeeded:
        """Seeds needed for set-ups (axes, and how many runs of each arm, by its record), by the set-ups of stored runs."""
        took = [(n, seconds(stored, axes, arm)) for axes, arms in request for arm, n in arms.items()]
        return cls(
            [
                (axes, str(arm), best_noise(stored, axes, arm))
                for axes, arms in request
                for arm in arms
                if has_margin(arm)
            ],
            sum(n for n, _ in took),
            sum(n for n, each in took if each),
            sum(n * (each or 0.0) for n, each in took),
        )

    def lines(self) -> list[str]:
        """How many runs, and how long they take as far as stored runs say; then which arms none of them is evidence for."""
        unknown = [arm for _, arm, noise in self.arms if noise is None]
        return [
            f"{self.runs} training runs: "
            + (
                f"{f'{self.timed} of them ' * (self.timed < self.runs)}{duration(self.seconds)} of training, by stored runs with "
                "the same axes"
                if self.timed
                else "how long is unknown, no stored run has the same axes"
            ),
            *[f"no stored run says how many seeds are needed, run {MIN_SEEDS} first: {some(unknown)}"]
            * bool(unknown),
        ]

    def tables(self) -> list[Table]:
        """A row an arm."""
        every = [_compared(axes) for axes, _, _ in self.arms]
        differing = {name for axes in every for name in axes if any(o.get(name) != axes[name] for o in every)}
        return [
            table(
                f"Seeds with which two one-sided tests at {100 * ALPHA:.0f} % pass with {100 * POWER:.0f} % "
                f"(margin {percent(MARGIN)[1:]} of the loss), at the noise of stored runs",
                ["arm", ">without a gap", ">at half a margin", ">sd late", ">sd held-out", "of"],
                [
                    _cells({n: v for n, v in axes.items() if n in differing}, arm, noise)
                    for axes, arm, noise in self.arms
                    if noise
                ],
            )
        ]

    def data(self) -> dict[str, Any]:
        """Plain values; the spreads are shares of the control's loss."""
        return {
            **picked(self, "runs timed seconds"),
            "arms": [
                {"axes": axes, "arm": arm}
                | (_figures(noise) if noise else dict.fromkeys(("seeds", "seeds_at_half_a_margin", "noise")))
                for axes, arm, noise in self.arms
            ],
        }


def _figures(noise: Noise) -> dict[str, Any]:
    none, half = runs_needed(noise.sd, MARGIN)
    known = picked(noise, "run_id seeds late heldout differs")
    return {"seeds": none, "seeds_at_half_a_margin": half, "noise": known}


def _cells(axes: Mapping[str, Any], arm: str, noise: Noise) -> list[str]:
    other = f", which had {', '.join(noise.differs)}" if noise.differs else ""
    setup = " ".join(f"{k}={v}" for k, v in _compared(axes).items() if v not in (None, ""))
    return [
        f"{arm} {setup}".rstrip(),
        *(f"more than {MOST}" if n is None else str(n) for n in runs_needed(noise.sd, MARGIN)),
        *("" if sd is None else percent(sd)[1:] for sd in (noise.late, noise.heldout)),
        f"{noise.seeds} seeds of {noise.run_id}{other}",
    ]


def seconds(stored: Iterable[StoredSetup], axes: Mapping[str, Any], arm: Arm) -> float | None:
    """Median time that the training runs of an arm took in the newest stored run with these axes; None where there is none."""
    same = [setup for setup in stored if _compared(setup.axes) == _compared(axes)]
    for setup in sorted(same, key=lambda setup: setup.run_id, reverse=True):
        if took := [run.elapsed.values[-1] for run in (setup.runs_of(arm) or {}).values() if run.elapsed]:
            return float(np.median(took))
    return None


def best_noise(stored: Iterable[StoredSetup], axes: Mapping[str, Any], arm: Arm) -> Noise | None:
    """The noise of an arm in the stored run that is most like a set-up: the same axes, else the same model at least.

    Args:
        stored: set-ups of stored runs.
        axes: of the set-up that is asked for; its seed is not compared.
        arm: its record.

    Returns:
        That with the fewest axes that differ, then the most seeds, then the newest; None where no run is evidence.
    """
    wanted = _compared(axes)
    found = [_noise(setup, wanted, arm) for setup in stored if setup.axes.get("model") == wanted.get("model")]
    # Run ids begin with their time.
    newest_first = sorted(filter(None, found), key=lambda n: n.run_id, reverse=True)
    return min(newest_first, key=lambda n: (len(n.differs), -n.seeds), default=None)


def _noise(setup: StoredSetup, wanted: Mapping[str, Any], arm: Arm) -> Noise | None:
    """None where the arm was not run as named, has fewer than `MIN_SEEDS` pairs, or does not differ from its control."""
    runs = setup.runs_of(arm)
    if runs is None or arm == Arm(CONTROL):
        return None
    pairs = pair(runs, setup.arms.get(control_of(arm, setup), {}))
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
