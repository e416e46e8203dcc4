"""Spike events: where a loss or a gradient norm leaps up and comes back, and the gap of two arms without those steps.

Spikes are judged by gate L2 alone. The gap gates work on the calm gap, in which the steps of any event of either arm
are interpolated. So a spike of the control cannot fail a candidate, and one of the candidate is not judged twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from harness.judge.verdict.curves import ema, half_life
from harness.judge.verdict.result import MIN_SEEDS, MOST_MASKED, GateResult, percent

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
MOST_WINDOWS = 4096
NOISE_TIMES = 2.0  # a block's noise counts up to so many times the median of the run's blocks
PAD_SHARE = (
    0.5  # the interpolated steps go on after an event for this share of its length: a tail decays slowly
)


@dataclass(frozen=True, slots=True)
class Event:
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
        ends_in_spike: which runs of the candidate and of the control end within an open event, [S] each; nobody can tell
            how they go on.
        bursts: by seed, bursts of the candidate and of the control, [S] each.
    """

    pairs: Pairs
    gap: Vector
    masked: Mask
    ends_in_spike: tuple[Mask, Mask]
    bursts: tuple[NDArray[np.int64], NDArray[np.int64]]

    def too_few_left(self, gate: str, inside: Mask) -> GateResult | None:
        """The result of a gate whose window consists of spikes for more than `MOST_MASKED`; None if it does not."""
        share = float(self.masked[:, inside].mean())
        if share <= MOST_MASKED:
            return None
        said = f"{100 * share:.0f} % of its steps lie in spikes of either arm; more than {100 * MOST_MASKED:g} % can't be judged"
        return GateResult(gate, "INCONCLUSIVE", said, seeds=len(self.pairs.seeds))

    def note(self, inside: Mask, raw: float) -> str:
        """What a sentence says of the interpolated steps of a window, with its figure as measured; empty without any."""
        count = int(self.masked[:, inside].sum())
        if not count:
            return ""
        return f"; {count} of {self.masked[:, inside].size} steps lie in spikes and are interpolated, {percent(raw)} with them"


def calm(pairs: Pairs) -> Calm:
    """Finds the events of both arms and interpolates the gap across them."""
    events: tuple[list[list[Event]], list[list[Event]]] = _events(pairs) if pairs.seeds else ([], [])
    masked = np.zeros(pairs.gap.shape, dtype=bool)
    gap = pairs.gap.copy()
    ends_in_spike = np.zeros((2, len(pairs.seeds)), dtype=bool)
    for arm, of_arm in enumerate(events):
        for i, of_run in enumerate(of_arm):
            for event in of_run:
                if event.kind != "shift":
                    padded = event.last + PAD_SHARE * (event.last - event.first + 1)
                    masked[i] |= (pairs.steps >= event.first) & (pairs.steps <= padded)
                ends_in_spike[arm, i] |= event.kind == "open"
    for row, hidden in zip(gap, masked, strict=True):
        if hidden.any() and not hidden.all():
            row[hidden] = np.interp(pairs.steps[hidden], pairs.steps[~hidden], row[~hidden])
    near = MERGE_HALF_LIVES * half_life(pairs.length)
    mine, theirs = (np.array([_bursts(of_run, near) for of_run in of_arm], np.int64) for of_arm in events)
    return Calm(pairs, gap, masked, (ends_in_spike[0], ends_in_spike[1]), (mine, theirs))


def _events(pairs: Pairs) -> tuple[list[list[Event]], list[list[Event]]]:
    """Events of the candidate's and of the control's runs, those of loss and gradient together, in order."""
    life = half_life(pairs.length)
    width = int(WINDOW_HALF_LIVES * life)
    # Early on a moving average lags far behind the falling loss; that of the difference from the typical run does not.
    # Of both arms the lower one: a spike that all runs of one arm have at one step is not the typical run's.
    typical = np.minimum(np.median(pairs.candidate, axis=0), np.median(pairs.control, axis=0))
    smooth = [
        typical + ema(values - typical, pairs.steps, life) for values in (pairs.candidate, pairs.control)
    ]
    # A moving average stays raised after a spike, so the noise is taken around the typical run; of two runs that is
    # one of them, or nearly.
    noise = _noise(pairs.control - (typical if len(pairs.seeds) >= MIN_SEEDS else smooth[1]), width)
    found = []
    for values, usual in zip((pairs.candidate, pairs.control), smooth, strict=True):
        high = values > usual + np.maximum(SPIKE_MADS * noise, SPIKE_SHARE * usual)
        found.append(
            [
                list(_excursions(row, above, level, CALM_MADS * sd, typical, pairs.steps, SPIKE_STEPS, life))
                for row, above, level, sd in zip(values, high, usual, noise, strict=True)
            ]
        )
    if pairs.grad_norm is not None:
        steps, *norms = pairs.grad_norm
        for of_arm, of_norms in zip(found, norms, strict=True):
            for events, row in zip(of_arm, of_norms, strict=True):
                events += _gradient_events(row, steps, width, life)
                events.sort(key=lambda event: event.first)
    return found[0], found[1]


