"""Spike events: where a loss or a gradient norm leaps up and comes back, and the gap of two arms without those steps.

Spikes are judged by gate L2 alone. The gap gates work on the calm gap, in which the steps of any event of either arm
are interpolated. So a spike of the control cannot fail a candidate, and one of the candidate is not judged twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from harness.judge.verdict.curves import ema, half_life
from harness.judge.verdict.result import MIN_SEEDS, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from harness.judge.verdict.curves import Pairs
    from harness.store.stats import Vector

    Mask = NDArray[np.bool_]

SPIKE_STEPS, SPIKE_MADS, SPIKE_SHARE = 3, 6.0, 0.10
GRAD_SPIKE_STEPS, GRAD_SPIKE_TIMES = 5, 10.0
CALM_MADS, CALM_GRAD_TIMES = (
    3.0,
    3.0,
)  # an event ends below the level before it plus so much, or times so much
AFTERSHOCK_TIMES = 2.0  # an aftershock stands out by so many times as much
WINDOW_HALF_LIVES = 5  # of the blocks in which the control's noise is taken, and of the running median
MERGE_HALF_LIVES = 2  # events closer than this are one burst: an aftershock is no second event
LONGEST_HALF_LIVES = 4  # an event that lasts longer is a shift of the loss, which the gap gates must see
NOISE_TIMES = 2.0  # a block's noise counts up to so many times the median of the run's blocks
PAD_SHARE = (
    0.5  # the interpolated steps go on after an event for this share of its length: a tail decays slowly
)


class Event(NamedTuple):
    """One excursion of a loss or a gradient norm.

    Attributes:
        first, last: steps.
        kind: "spike": it came back to the level before it; "open": the run ended before it could; "shift": it did not
            come back within `LONGEST_HALF_LIVES`.
    """

    first: float
    last: float
    kind: Literal["spike", "open", "shift"]


@dataclass(frozen=True, slots=True, eq=False)
class Calm:
    """The gap of paired runs without their spikes.

    Attributes:
        pairs: the runs as they are.
        gap: candidate minus control, [S, T]; in the steps of events interpolated linearly between the neighbouring
            gaps, and held at the ends of the run.
        masked: which steps were interpolated, [S, T]. Shifts are not: the gap gates must see them.
        ends_in_spike: which runs of the candidate and of the control end within an open event, [2, S]; nobody can tell
            how they go on.
        bursts: bursts of the candidate and of the control, [2, S].
    """

    pairs: Pairs
    gap: Vector
    masked: Mask
    ends_in_spike: Mask
    bursts: NDArray[np.int64]

    def note(self, inside: Mask, raw: float) -> str:
        """What a sentence says of the interpolated steps of a window, with its figure as measured; empty without any."""
        masked = self.masked[:, inside]
        if not masked.any():
            return ""
        return f"; {masked.sum()} of {masked.size} steps lie in spikes and are interpolated, {percent(raw)} with them"


def calm(pairs: Pairs) -> Calm:
    """Finds the events of both arms and interpolates the gap across them."""
    life = half_life(pairs.length)
    arms = _events(pairs, life) if pairs.seeds else [[], []]
    gap, masked = pairs.gap, np.zeros(pairs.gap.shape, dtype=bool)
    ends_in_spike = np.zeros((2, len(pairs.seeds)), dtype=bool)
    for arm, runs in enumerate(arms):
        for i, events in enumerate(runs):
            for first, last, kind in events:
                if kind != "shift":
                    padded = last + PAD_SHARE * (last - first + 1)
                    masked[i] |= (pairs.steps >= first) & (pairs.steps <= padded)
                ends_in_spike[arm, i] |= kind == "open"
    for row, hidden in zip(gap, masked, strict=True):
        if hidden.any() and not hidden.all():
            row[hidden] = np.interp(pairs.steps[hidden], pairs.steps[~hidden], row[~hidden])
    bursts = [[_bursts(events, MERGE_HALF_LIVES * life) for events in arm] for arm in arms]
    return Calm(pairs, gap, masked, ends_in_spike, np.array(bursts, np.int64))


def _events(pairs: Pairs, life: float) -> list[list[list[Event]]]:
    """Events of the candidate's and of the control's runs, those of loss and gradient together, in order."""
    width = int(WINDOW_HALF_LIVES * life)
    arms = pairs.candidate, pairs.control
    # Early on a moving average lags far behind the falling loss; that of the difference from the typical run does not.
    # Of both arms the lower one: a spike that all runs of one arm have at one step is not the typical run's.
    typical = np.minimum(*(np.median(losses, axis=0) for losses in arms))
    smooth = [typical + ema(losses - typical, pairs.steps, life) for losses in arms]
    # A moving average stays raised after a spike, so the noise is taken around the typical run; of two runs that is
    # one of them, or nearly.
    noise = _noise(pairs.control - (typical if len(pairs.seeds) >= MIN_SEEDS else smooth[1]), width)
    found = []
    for losses, usual in zip(arms, smooth, strict=True):
        high = losses > usual + np.maximum(SPIKE_MADS * noise, SPIKE_SHARE * usual)
        runs = zip(losses, high, usual, CALM_MADS * noise, strict=True)
        found.append([list(_excursions(*run, typical, pairs.steps, SPIKE_STEPS, life)) for run in runs])
    if pairs.grad_norm is not None:
        steps, *norms = pairs.grad_norm
        for arm, of_arm in zip(found, norms, strict=True):
            for events, row in zip(arm, of_arm, strict=True):
                events += _gradient_events(row, steps, width, life)
                events.sort(key=lambda event: event.first)
    return found


def _noise(residual: Vector, width: int) -> Vector:
    """MAD-sd of the residuals, block by block, [S, T]; of a block that a spike and its tail fill no more than twice the usual."""
    length = residual.shape[1]
    sds = []
    for start in range(0, length, width):
        block = residual[:, start : start + width]
        deviation = np.abs(block - np.median(block, axis=1, keepdims=True))
        sds.append(1.4826 * np.median(deviation, axis=1))
    blocks = np.stack(sds, axis=1)
    noise = np.minimum(blocks, NOISE_TIMES * np.median(blocks, axis=1, keepdims=True))
    return np.repeat(noise, width, axis=1)[:, :length]


def _excursions(
    values: Vector,
    high: Mask,
    usual: Vector,
    allowed: Vector,
    fall: Vector,
    steps: Vector,
    least: int,
    life: float,
) -> Iterator[Event]:
    """Events that begin with a run of high values and end where the level before it is reached again.

    Args:
        values: of one run, [T].
        high: where they stand out.
        usual: their running level; its value before the event is the level to come back to.
        allowed: by how much a calm value may exceed that level.
        fall: how the level falls with the steps, but for a constant.
        steps: the logged steps.
        least: high values in a row that make an event, and calm ones that end it.
        life: half-life in steps.
    """
    near = MERGE_HALF_LIVES * life
    done, ended, level = 0, -np.inf, usual
    while True:
        # Shortly after an event the moving average is still raised by it: an aftershock need not clear that.
        again = (steps <= ended + near) & (values > level + AFTERSHOCK_TIMES * allowed)
        start, stop = (at + done for at in first_stretch((high | again)[done:], least))
        if start >= values.size:
            return
        while start > done and values[start - 1] > usual[start - 1] + allowed[start - 1]:
            start -= 1
        if steps[start] > ended + near:
            before = max(start - 1, 0)  # an aftershock keeps the level before the first shock
            level = usual[before] + np.minimum(fall - fall[before], 0)
        end = stop + first_stretch(values[stop:] <= (level + allowed)[stop:], least)[0]
        is_shift = steps[end - 1] - steps[start] > LONGEST_HALF_LIVES * life
        done = stop if is_shift else end
        last = float(steps[done - 1])
        ended = -np.inf if is_shift else last
        yield Event(
            float(steps[start]), last, "shift" if is_shift else "spike" if end < values.size else "open"
        )


def _gradient_events(norms: Vector, steps: Vector, width: int, life: float) -> list[Event]:
    # No value can exceed so many running medians that does not exceed so many times the least value.
    if first_stretch(norms > GRAD_SPIKE_TIMES * norms.min(), GRAD_SPIKE_STEPS)[0] >= norms.size:
        return []
    import pandas as pd

    usual = pd.Series(norms).rolling(width, min_periods=1).median().to_numpy()
    allowed, fall = (CALM_GRAD_TIMES - 1) * usual, np.zeros_like(norms)
    high = norms > GRAD_SPIKE_TIMES * usual
    return list(_excursions(norms, high, usual, allowed, fall, steps, GRAD_SPIKE_STEPS, life))


def _bursts(events: Sequence[Event], near: float) -> int:
    """How many bursts a run's events are, in order of their first step: overlapping and close ones are one."""
    ends = np.maximum.accumulate([-np.inf, *(event.last for event in events)])
    return int((np.array([event.first for event in events]) - ends[:-1] > near).sum())


def first_stretch(mask: Mask, least: int) -> tuple[int, int]:
    """First index and the one after the last of the first stretch of at least so many true entries; (size, size) if none."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    long = edges[edges[:, 1] - edges[:, 0] >= least]
    return (int(long[0, 0]), int(long[0, 1])) if len(long) else (mask.size, mask.size)
