"""Course: what the losses of two sides show, from the first common step to the last.

Everything is a share of the base's median course, so that one margin holds along the way. Runs are compared by one
statistic: of unpaired runs Welch's difference of means, of runs paired by seed the mean of their differences. Thresholds
and error rates: docs/evidence.md and reports/published/studies/loss-verdict-error-rates.md.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.evidence import CodedFinding
from harness.store.stats import Welch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from harness.store.stats import Vector

    Labels = Sequence[str]

MAD = 1.4826  # times the median absolute deviation: the sd of a normal law
FEW = 12  # common steps; fewer show neither roughness nor smoothness
SHORT = 20  # common steps; fewer are compared at the last one
WINDOW, WIDE = (
    0.05,
    0.10,
)  # share of the steps at the end, and where noise inside the runs makes up most of their spread
MOST_PIECES = 64  # of the course, each of which must lie within the margin
COURSE_LEVEL = 0.005  # two-sided, of all pieces together
SPIKE_SDS, SPIKE_MARGINS = 8.0, 4.0
MOST_SPIKES = 0.2  # of a run's values
ASKED = 0.0025  # the margin below which a stray end is no evidence, whatever margin was asked for
STRAY_MARGINS, STRAY_SDS = 8.0, 6.0
ROUGHER = 1.5  # times the other side's wiggle, beyond which one side is smoothed or swings
UNEVEN_P = 0.0005
ENDS_P = 0.003  # of so many candidate runs that end in a spike by chance


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """The gap of the sides at the end: every way to see its error, of which the widest counts.

    Attributes:
        ways: over runs, and over clusters of runs where there are any.
        window: how many last values of a run were taken.
        inside: share of the spread between runs that noise inside of them makes up; NaN where it is not known.
        figures: what was compared, of each run of the base and of the candidate, as shares.
    """

    ways: tuple[Welch, ...]
    window: int
    inside: float
    figures: tuple[Vector, Vector]

    @property
    def gap(self) -> float:
        """Candidate minus base, as a share of the base."""
        return self.ways[0].difference

    @property
    def error(self) -> float:
        """The largest standard error."""
        return max(way.error for way in self.ways)

    def interval(self, confidence: float) -> tuple[float, float]:
        """The hull of all ways' intervals."""
        ends = [way.interval(confidence) for way in self.ways]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def p_within(self, margin: float) -> float:
        """The larger one-sided p of a gap within the margin."""
        return max(
            way.p_within(margin) if way.error else float(abs(way.difference) > margin) for way in self.ways
        )


