"""Integrity: whether curves are what they seem: whole, of the same loss and steps, each a run of its own.

Each rule looks at the evidence and yields findings. Most withhold every word; a soft one leaves a FAIL standing.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.course import FEW, MAD, ends, roughness, sd, window_of
from harness.judge.verdict.evidence import SIDES, CodedFinding
from harness.store.loss_limits import MIN_SEEDS
from harness.store.rows import grouped
from harness.store.text import plural, printable, some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from harness.judge.verdict.evidence import Evidence
    from harness.store.stats import Vector

MIN_VALUES = 3  # common steps; fewer show neither a course nor that runs are no copies
EARLY_END = 0.005  # of the steps: runs that end so far apart ended at other steps
LEAST_HOLE, HOLE_TIMES = 0.05, 2.5  # of the steps and of the usual distance of two values
WORSE_THAN_BEST = 8.0  # margins
RARE = 1e-3  # expected number by chance of what is called a copy or a repeat
SAME_BITS = 2e-7  # of a loss: one that was written twice
NEAR_COPY = 0.3  # times the steps of the difference of two runs of a side
ONE_RUN, SAME_ORDER = 4.0, 20.0  # times the wiggle that sets runs apart, and where both sides wiggle together
STRETCH, LONG = 0.1, 10  # share and number of values of a pair that are equal in a row
BARELY = 0.002  # times the noise of a step: a pair's gap that wanders less is a copy with noise
START = 0.02  # share of the steps in which a run starts
UNITS = math.log(2)  # nats in a bit


def findings(of: Evidence) -> Iterator[CodedFinding]:
    """What each rule finds; the later ones need runs with a course."""
    for rule in RULES:
        yield from rule(of)
    if enough(of):
        for rule in COURSE_RULES:
            yield from rule(of)


def enough(of: Evidence) -> bool:
    """Whether there is a course to compare."""
    return min(map(len, of.sides)) > 1 and of.whole[0].size >= MIN_VALUES and bool((of.whole[1] > 0).all())


def few(of: Evidence) -> Iterator[CodedFinding]:
    """Enough runs and values."""
    if min(map(len, of.sides)) < MIN_SEEDS:
        yield CodedFinding(
            "few_runs", f"{len(of.base)} and {len(of.candidate)} runs; {MIN_SEEDS} a side are the least"
        )
    if (count := of.whole[0].size) < MIN_VALUES:
        yield CodedFinding(
            "few_values",
            f"{plural(count, 'step')} after step 0 that every run has; {MIN_VALUES} are the least",
        )
    if of.alone:
        yield CodedFinding("seed_missing", f"no partner for {some([printable(name) for name in of.alone])}")


def broken(of: Evidence) -> Iterator[CodedFinding]:
    """NaN, infinity, or a loss far above the first ones; 0 or less is no loss."""
    broke = [[run for run in side if run.broken.any()] for side in of.sides]
    if broke[0]:
        yield CodedFinding(
            "base_broke",
            f"{len(broke[0])} of {len(of.base)} base runs met NaN, or losses far above the first",
        )
    elif broke[1]:
        ended = [run for run in broke[1] if run.broken[-1]]
        word = f"{len(ended or broke[1])} of {len(of.candidate)} candidate runs {'end in' if ended else 'met'} NaN"
        yield CodedFinding(
            "not_finite" if ended else "broke", f"{word}, or losses far above the first", is_soft=True
        )
    if low := [run.name for run in of.runs if (run.values[np.isfinite(run.values)] <= 0).any()]:
        yield CodedFinding(
            "not_positive",
            f"a loss of 0 or less in {some([*map(printable, low)])}: some loggers write 0 for NaN",
        )


def absent(of: Evidence) -> Iterator[CodedFinding]:
    """A run has a loss at its end, and no long hole where others have values."""
    lacking = [
        f"{printable(run.name)} has none after step {run.steps[-1]:g} of {run.last:g}"
        for run in of.runs
        if run.last - run.steps[-1] >= run.spacing
    ]
    lacking += [f"{printable(run.name)}: {printable(run.unfinished)}" for run in of.runs if run.unfinished]
    if lacking:
        yield CodedFinding("unfinished", some(lacking))
    every = np.unique(np.concatenate([run.steps for run in of.runs]))
    every = every[(every > 0) & (every <= of.end)]
    for run in of.runs:
        apart = np.diff(run.steps, prepend=min(0.0, run.steps[0]))
        for i in np.flatnonzero((apart > HOLE_TIMES * run.spacing) & (apart > LEAST_HOLE * of.end)):
            first, last = (run.steps[i - 1] if i else 0.0), run.steps[i]
            if ((every > first + of.near) & (every < last - of.near)).sum() >= 2:
                yield CodedFinding(
                    "hole",
                    f"{printable(run.name)} has no loss between steps {first:g} and {last:g}; others have",
                )
                return


def missing(of: Evidence) -> Iterator[CodedFinding]:
    """No run lacks single values where all of the other side's have them: a logger that leaves NaN out writes none."""
    for mine, theirs in (of.sides, of.sides[::-1]):
        grid = min(theirs, key=lambda run: run.steps.size)
        steps = grid.steps[(grid.steps > 0) & (grid.steps <= of.end)]
        for run in mine:
            lost = steps[~of.nearest(run, steps)[1]]
            if lost.size and run.spacing < HOLE_TIMES * grid.spacing / 2:  # else it logs more seldom
                yield CodedFinding(
                    "missing",
                    f"{printable(run.name)} has no loss at {plural(lost.size, 'step')}, as {lost[0]:g}, where the other side has",
                    is_soft=True,
                )
                break