def _noise(residual: Vector, width: int) -> Vector:
    """MAD-sd of the residuals, block by block, [S, T]; of a block that a spike and its tail fill no more than twice the usual."""
    noise = np.empty_like(residual)
    for start in range(0, residual.shape[1], width):
        block = residual[:, start : start + width]
        deviation = np.abs(block - np.median(block, axis=1, keepdims=True))
        noise[:, start : start + width] = 1.4826 * np.median(deviation, axis=1, keepdims=True)
    blocks = noise[:, ::width]
    return np.minimum(noise, NOISE_TIMES * np.median(blocks, axis=1, keepdims=True))


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
    while high[done:].any() or ended > -np.inf:
        # Shortly after an event the moving average is still raised by it: an aftershock need not clear that.
        again = (steps <= ended + near) & (values > level + AFTERSHOCK_TIMES * allowed)
        runs = _runs((high | again)[done:], least)
        if not runs:
            return
        start, stop = runs[0][0] + done, runs[0][1] + done
        while start > done and values[start - 1] > usual[start - 1] + allowed[start - 1]:
            start -= 1
        if steps[start] > ended + near:
            before = max(start - 1, 0)  # an aftershock keeps the level before the first shock
            level = usual[before] + np.minimum(fall - fall[before], 0)
        back = _runs(values[stop:] <= (level + allowed)[stop:], least)
        end = stop + back[0][0] if back else values.size
        kind: Literal["spike", "open", "shift"] = "spike" if back else "open"
        if steps[end - 1] - steps[start] > LONGEST_HALF_LIVES * life:
            kind = "shift"
        done = stop if kind == "shift" else end
        ended = -np.inf if kind == "shift" else float(steps[done - 1])
        yield Event(float(steps[start]), float(steps[done - 1]), kind)


def _gradient_events(norms: Vector, steps: Vector, width: int, life: float) -> list[Event]:
    # No value can exceed so many running medians that does not exceed so many times the least value.
    if not _runs(norms > GRAD_SPIKE_TIMES * norms.min(), GRAD_SPIKE_STEPS):
        return []
    usual = _running_median(norms, width)
    allowed = (CALM_GRAD_TIMES - 1) * usual
    high = norms > GRAD_SPIKE_TIMES * usual
    return list(_excursions(norms, high, usual, allowed, np.zeros_like(norms), steps, GRAD_SPIKE_STEPS, life))


def _running_median(values: Vector, width: int) -> Vector:
    """Median of each value and those before it, `width` of them where there are as many."""
    out = np.empty_like(values)
    head = min(width, values.size)
    rising = np.sort(np.where(np.tri(head, dtype=bool), values[:head], np.inf), axis=1)
    at = np.arange(head)
    out[:head] = (rising[at, at // 2] + rising[at, (at + 1) // 2]) / 2
    for start in range(width, values.size, MOST_WINDOWS):  # in parts, to bound memory
        stop = min(start + MOST_WINDOWS, values.size)
        windows = np.lib.stride_tricks.sliding_window_view(values[start - width + 1 : stop], width)
        out[start:stop] = np.median(windows, axis=1)
    return out


def _bursts(events: Sequence[Event], near: float) -> int:
    """How many bursts a run's events are, in order of their first step: overlapping and close ones are one."""
    count, last = 0, -np.inf
    for event in events:
        count += event.first - last > near
        last = max(last, event.last)
    return count


def _runs(mask: Mask, least: int) -> list[tuple[int, int]]:
    """First index and the one after the last of each stretch of at least so many true entries."""
    if not mask.any():
        return []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= least]