@dataclass(slots=True, eq=False)
class Course:
    """Losses [runs, K] of both sides at K common steps, and what follows from them.

    Args:
        base: of the base's runs, in any unit, above 0.
        candidate: the same.
        margin: of equivalence, a share of the base's loss.
        paired: row i of both sides is one seed.
        window: how many last values count; 0: chosen from the data.
        between: standard deviation between clusters as a share, where each side has one.
        clusters: of each run, its machine, stack or submission; empty where that is not known.
    """

    base: Vector
    candidate: Vector
    margin: float
    paired: bool = False
    window: int = 0
    between: float = 0.0
    clusters: tuple[Labels, Labels] = ((), ())
    shares: tuple[Vector, Vector] = field(init=False)
    calm: tuple[Vector, Vector] = field(init=False)  # the shares, with what is usual in place of spikes
    spikes: tuple[NDArray[np.bool_], NDArray[np.bool_]] = field(init=False)
    spike_limit: float = field(init=False)
    shared_noise: float = field(init=False)
    own_noise: float = field(init=False)
    end: End = field(init=False)

    def __post_init__(self) -> None:
        level = np.median(self.base, axis=0) if len(self.base) > 2 else self.base.mean(axis=0)
        self.shares = self.base / level - 1, self.candidate / level - 1
        self.spike_limit, self.spikes, self.calm = self._spikes()
        self.shared_noise, self.own_noise = self._noises()
        self.end = self._end()

    @property
    def steps(self) -> int:
        """K."""
        return self.base.shape[1]

    @property
    def gap(self) -> Vector:
        """The course of the gap, [K]: difference of the sides' medians, so that spikes of single runs do not count."""
        b, c = self.shares
        return np.asarray(
            np.median(c - b, axis=0) if self.paired else np.median(c, axis=0) - np.median(b, axis=0)
        )

    @property
    def unseen(self) -> float:
        """Variance of the gap between clusters, which no run shows where each side has one."""
        return 2 * self.between**2 * (max(len(set(side)) for side in self.clusters) <= 1)

    def findings(self) -> Iterator[CodedFinding]:
        """What withholds PASS along the way; all of it is soft."""
        for rule in (
            self._course,
            self._swing,
            self._trend,
            self._smooth,
            self._more_spikes,
            self._ends_high,
            self._stray,
            self._uneven,
        ):
            yield from (found._replace(is_soft=True) for found in rule())

    def contrast(self, figure: Callable[[Vector], Vector], extra: float) -> Welch:
        """The gap of a figure of each run, along the way: one variance of both sides."""
        base, candidate = map(figure, self.shares)
        return difference(base, candidate, self.paired, extra, pooled=True)

    def _spikes(self) -> tuple[float, tuple[NDArray[np.bool_], NDArray[np.bool_]], tuple[Vector, Vector]]:
        """(limit, values far above what their run and their side usually are at that step, shares without them)."""
        rests = [side - np.median(side, axis=0) for side in self.shares]
        rests = [rest - np.median(rest, axis=1, keepdims=True) for rest in rests]
        late = np.concatenate([rest[:, self.steps // 3 :] for rest in rests])
        limit = max(SPIKE_SDS * sd(late), SPIKE_MARGINS * self.margin)
        above = rests[0] > limit, rests[1] > limit
        # a run that is often above has no usual level: it swings
        cut = [each & (each.mean(axis=1, keepdims=True) <= MOST_SPIKES) for each in above]
        base, candidate = (
            share - np.where(each, rest, 0) for share, each, rest in zip(self.shares, cut, rests, strict=True)
        )
        return limit, above, (base, candidate)

    def _noises(self) -> tuple[float, float]:
        """(variance of a step of the gap that runs of a side share, sd of a step that sets runs apart).

        Runs of one data order wiggle together: that shows in the gap of the sides and not in the spread of their runs.
        """
        if self.steps < FEW:
            return 0.0, math.nan
        late = slice(self.steps // 4, None)
        b, c = self.shares
        if self.paired:
            own = roughness((c - b - (c - b).mean(axis=0))[:, late]) ** 2
            variance = own.mean() / (len(b) - 1)
        else:
            own = np.concatenate(
                [roughness((x - x.mean(axis=0))[:, late]) ** 2 * len(x) / (len(x) - 1) for x in (b, c)]
            )
            variance = own.mean() * (1 / len(b) + 1 / len(c))
        seen, expected = (
            float(roughness(self.gap[late])) ** 2,
            1.5 * float(variance),
        )  # of a median: 1.5 of a mean's
        return (seen - expected if seen > 2 * expected else 0.0), math.sqrt(own.mean())

    def _end(self) -> End:
        chosen, inside = self.window or window_of(self.steps), math.nan
        if (
            not self.window
            and chosen == 1
            and self.steps >= 6
            and any(side[:, -1].any() for side in self.spikes)
        ):
            chosen = 3  # a spike at the last value must not decide
        if self.steps >= 2 * chosen and chosen >= 5:
            now, before = ([ends(side, chosen, back) for side in self.shares] for back in (0, chosen))
            inside = (
                self._variance([a - b for a, b in zip(now, before, strict=True)])
                / 2
                / max(self._variance(now), 1e-300)
            )
            if not self.window and inside > 0.5:
                chosen = max(chosen, math.ceil(WIDE * self.steps))
        base, candidate = (ends(side, chosen) for side in self.shares)
        # a median of up to five values: 1.4 times the variance of a mean
        extra = self.shared_noise * (1.4 if 1 < chosen <= 5 else 1.0) / chosen
        found = ways(base, candidate, self.clusters, self.paired, extra, self.unseen)
        return End(tuple(found), chosen, inside, (base, candidate))

    def _variance(self, figures: Sequence[Vector]) -> float:
        """Variance of a run about its side, or of a pair about the others."""
        if self.paired:
            return float((figures[1] - figures[0]).var(ddof=1)) / 2
        return float(sum(x.var() * x.size for x in figures) / (sum(x.size for x in figures) - 2))

    def _course(self) -> Iterator[CodedFinding]:
        """The gap of the means lies within the margin in every piece: halves, quarters, ... down to single steps."""
        pieces = list(_pieces(self.steps))
        worst, where = 0.0, ""
        for start, stop in pieces:
            extra = self.shared_noise / (stop - start) + self.unseen
            gap = self.contrast(partial(_piece, start=start, stop=stop), extra)
            low, high = gap.interval(1 - COURSE_LEVEL / len(pieces))
            beyond = max(low, -high) - self.margin
            if beyond > worst:
                worst, where = (
                    beyond,
                    f"{100 * gap.difference:+.2f} % between {start / self.steps:.0%} and {stop / self.steps:.0%} of the course",
                )
        if where:
            yield CodedFinding("course", where)

    def _swing(self) -> Iterator[CodedFinding]:
        """The gap wiggles more than runs do, and the candidate's course more than the base's."""
        if self.steps < FEW:
            return
        late = slice(self.steps // 4, None)
        wiggle = float(roughness(self.gap[late]))
        sides = [
            float(roughness(np.log(np.median(side, axis=0))[late])) for side in (self.base, self.candidate)
        ]
        noise = (
            1.5 * self.own_noise**2 * (1 / len(self.base) + (0 if self.paired else 1 / len(self.candidate)))
        )
        if sides[1] > 3 * sides[0] * (1 + 6 / (self.steps - self.steps // 4)) and wiggle > max(
            3 * math.sqrt(noise), self.margin
        ):
            yield CodedFinding("swing", f"the gap swings by {100 * wiggle:.2f} % (sd)")

    def slope(self) -> Welch:
        """Growth of the gap per e-fold of steps over the last half; spikes are cut."""
        half = slice(self.steps // 2, None)
        at = np.log(np.arange(1, self.steps + 1))[half]
        at -= at.mean()

        def fitted(x: Vector) -> Vector:
            middle = np.median(x[:, half], axis=1, keepdims=True)
            calm = np.clip(x[:, half], middle - self.spike_limit / 2, middle + self.spike_limit / 2)
            return np.asarray(calm @ at / (at @ at))

        return self.contrast(fitted, self.shared_noise / float(at @ at))

    def _trend(self) -> Iterator[CodedFinding]:
        """The gap grows over the last half, and meets the margin at twice the steps."""
        if self.steps < 8:
            return
        slope = self.slope()
        ahead = slope.difference * math.log(2)
        if slope.interval(0.995)[0] > 0 and self.end.gap + ahead > self.margin and ahead > self.margin / 2:
            yield CodedFinding(
                "trend", f"the gap grows: {100 * (self.end.gap + ahead):+.2f} % at twice the steps"
            )

    def _smooth(self) -> Iterator[CodedFinding]:
        """Runs wiggle about their neighbours as much on both sides, at every scale: else one side is smoothed, or swings."""
        scale = 1
        while self.steps // scale >= FEW:
            least = min(map(len, self.shares)) - 1
            pieces = self.steps // scale
            base, candidate = (_wander(side, scale) for side in self.calm)
            free = (pieces - pieces // 4) * least
            limit = math.log(ROUGHER) + 3.5 * 1.17 * math.sqrt(2 / free)
            ratio = candidate / max(base, 1e-300)
            if self.paired and (seen := self._gap_swings(scale)):
                yield CodedFinding("swing", seen)
                return
            if abs(math.log(max(ratio, 1e-12))) > limit:
                code = "smooth" if scale == 1 or ratio < 1 else "swing"
                yield CodedFinding(
                    code,
                    f"runs of the candidate wander {ratio:.2f} times as much as the base's, over {scale} steps",
                )
                return
            scale *= 4

    def _gap_swings(self, scale: int) -> str:
        """Gaps of pairs keep their level: within a run they vary less than runs of the base about each other, or the margin."""
        b, c = self.calm
        gap, noise = (
            _means(x, scale)[:, self.steps // scale // 4 :].std(axis=1)
            for x in (c - b, (b - np.roll(b, 1, axis=0)) / math.sqrt(2))
        )
        seen, limit = (math.sqrt(float((x**2).mean())) for x in (gap, noise))
        if seen <= max(limit, self.margin):
            return ""
        return f"gaps, means of {scale} steps, vary within a run by {100 * seen:.2g} % (sd), runs of the base by {100 * limit:.2g} %"

    def _more_spikes(self) -> Iterator[CodedFinding]:
        counts = [side.sum(axis=1) for side in self.spikes]
        base, mine = counts
        if mine.mean() - base.mean() < 1 or mine.min() <= base.max():
            return
        roots = difference(np.sqrt(base + 0.375), np.sqrt(mine + 0.375), paired=False)
        shown = roots.interval(0.99)[0] > 0 if roots.error else mine.min() - base.max() >= 2
        if shown:
            yield CodedFinding(
                "spikes", f"{mine.sum()} in {mine.size} runs against {base.sum()} in {base.size}"
            )

    def _ends_high(self) -> Iterator[CodedFinding]:
        """No candidate run ends within a spike of three values, and no more of them at a spike than spikes elsewhere explain."""
        from scipy.special import bdtrc

        above = [
            share - end[:, None] > self.spike_limit
            for share, end in zip(self.shares, self.end.figures, strict=True)
        ]
        theirs, mine = (each[:, ::-1].cumprod(axis=1).sum(axis=1) for each in above)
        ended = int((mine > 0).sum())
        elsewhere = sum(int(each.sum()) for each in above) - int(mine.sum())
        rate = elsewhere / (sum(each.size for each in above) - np.maximum(mine, 1).sum())
        by_chance = bdtrc(ended - 1, mine.size, rate)
        if (ended > 1 and by_chance < ENDS_P) or mine.max() >= max(3, theirs.max() + 1):
            yield CodedFinding(
                "ends_high",
                f"{ended} candidate runs end far above their last values, {int((theirs > 0).sum())} of the base's",
                is_soft=True,
            )

    def _stray(self) -> Iterator[CodedFinding]:
        """No run's end lies far from its side's."""
        b, c = self.end.figures
        sides = [c - b] if self.paired else [b, c]
        off = [np.abs(side - np.median(side)) for side in sides]
        far = max(
            STRAY_MARGINS * max(self.margin, ASKED), STRAY_SDS * MAD * float(np.median(np.concatenate(off)))
        )
        if max(float(each.max()) for each in off) > far:
            yield CodedFinding("stray", f"a run ends more than {100 * far:.2g} % off its side")

    def _uneven(self) -> Iterator[CodedFinding]:
        """Runs lie equally far apart on both sides."""
        from scipy.special import fdtr, fdtrc

        spreads = [float((np.median(x - np.roll(x, 1, axis=0), axis=1) ** 2).mean()) / 2 for x in self.shares]
        ratio = max(spreads[1], 1e-300) / max(spreads[0], 1e-300)
        freedom = [2 * len(side) / 3 for side in self.shares]  # neighbours overlap
        if min(fdtrc(freedom[1], freedom[0], ratio), fdtr(freedom[1], freedom[0], ratio)) < UNEVEN_P:
            yield CodedFinding(
                "uneven", f"runs of the candidate lie {math.sqrt(ratio):.2g} times as far apart as the base's"
            )


def difference(
    base: Vector, candidate: Vector, paired: bool, extra: float = 0.0, pooled: bool = False
) -> Welch:
    """The difference of two sides' means: of pairs Student's, else Welch's or with one variance.

    Args:
        base: a figure a run.
        candidate: the same; of pairs in the same order.
        paired: whether they are pairs.
        extra: a variance that the figures do not show.
        pooled: one variance of both sides.
    """
    if paired:
        d = candidate - base
        return Welch(float(d.mean()), math.sqrt(float(d.var(ddof=1)) / d.size + extra), d.size - 1)
    if pooled:
        freedom = base.size + candidate.size - 2
        variance = (base.var() * base.size + candidate.var() * candidate.size) / freedom
        error = math.sqrt(variance * (1 / base.size + 1 / candidate.size) + extra)
        return Welch(float(candidate.mean() - base.mean()), error, freedom)
    found = Welch.of(base, candidate)
    return Welch(found.difference, math.hypot(found.error, math.sqrt(extra)), found.degrees)


def ways(
    base: Vector,
    candidate: Vector,
    clusters: tuple[Labels, Labels],
    paired: bool = False,
    extra: float = 0.0,
    unseen: float = 0.0,
) -> Iterator[Welch]:
    """The difference of the sides over runs, and over clusters of runs where there are several.

    Args:
        base: a figure a run.
        candidate: the same.
        paired: whether they are pairs.
        clusters: of each run, its cluster; empty where that is not known.
        extra: a variance that no figure shows.
        unseen: a variance that runs do not show and clusters do.
    """
    labels = [sorted(set(side)) for side in clusters]
    yield difference(base, candidate, paired, extra + unseen)
    if all(labels) and [len(each) for each in labels] != [1, 1]:
        means = [
            np.array([figures[np.array(side) == name].mean() for name in names])
            for figures, side, names in zip((base, candidate), clusters, labels, strict=True)
        ]
        paired = paired and clusters[0] == clusters[1]
        if not paired or means[0].size > 1:
            yield difference(means[0], means[1], paired, extra, pooled=True)


def window_of(steps: int) -> int:
    """How many last values of so many count: one, or the last 5 %, at least three."""
    return 1 if steps < SHORT else max(3, math.ceil(WINDOW * steps))


def ends(values: Vector, window: int, back: int = 0) -> Vector:
    """Last so many values of each run in one, `back` values before the end: the median of up to 5, else a trimmed mean."""
    stop = values.shape[-1] - back
    cut = values[..., max(0, stop - window) : stop]
    if window == 1:
        return np.asarray(cut[..., -1], np.float64)
    if window <= 5:
        return np.asarray(np.median(cut, axis=-1), np.float64)
    out = int(0.2 * cut.shape[-1])
    return np.asarray(np.sort(cut, axis=-1)[..., out : cut.shape[-1] - out].mean(axis=-1), np.float64)


def _pieces(steps: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of halves, quarters, ... at most 64 pieces, and at the least single steps."""
    seen, count = set(), 1
    while count < min(steps, MOST_PIECES):
        count = min(2 * count, steps, MOST_PIECES)
        edges = np.linspace(0, steps, count + 1).round().astype(int).tolist()
        seen |= set(itertools.pairwise(edges))
    return iter(sorted(seen))


def _piece(values: Vector, start: int, stop: int) -> Vector:
    return ends(values[:, start:stop], stop - start)


def sd(values: Vector) -> float:
    """Robust sd of values about 0."""
    return MAD * float(np.median(np.abs(values)))


def roughness(values: Vector) -> Vector:
    """Robust sd of the wiggle from step to step, along the last axis: third differences, of which a smooth course has none."""
    return np.asarray(
        MAD * np.median(np.abs(np.diff(values, 3, axis=-1)), axis=-1) / math.sqrt(20), np.float64
    )


def _means(runs: Vector, scale: int) -> Vector:
    """Means of so many steps each, [runs, K // scale]."""
    pieces = runs.shape[1] // scale
    return runs[:, : pieces * scale].reshape(len(runs), pieces, scale).mean(axis=2)


def _wander(runs: Vector, scale: int) -> float:
    """Robust size of the steps of runs about their neighbours, of means over so many steps; a spike touches two of them."""
    means = _means(runs, scale)
    return sd(np.diff(means - np.roll(means, 1, axis=0), axis=1)[:, means.shape[1] // 4 :])