def early_end(of: Evidence) -> Iterator[CodedFinding]:
    """Runs end together, or all at the first value under a target: later only the slow ones would be left."""
    last = [float(run.steps[-1]) for run in of.runs]
    if max(last) - min(last) <= max(of.near if math.isfinite(of.near) else 0, EARLY_END * of.end):
        return
    ended = ", ".join(
        f"{name} {' to '.join(f'{step:g}' for step in sorted({min(own), max(own)}))}"
        for name, own in zip(SIDES, (last[: len(of.base)], last[len(of.base) :]), strict=True)
    )
    if not stops_at_target(of):
        yield CodedFinding(
            "stopped_early",
            f"runs end at other steps ({ended}): what came later was not compared",
            is_soft=True,
        )


def stops_at_target(of: Evidence) -> bool:
    """Whether a target was named, or every run ends at its first loss under one that they share."""
    if of.target is not None:
        return all(run.values[-1] <= of.target and (run.values[:-1] > of.target).all() for run in of.runs)
    if any(run.values.size < 2 for run in of.runs):
        return False
    return max(run.values[-1] for run in of.runs) < min(run.values[:-1].min() for run in of.runs)


def starts(of: Evidence) -> Iterator[CodedFinding]:
    """Losses are equal before training."""
    first = max(float(run.steps[0]) for run in of.runs)
    if first > max(START * of.end, 0):
        return
    values = [[float(np.interp(first, run.steps, run.values)) for run in side] for side in of.sides]
    (low, high), (least, most) = ((min(side), max(side)) for side in values)
    apart = max(least - high, low - most)
    if apart > of.margin * abs(low) and (first <= 0 or apart > high - low + most - least):
        yield CodedFinding(
            "other_start",
            f"{low:.4f} to {high:.4f} and {least:.4f} to {most:.4f} at step {first:g}",
            is_soft=of.paired,  # runs of one seed start together: then the forward pass differs
        )


def units(of: Evidence) -> Iterator[CodedFinding]:
    """One unit: the sides' losses are not log 2 apart all along, as nats and bits are."""
    _, losses = of.whole
    if not losses.size:
        return
    n = len(of.base)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.median(losses[n:], axis=0) / np.median(losses[:n], axis=0))
    off = np.abs(np.abs(logs) + math.log(UNITS))  # a bit is log 2 nats
    if (off < START).all():
        yield CodedFinding(
            "other_units",
            f"the sides' losses are {math.exp(abs(logs[-1])):.3f} times apart at every step: nats and bits?",
        )


