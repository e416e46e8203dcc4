"""How often the judge of loss gives which answer: simulated curves with a known truth.

    python reports/studies/verdict_error_rates.py [--draws N] [PAGE ...]

Prints the tables, writes them between their marks in each PAGE, and exits with 1 where a promised rate is missed.

Runs that share no seed fall from 4 to 2 nats; each has stationary AR(1) noise of its own, whose standard deviation is `sd`
margins at every step. Pairs fall from 3.5 to 2.1 nats: the candidate of a seed shares the control's noise and adds a gap, a
constant that differs between seeds and AR(1) noise, which together give the paired mean of the last fifth a standard
deviation between seeds of exactly `sd`. Their held-out gap has the same deviation and shares the constant. What else is
planted is a pair (candidate, control), so each fault has its honest twin: the same figure on both sides.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from documented_table import fill
from scipy.signal import lfilter

from harness.judge.verdict import Curve, Run, judge_pairs
from harness.judge.verdict.evidence import Evidence, LossRun
from harness.judge.verdict.power import seeds_for
from harness.judge.verdict.result import LATE, MARGIN
from harness.judge.verdict.rule import judge
from harness.judge.verdict.sooner import ratio_to_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.random import Generator

    from harness.store.stats import Vector

    Pair = tuple[float, float]  # candidate, control

FEWEST = 100  # draws that can show a rate of 5 %
SCATTER = 3.1  # standard deviations of a rate that a bound allows for: 0.1 % of correct rates lie beyond
OUTCOMES = ("PASS", "FAIL", "INCONCLUSIVE")
PAIRED_STEPS, PAIRED_AR = 300, 0.9
BETWEEN = 0.5  # share of the variance of a paired late mean that is constant within a seed
WORDS = "worse", "better", "not_shown", "equivalent"  # codes that the end alone gives


def stationary(generator: Generator, runs: int, steps: int, ar: float, tails: int = 0) -> Vector:
    """AR(1) noise of unit variance, [runs, steps]; `tails`: degrees of freedom of Student's t, 0 for normal noise."""
    shape = runs, steps
    fresh = (
        generator.standard_t(tails, shape) / math.sqrt(tails / (tails - 2))
        if tails
        else generator.normal(0, 1, shape)
    )
    fresh[:, 1:] *= math.sqrt(1 - ar * ar)
    return np.asarray(lfilter([1], [1, -ar], fresh, axis=1))


@dataclass(frozen=True)
class Unpaired:
    """Runs of two sides that share no seed.

    Attributes:
        name: what was planted, in words.
        runs, steps: of a side (of a cluster, where there are some); of a run.
        gap, sd: at the end, and of a run; in margins.
        ar, tails: of the noise.
        spikes: share of the points of both arms that have one, of 5 % of the loss in the median.
        shared: noise of each side's own that all of its runs share, in margins.
        clusters: machines a side; 0: not known.
        tau: sd between machines, in margins; with one machine a side the judge is told.
        fault: "middle", "early", "copies" or "best so far".
    """

    name: str = ""
    runs: int = 5
    steps: int = 100
    gap: float = 0.0
    sd: float = 0.5
    ar: float = 0.0
    tails: int = 0
    spikes: float = 0.0
    shared: float = 0.0
    clusters: int = 0
    tau: float = 0.0
    fault: str = ""

    def draw(self, generator: Generator) -> Evidence:
        """Runs of both sides."""
        t, machines = np.arange(1, self.steps + 1) / self.steps, max(1, self.clusters)
        gap = {
            "middle": (t > 0.4) & (t < 0.6),
            "early": (t > 0.05) & (t < 0.2),
        }.get(self.fault, 1 - np.exp(-10 * t))
        sides: list[Vector] = []
        for side in (0, 1):
            noise = self.sd * stationary(generator, self.runs * machines, self.steps, self.ar, self.tails)
            noise += self.shared * generator.normal(0, 1, self.steps)
            noise += self.tau * np.repeat(generator.normal(0, 1, machines), self.runs)[:, None]
            if self.fault == "copies" and side:
                noise = (sides[0] / (2 + 2 * np.exp(-5 * t)) - 1) / MARGIN + 0.1 * noise
            noise += (
                0.05
                / MARGIN
                * generator.lognormal(0, 0.5, noise.shape)
                * (generator.random(noise.shape) < self.spikes)
            )
            losses = (2 + 2 * np.exp(-5 * t)) * (1 + MARGIN * (noise + side * self.gap * gap))
            sides.append(
                np.minimum.accumulate(losses, axis=1) if side and self.fault == "best so far" else losses
            )
        runs = [
            [
                LossRun(
                    f"{side}/{i}", 100 * self.steps * t, losses, 100.0 * self.steps,
                    settings={"machine": f"{side}/{i // self.runs}"} if self.clusters else {},
                )
                for i, losses in enumerate(rows)
            ]
            for side, rows in enumerate(sides)
        ]  # fmt: skip
        return Evidence(*runs, margin=MARGIN, between=MARGIN * self.tau * (self.clusters == 1))

    def answer(self, generator: Generator) -> Iterator[str]:
        """The outcome of one draw, and "alarm" where anything but the gap at the end speaks."""
        found = judge(self.draw(generator))
        yield found.outcome
        yield from ["alarm"] * bool(set(found.codes) - set(WORDS))