def coarse(of: Evidence) -> Iterator[CodedFinding]:
    """The log prints enough digits to see the margin."""
    _, losses = of.whole
    step, level = max(map(resolution, losses)), float(np.median(losses[: len(of.base), -1]))
    if step > of.margin * level / 2:
        yield CodedFinding("coarse_log", f"losses are printed in steps of {step:g}, over half a margin")


def learning(of: Evidence) -> Iterator[CodedFinding]:
    """The base learns, to the end; no side ends worse than its best."""
    losses, n = of.whole[1], len(of.base)
    steps, margin = losses.shape[1], of.margin
    base = losses[:n]
    fall = fall_of(of)
    if not fall > 0:
        yield CodedFinding("idle", "the base's loss does not fall: nothing was learned, or this is no loss")
    window = max(3, window_of(steps))
    middle, last = (float(np.median(ends(base, window, back))) for back in ((steps - window) // 2, 0))
    if steps >= 8 and (half := middle / last - 1) <= margin:
        yield CodedFinding(
            "still",
            f"the base's loss falls by {100 * half:.2f} % over the last half: it stands still",
            is_soft=True,
        )
    for name, side in zip(SIDES, (base, losses[n:]), strict=True):
        course = _calm(np.median(side, axis=0), window_of(steps))
        if course[-1] > course.min() * (1 + WORSE_THAN_BEST * margin):
            yield CodedFinding(
                "worse_than_its_best",
                f"the {name} ends {100 * (course[-1] / course.min() - 1):.2f} % above its best",
                is_soft=True,
            )
        if course[-1] > course[0]:
            # a candidate that diverges from a base that learns may fail
            yield CodedFinding(
                "rises",
                f"the {name}'s values rise: no loss, or it diverges",
                is_soft=name != SIDES[0] and fall > 0,
            )


def _calm(course: Vector, window: int) -> Vector:
    """A course without the noise of single steps: the ends of windows, or of single values the median of three."""
    if window > 1:
        pieces = course.size // window
        return ends(course[course.size - pieces * window :].reshape(pieces, window), window)
    around = np.stack([course[:-2], course[1:-1], course[2:]])
    return np.concatenate([course[:1], np.median(around, axis=0), course[-1:]])


def fall_of(of: Evidence) -> float:
    """By what share of its end the base's loss falls, from the first common step."""
    base = of.whole[1][: len(of.base)]
    steps = base.shape[1]
    first = ends(base, max(1, steps // 50), steps - max(1, steps // 50))
    return float(np.median(first) / np.median(ends(base, window_of(steps))) - 1)


def repeats(of: Evidence) -> Iterator[CodedFinding]:
    """No run repeats the value before more often than its digits explain."""
    from scipy.special import bdtrc

    for run, values in zip(of.runs, of.whole[1], strict=True):
        steps = np.diff(values)
        ties, usual = int((steps == 0).sum()), sd(steps - np.median(steps)) + 1e-300
        step = resolution(values)
        chance = min(0.999, step / usual + 1e-9) if step else 1e-9
        if ties >= 2 and bdtrc(ties - 1, steps.size, chance) * len(of.runs) < RARE:
            yield CodedFinding(
                "repeats", f"{printable(run.name)}: {ties} of {steps.size} losses repeat the one before"
            )
            return


def one_run(of: Evidence) -> Iterator[CodedFinding]:
    """The runs of a side are not one run with noise: they do not share most of their wiggle. A data order that both sides share
    makes runs alike too, but then the sides wiggle together, and runs still differ by their weights."""
    losses, n = np.log(of.whole[1]), len(of.base)
    if losses.shape[1] < FEW or of.paired:
        return
    late = slice(losses.shape[1] // 3, None)
    means = [side.mean(axis=0)[late] for side in (losses[:n], losses[n:])]
    wiggles = [np.diff(mean, 3) for mean in means]
    with np.errstate(invalid="ignore", divide="ignore"):
        together = np.nan_to_num(np.corrcoef(wiggles))[0, 1] > 0.5
    for name, side, mean, wiggle in zip(SIDES, (losses[:n], losses[n:]), means, wiggles, strict=True):
        own = math.sqrt(float((roughness(side[:, late] - mean) ** 2).mean()) * len(side) / (len(side) - 1))
        signs = np.sign(wiggle)  # of noise three in four change, of a smooth course few do
        shared = roughness(mean) / max(own, 1e-300)
        if shared > (SAME_ORDER if together else ONE_RUN) and (signs[1:] != signs[:-1]).mean() > 0.5:
            yield CodedFinding(
                "one_run",
                f"{name}: its runs share {shared:.3g} times the wiggle that sets them apart",
            )


def copies(of: Evidence) -> Iterator[CodedFinding]:
    """No run is another: equal in a stretch, but for rounding or a little noise, or one step off."""
    losses = of.whole[1]
    named = [printable(run.name) for run in of.runs]
    for code, found in grouped((each[2], each) for each in _copies(losses, len(of.base), of.paired)).items():
        shown = [f"{named[i]} and {named[j]}: {why}" for i, j, _, why in found]
        left = len(losses) - len({j for _, j, *_ in found})
        what = (
            "are one"
            if code == "copies"
            else "hardly differ"
            if code == "barely_differs"
            else "are the base's"
        )
        yield CodedFinding(
            code,
            f"{plural(len(found), 'pair')} of runs {what}, {left} of {len(losses)} runs are left: {some(shown, 2)}",
        )


def off_grid(of: Evidence) -> Iterator[CodedFinding]:
    """Losses between the common steps, which are not compared, do not lie above those at them."""
    common = of.whole[0]
    for run, losses in zip(of.runs, of.whole[1], strict=True):
        between = ~run.broken & (run.steps > common[0]) & (run.steps < common[-1])
        between[of.nearest(run, common)[0]] = False
        off = run.values[between] / np.interp(run.steps[between], common, losses) - 1
        if off.size >= MIN_VALUES and (above := float(np.median(off))) > WORSE_THAN_BEST * of.margin:
            yield CodedFinding(
                "off_grid",
                f"{printable(run.name)}: losses between the common steps are {100 * above:.2g} % above",
                is_soft=True,
            )
            return


def resolution(values: Vector) -> float:
    """The step of the decimals that a log prints: 0 where none is seen in 7 digits."""
    finite = values[np.isfinite(values)]
    for step in (0.1, 0.05, 0.02, 0.01, 5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4, 5e-5, 2e-5, 1e-5, 1e-6, 1e-7):
        if np.all(np.abs(finite / step - np.round(finite / step)) < 1e-4):
            return step
    return 0.0


def _copies(losses: Vector, base: int, paired: bool) -> Iterator[tuple[int, int, str, str]]:
    """Pairs of runs that are one, the code and why; the first so many runs are the base's."""
    from scipy.special import chdtri, pdtrc

    runs, steps = losses.shape
    pairs = list(itertools.combinations(range(runs), 2))
    partner = np.array([paired and j - i == runs // 2 for i, j in pairs])
    printed = [resolution(row) for row in losses]
    alike = np.array([printed[i] == printed[j] for i, j in pairs])
    same_side = np.array([(i < base) == (j < base) for i, j in pairs])
    top, count = float(np.abs(losses).max()), len(pairs)
    (near, beside, longest, same, wander, usual), done = np.zeros((6, count)), 0
    for i in range(runs - 1):
        apart = losses[i] - losses[i + 1 :]
        equal = np.abs(apart) <= SAME_BITS * top
        half = np.array([[max(printed[i], other) / 2 * 1.0001] for other in printed[i + 1 :]])
        moved = np.diff(apart, axis=1)
        moved -= np.median(moved, axis=1, keepdims=True)
        own = slice(done, done := done + runs - 1 - i)
        near[own], longest[own] = equal.mean(axis=1), [stretch(row) if row.any() else 0 for row in equal]
        same[own] = (np.abs(apart) <= half).mean(axis=1)
        beside[own] = ((np.abs(apart) <= 3 * half) & ~equal).mean(
            axis=1
        ) / 2  # one printed digit apart, to either side
        wander[own] = np.sqrt((moved**2).mean(axis=1))
        usual[own] = MAD * np.median(np.abs(moved), axis=1)

    def chance(rates: Vector) -> float:
        """Chance that two values are equal, by the pairs that are no copies."""
        kept = np.sort(rates)[: max(1, int(0.8 * rates.size))].mean() if rates.size > 3 else 0.0
        return float(np.clip(kept, 0.5 / steps / count, 1))

    equals = {kind: chance(near[alike == kind]) for kind in (True, False)}
    whole = np.flatnonzero((same == 1) & ~partner)
    by_rounding = (
        max(printed) > 0
        and whole.size
        and pdtrc(whole.size - 1, count * chance(same) ** max(steps / 4, 2)) < RARE
    )
    sides = [usual[same_side & np.array([(i < base) is side for i, _ in pairs])] for side in (True, False)]
    reference = max(float(np.median(side)) for side in sides if side.size)
    free = 0.6 * (steps - 2)
    limit = min(chdtri(free, 1 - 1e-5 / count) / free, NEAR_COPY**2) if steps >= 6 else 0.0
    for k, (i, j) in enumerate(pairs):
        length, far = longest[k], wander[k] / reference if reference > 0 else math.inf
        if partner[
            k
        ]:  # pairs start together, and may stay near: a long stretch of equal bits is none of that
            tail = stretch(np.abs(losses[i] - losses[j])[1:] == 0)
            if tail >= max(LONG, STRETCH * steps) or (steps <= LONG and tail >= max(MIN_VALUES, steps // 2)):
                yield i, j, "equals_base", f"{tail} values in a row are equal"
            elif same[k] == 1 and max(printed[i], printed[j]):
                yield i, j, "equals_base", "equal but for rounding"
            elif steps >= 2 * LONG and far < BARELY:
                yield (
                    i,
                    j,
                    "barely_differs",
                    f"their difference wanders {far:.1g} as much as that of other seeds",
                )
            continue
        by_chance = max(equals[bool(alike[k])], beside[k]) ** length * steps * count
        shifted = any(np.array_equal(losses[a][1:], losses[b][:-1]) for a, b in ((i, j), (j, i)))
        if length >= max(MIN_VALUES, 0.05 * steps) and by_chance < RARE:
            yield i, j, "copies", f"{length:.0f} values in a row are equal"
        elif by_rounding and same[k] == 1:
            yield i, j, "copies", "equal but for rounding"
        elif far**2 < limit and (same_side[k] or not paired):
            yield i, j, "copies", f"their difference wanders {far:.2g} as much as that of other runs"
        elif steps > 4 and shifted:
            yield i, j, "copies", "one step off"


def stretch(equal: NDArray[np.bool_]) -> int:
    """The longest run of true entries."""
    edges = np.flatnonzero(np.diff(equal, prepend=False, append=False)).reshape(-1, 2)
    return int((edges[:, 1] - edges[:, 0]).max(initial=0))


def pairs_mixed(of: Evidence) -> Iterator[CodedFinding]:
    """Runs of one seed share their batches: their steps are most alike."""
    losses, n = of.whole[1], len(of.base)
    if not of.paired or n < MIN_SEEDS or losses.shape[1] < FEW:
        return
    moves = [np.diff(np.log(side) - np.log(side).mean(axis=0), axis=1) for side in (losses[:n], losses[n:])]
    moves = [np.clip(each, -4 * sd(each), 4 * sd(each)) for each in moves]  # a spike is none that pairs share
    with np.errstate(invalid="ignore", divide="ignore"):
        alike = np.nan_to_num(np.corrcoef(np.vstack(moves))[:n, n:])
    if alike.max() > 0.5 and (alike.argmax(axis=1) == np.arange(n)).mean() < 0.6:
        yield CodedFinding(
            "pairs_mixed", "runs of one seed are less alike than runs of other seeds: these are no pairs"
        )


RULES: tuple[Callable[[Evidence], Iterator[CodedFinding]], ...] = (
    few, broken, absent, missing, early_end, starts, units,
)  # fmt: skip
COURSE_RULES: tuple[Callable[[Evidence], Iterator[CodedFinding]], ...] = (
    coarse, learning, off_grid, repeats, one_run, copies, pairs_mixed,
)  # fmt: skip