@dataclass(frozen=True)
class Paired:
    """Runs paired by seed.

    Attributes:
        name: what was planted, in words.
        runs: seeds.
        sd: between seeds, of the paired late mean; in margins.
        gap: the true one, in margins.
        tails: degrees of freedom of Student's t for all noise, of the same variance; 0: normal.
        across: share of the paired gap's variance that all seeds have in common; the judge assumes 0.
        drift: gap at the end, in margins; grows with log(step) from a tenth of the run on.
        divergence: nats at the end; grows exponentially over the last quarter.
        swing: nats to either side, every five steps; 0 in the last one.
        bump: over the first fifteenth of the steps, in shares of the loss.
        one_spike: nats, for six steps in the middle of the first seed.
        spikes: expected spikes of a run, aftershocks not counted.
        every_run: how many spikes each run has besides, at random steps.
        nan: whether the last steps of the first seed are NaN.
        copies: "runs": each seed repeats the first one's runs; "control": only the control's.
    """

    name: str
    runs: int = 5
    sd: float = 0.25
    gap: float = 0.0
    tails: int = 0
    across: float = 0.0
    drift: Pair = (0.0, 0.0)
    divergence: Pair = (0.0, 0.0)
    swing: Pair = (0.0, 0.0)
    bump: Pair = (0.0, 0.0)
    one_spike: Pair = (0.0, 0.0)
    spikes: Pair = (0.0, 0.0)
    every_run: tuple[int, int] = (0, 0)
    nan: tuple[bool, bool] = (False, False)
    copies: str = ""

    def draw(self, generator: Generator) -> tuple[dict[int, Run], dict[int, Run]]:
        """Runs of a candidate and its control, by seed."""
        seeds, steps, end = self.runs, PAIRED_STEPS, 2.1
        t = np.arange(steps, dtype=np.float64)

        def ar1(count: int = steps, ar: float = PAIRED_AR) -> Vector:
            return stationary(generator, seeds, count, ar, self.tails)

        sd = self.sd * MARGIN * end
        alone = sd * math.sqrt(1 - self.across)
        fall = end + 1.4 * np.exp(-t / (steps / 8))
        shared = fall + 0.01 * ar1()
        scale = alone * math.sqrt(1 - BETWEEN)
        within = ar1() * (scale / mean_sd(round(LATE * steps)))
        between = alone * math.sqrt(BETWEEN) * ar1(1)[:, 0]
        offset = self.gap * MARGIN * end + sd * math.sqrt(self.across) * ar1(1)[0, 0]
        ends_within = scale * ar1(1)[:, 0]
        norms = np.exp(generator.normal(0, 0.1, (seeds, steps)))
        ratios = np.exp(generator.normal(0, 0.01, (seeds, steps)))
        sides = []
        for side, gap, gap_at_end in (
            (0, offset + between[:, None] + within, offset + between + ends_within),
            (1, np.zeros((seeds, steps)), np.zeros(seeds)),
        ):
            added, spikes = self._planted(side, t, fall), self._spikes(side, generator)
            loss = shared + gap + added + spikes
            heldout = shared[:, -1] + gap_at_end + added[-1] + spikes[:, -1]
            if self.nan[side]:
                loss[0, -steps // 20 :] = math.nan
            grad = norms * (ratios if side == 0 else 1.0)
            runs = [
                Run(Curve.of(curve), heldout=Curve.of([end], [steps]), grad_norm=Curve.of(norm))
                for curve, end, norm in zip(loss, heldout, grad, strict=True)
            ]
            copied = self.copies == "runs" or (self.copies == "control" and side == 1)
            sides.append(dict(enumerate(runs[:1] * seeds if copied else runs)))
        return sides[0], sides[1]

    def _planted(self, side: int, t: Vector, fall: Vector) -> Vector:
        """What is the same in all runs of one side, but for spikes; nats by step."""
        growth = np.clip(np.log10(np.maximum(t, 1) / (0.1 * t.size)), 0, None)
        late = np.clip((t / t.size - 0.75) / 0.25, 0, None)
        return (
            self.drift[side] * MARGIN * 2.1 * growth
            + self.divergence[side] * np.expm1(4 * late) / math.expm1(4)
            + self.swing[side] * np.sin(2 * np.pi * (t + 1) / 5)
            + np.where(t < t.size / 15, self.bump[side], 0) * fall
        )

    def _spikes(self, side: int, generator: Generator) -> Vector:
        """Nats that spikes add, [seeds, steps]: log-normal heights and decays, each with Poisson(1) aftershocks."""
        steps = PAIRED_STEPS
        added = np.zeros((self.runs, steps))
        added[0, steps // 2 : steps // 2 + 6] += self.one_spike[side]

        def spike(row: Vector, start: float, nats: float) -> None:
            """A linear rise over two steps, then an exponential decay."""
            age = np.arange(max(steps - int(start), 0))
            decay = 5.0 * math.exp(generator.normal(0, 0.5))
            row[int(start) :] += nats * np.minimum(1, (age + 1) / 2) * np.exp(-np.maximum(age - 1, 0) / decay)

        for row in added:
            count = int(generator.poisson(self.spikes[side])) + self.every_run[side]
            for start in generator.uniform(0.05, 1, count) * steps:
                nats = 0.8 * math.exp(generator.normal(0, 0.5))
                spike(row, start, nats)
                for delay in generator.exponential(15.0, generator.poisson(1.0)):
                    spike(row, start + delay, nats * generator.uniform(0.3, 0.9))
        return added

    def answer(self, generator: Generator) -> Iterator[str]:
        """The outcome of one draw, and the gates with their statuses."""
        verdict = judge_pairs(*self.draw(generator))
        yield verdict.outcome
        yield from (f"{gate.gate} {gate.status}" for gate in verdict.gates)


def mean_sd(count: int) -> float:
    """Standard deviation of the mean of so many successive values of unit AR(1) noise.

    Var = (1 + 2 sum over k of (1 - k/n) AR^k) / n.
    """
    lags = np.arange(1, count)
    return math.sqrt((1 + 2 * ((1 - lags / count) * PAIRED_AR**lags).sum()) / count)


@dataclass(frozen=True)
class Bound:
    """A promised rate of an outcome, of "alarm", or of a gate with a status: "L4 PASS"."""

    what: str
    limit: float
    at_least: bool = False

    def is_kept(self, rate: float, draws: int) -> bool:
        """Whether a rate over so many draws agrees with the limit, but for the scatter of the draws."""
        scatter = SCATTER * math.sqrt(self.limit * (1 - self.limit) / draws)
        return rate >= self.limit - scatter if self.at_least else rate <= self.limit + scatter


@dataclass(frozen=True)
class Row:
    """What is planted and what is promised of it; with the rates, once they are counted."""

    group: str
    planted: Unpaired | Paired
    bounds: tuple[Bound, ...] = ()
    draws: int = 0
    rates: Counter[str] = field(default_factory=Counter)

    @property
    def label(self) -> str:
        s = self.planted
        more = f", {s.steps} steps, AR {s.ar:g}, t {s.tails}" if isinstance(s, Unpaired) else ""
        return f"{self.group}, {s.name or f'gap {s.gap:g} M'}, {s.runs} runs, sd {s.sd:g} M{more}"


RARELY_FAILS, NEVER_FAILS = Bound("FAIL", 0.01), Bound("FAIL", 0.001)
HARDLY_PASSES = Bound("PASS", 0.05)
QUIET = Bound("alarm", 0.01)
CAUGHT = Bound("FAIL", 0.95, at_least=True)
LEVEL = (HARDLY_PASSES, Bound("L4 PASS", 0.05), Bound("L4h PASS", 0.05), RARELY_FAILS)


def _unpaired() -> Iterator[Row]:
    for ar, tails, runs, steps, gap in itertools.product(
        (0.0, 0.9, 0.99), (0, 3), (3, 5, 10), (10, 100, 1000), (0.0, 1.0)
    ):
        bounds = (HARDLY_PASSES, RARELY_FAILS) if gap else (NEVER_FAILS, QUIET)
        yield Row("unpaired", Unpaired("", runs, steps, gap, ar=ar, tails=tails), bounds)
    for share, runs, steps, gap in itertools.product((0.02, 0.05), (3, 10), (10, 100), (0.0, 1.0)):
        name = f"spikes in {share:.0%} of the points, {steps} steps, gap {gap:g} M"
        bounds = (HARDLY_PASSES,) if gap else (NEVER_FAILS, QUIET)
        yield Row("beside", Unpaired(name, runs, steps, gap, spikes=share), bounds)
    for clusters, tau, gap in itertools.product((1, 2, 3), (0.2, 2.0), (0.0, 1.0)):
        name = f"{clusters} v {clusters} machines of 5 runs, tau {100 * MARGIN * tau:g} %, gap {gap:g} M"
        bound = HARDLY_PASSES if gap else RARELY_FAILS
        yield Row("beside", Unpaired(name, 5, 12, gap, 0.4, clusters=clusters, tau=tau), (bound,))
    for steps in (10, 100):
        name = f"data order of each side's own (0.5 %), {steps} steps"
        yield Row("beside", Unpaired(name, 5, steps, sd=0.2, shared=2.0))
    yield Row("beside", Unpaired("gap of 4 M", 5, 100, 4.0), (HARDLY_PASSES, CAUGHT))
    for fault, name, gap, steps in (
        ("middle", "2 M in the middle, gone at the end", 2.0, 100),
        ("middle", "4 M in the middle, gone at the end", 4.0, 100),
        ("early", "4 M early, gone at the end", 4.0, 100),
        ("copies", "copies with a tenth of the noise, 20 steps", 0.0, 20),
        ("copies", "copies with a tenth of the noise, 200 steps", 0.0, 200),
        ("best so far", "best so far in the candidate, 20 steps", 0.0, 20),
        ("best so far", "best so far in the candidate, 200 steps", 0.0, 200),
    ):
        for runs in (3, 5):
            yield Row("beside", Unpaired(name, runs, steps, gap, fault=fault), (HARDLY_PASSES,))


def _paired() -> Iterator[Row]:
    for planted, *bounds in (
        (Paired("no gap"), RARELY_FAILS, Bound("PASS", 0.95, at_least=True)),
        (Paired("gap of half a margin", gap=0.5), RARELY_FAILS),
        (Paired("gap of minus one margin", gap=-1.0), *LEVEL),
        (Paired("gap of two margins", gap=2.0), HARDLY_PASSES, CAUGHT),
        (Paired("copies of one pair of runs", copies="runs", gap=0.5), HARDLY_PASSES, RARELY_FAILS),
        (Paired("copies of one control run", copies="control"), HARDLY_PASSES),
        (Paired("one spike of 1 nat in one run of the control", one_spike=(0.0, 1.0)), RARELY_FAILS),
    ):
        yield Row("planted", planted, tuple(bounds))
    for name, fault, size, *bounds in (
        ("one spike of 1 nat in one run", "one_spike", 1.0),
        ("early bump of 2 % that heals", "bump", 0.02, HARDLY_PASSES),
        ("early bump of 10 % that heals", "bump", 0.10, HARDLY_PASSES),
        ("drift to half a margin", "drift", 0.5),
        ("drift to two margins", "drift", 2.0, HARDLY_PASSES),
        ("swings of 0.3 nats", "swing", 0.3, HARDLY_PASSES),
        ("divergence by 0.1 nats at the end", "divergence", 0.1, HARDLY_PASSES),
        ("NaN in one run", "nan", True, HARDLY_PASSES, CAUGHT),
    ):  # each with its twin
        yield Row("planted", replace(Paired(name), **{fault: (size, type(size)())}), tuple(bounds))
        twin = replace(Paired(f"{name}, in both arms"), **{fault: (size, size)})
        honest = () if fault in ("nan", "swing", "divergence") else (Bound("PASS", 0.9, at_least=True),)
        yield Row("planted", twin, (RARELY_FAILS, *honest))
    for tails, sds in ((0, (0.25, 0.6, 0.8)), (3, (0.25, 0.8))):
        for gap, sd, seeds in itertools.product((0.0, 1.0), sds, (3, 5, 8, 20)):
            name = f"gap {gap:g} M{', Student t noise' * bool(tails)}"
            yield Row("seeds", Paired(name, seeds, sd, gap, tails), LEVEL if gap else (RARELY_FAILS,))
    for gap, across, seeds in itertools.product((0.0, 1.0), (0.2, 0.5), (5, 20)):
        yield Row(
            "correlated", Paired(f"gap {gap:g} M, correlation {across:g}", seeds, 0.6, gap, across=across)
        )
    for rate, seeds in itertools.product((0.4, 2.0), (3, 5, 10, 20)):
        yield Row(
            "spikes",
            Paired(f"{rate:g} spikes a run in both arms", seeds, spikes=(rate, rate)),
            (RARELY_FAILS,),
        )
    for seeds in (5, 10):
        yield Row(
            "spikes",
            Paired("2 spikes a run, none in the control", seeds, spikes=(2.0, 0.0)),
            (HARDLY_PASSES,),
        )
        yield Row(
            "spikes",
            Paired("one spike in every run, none in the control", seeds, every_run=(1, 0)),
            (HARDLY_PASSES,),
        )


ROWS = (*_unpaired(), *_paired())


def measure(row: Row, draws: int) -> Row:
    """The row with its rates."""
    generator = np.random.default_rng(zlib.crc32(row.label.encode()))
    counted = Counter(what for _ in range(draws) for what in row.planted.answer(generator))
    return replace(row, draws=draws, rates=Counter({what: n / draws for what, n in counted.items()}))


def coverage(sd: float, evaluations: int, runs: Pair, draws: int, ratio: float = 1.02) -> float:
    """Share of 95 % intervals of `ratio_to_target` that hold the true ratio, of crossings that a grid rounds up."""
    generator, hits = np.random.default_rng(0), 0
    for _ in range(draws):
        first = generator.uniform()
        sides = [
            np.ceil(evaluations * times * np.exp(generator.normal(0, sd, int(n))) - first) + first
            for times, n in zip((1.0, ratio), runs, strict=True)
        ]
        found = ratio_to_target(sides[0].tolist(), sides[1].tolist(), cell=1.0)
        hits += found.low <= ratio <= found.high
    return hits / draws


def broken_promises(rows: Sequence[Row]) -> list[str]:
    """Bounds that were missed, in words."""
    return [
        f"{r.label}: {b.what} {r.rates[b.what]:.1%}, promised at {'least' if b.at_least else 'most'} {b.limit:.1%}"
        for r in rows
        for b in r.bounds
        if not b.is_kept(r.rates[b.what], r.draws)
    ]


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """By the name of their marks in a page."""
    draws = rows[0].draws

    def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))

    def pivot(group: str, cell: Callable[[Row], str]) -> str:
        """A row a scenario and a column a number of runs."""
        of: dict[tuple[str, str], dict[int, str]] = {}
        for r in (r for r in rows if r.group == group):
            of.setdefault((r.planted.name, f"{r.planted.sd:g}"), {})[r.planted.runs] = cell(r)
        numbers = sorted({n for found in of.values() for n in found})
        body = ([*key, *(found.get(n, "") for n in numbers)] for key, found in of.items())
        return markdown(["planted", "sd / M", *map(str, numbers)], body)

    def both(r: Row) -> str:
        return f"{100 * r.rates['PASS']:.0f}/{100 * r.rates['FAIL']:.0f}"

    def pooled(runs: int, steps: int) -> Iterator[str]:
        yield from (str(runs), str(steps))
        for what, gap in (("PASS", 0.0), ("alarm", 0.0), ("FAIL", 0.0), ("PASS", 1.0), ("FAIL", 1.0)):
            own = [
                r.rates[what]
                for r in rows
                if r.group == "unpaired"
                and (r.planted.runs, r.planted.steps, r.planted.gap) == (runs, steps, gap)
            ]
            yield f"{100 * np.mean(own):.1f} ({100 * min(own):.0f} to {100 * max(own):.0f})"

    at_margin = [r for r in rows if r.group == "seeds" and LEVEL[1] in r.bounds]
    missed = broken_promises(rows)
    sds = (0.25, 0.5, 0.6, 0.8, 1.0)
    return {
        "promises": f"{sum(len(r.bounds) for r in rows)} rates are promised, of {draws} draws each; missed:"
        + ("\n" + "".join(f"\n- {each}" for each in missed) if missed else " none"),
        "unpaired": markdown(
            ["runs", "steps", "PASS at no gap", "alarm", "FAIL", "PASS at M", "FAIL at M"],
            ([*pooled(runs, steps)] for runs, steps in itertools.product((3, 5, 10), (10, 100, 1000))),
        ),
        "beside": pivot("beside", lambda r: f"{both(r)}/{100 * r.rates['alarm']:.0f}"),
        "sooner": markdown(
            ["sd of runs", "evaluations to the target", "runs", "coverage, %"],
            (
                [f"{sd:.0%}", str(cells), f"{n} v {m}", f"{100 * coverage(sd, cells, (n, m), 4 * draws):.1f}"]
                for sd, cells, (n, m) in itertools.product(
                    (0.01, 0.03), (20, 100), ((10, 10), (30, 30), (6, 15))
                )
            ),
        ),
        "planted": markdown(
            ["planted", *OUTCOMES],
            (
                [r.planted.name, *(f"{100 * r.rates[o]:.0f}" for o in OUTCOMES)]
                for r in rows
                if r.group == "planted"
            ),
        ),
        "seeds": pivot("seeds", both),
        "levels": markdown(
            ["at one margin", "mean of all rows, %", "most of any row, %"],
            (
                [b.what, f"{100 * np.mean(own):.1f}", f"{100 * max(own):.0f}"]
                for b in LEVEL
                for own in [[r.rates[b.what] for r in at_margin] or [0.0]]
            ),
        ),
        "correlated": pivot("correlated", both),
        "spikes": pivot("spikes", both),
        "needed": markdown(
            ["true gap / M", *(f"sd {sd:g} M" for sd in sds)],
            ([f"{gap:g}", *(str(seeds_for(sd, 1.0, gap)) for sd in sds)] for gap in (0.0, 0.25, 0.5)),
        ),
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=FEWEST, help="of a row")
    parser.add_argument("pages", nargs="*", type=Path)
    options = parser.parse_args(words)
    if options.draws < FEWEST:
        parser.error(f"fewer than {FEWEST} draws cannot measure rates of 5 %")
    rows = [measure(row, options.draws) for row in ROWS]
    made = tables(rows)
    for page in options.pages:
        fill(page, made)
    print("\n\n".join(f"{name}\n\n{text}" for name, text in made.items()))
    return 1 if broken_promises(rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
