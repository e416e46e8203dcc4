"""How often the loss verdict gives which answer: simulated curves with a known truth, judged by `judge_pairs`.

    python tests/studies/verdict_error_rates.py [--draws N] [PAGE ...]

Prints the tables, writes them between their marks in each PAGE, and exits with 1 where a promised rate is missed.

A control falls from 3.5 to 2.1 nats with AR(1) noise of its own. The candidate of the same seed shares that noise, as
paired runs do, and adds a gap: a constant that differs between seeds and AR(1) noise, which together give the paired
late-window mean a standard deviation between seeds of exactly `sd`. The held-out gap has the same deviation and shares
the constant: both are gaps of the same final weights, and two independent ones would flatter the verdict.

Everything else that is planted is a pair (candidate, control). So each fault has its honest twin: the same figure on
both sides.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from documented_table import fill

from harness.judge.verdict import Curve, Run, ema, judge_pairs
from harness.judge.verdict.result import LATE, MARGIN
from harness.judge.verdict.stored_noise import seeds_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.random import Generator

    from harness.store.stats import Vector

FEWEST = 100  # draws that can show a rate of 5 %
START, END = 3.5, 2.1  # nats
STEPS = 300
AR = 0.9  # lag-1 correlation of the noise within a run
BETWEEN = 0.5  # share of the variance of a late mean that is constant within a seed, and shared with the held-out gap
GRAD_PER_NAT = 25.0  # a spike of one nat multiplies the gradient norm by 1 + this
SCATTER = 3.1  # standard deviations of a rate that a bound allows for: 0.1 % of correct rates lie beyond
OUTCOMES = ("PASS", "FAIL", "INCONCLUSIVE")

Pair = tuple[float, float]  # candidate, control


@dataclass(frozen=True)
class Scenario:
    """A planted truth.

    Attributes:
        name: what was planted, in words.
        seeds: pairs of runs.
        sd: between seeds, of the paired late mean; in margins.
        offset: the true gap, in margins.
        tails: degrees of freedom of Student's t for all noise, of the same variance; 0: normal.
        across: share of the paired gap's variance that all seeds have in common; the gates assume 0.
        drift: gap at the end, in margins; grows with log(step) from a tenth of the run on.
        divergence: nats at the end; grows exponentially over the last quarter.
        swing: nats to either side, every five steps; 0 in the last one.
        bump: over the first fifth of the early window's steps, in shares of the loss.
        one_spike: nats, for six steps in the middle of the first seed.
        spikes: expected spikes of a run, aftershocks not counted.
        clumping: variance of the runs' own spike rates, relative to the squared mean; 0: one rate for all runs.
        spike_in_every_run: how many spikes each run has besides, at random steps.
        nan: whether the last steps of the first seed are NaN.
        copies: "runs": each seed repeats the first one's runs; "control": only the control's.
    """

    name: str
    seeds: int = 5
    sd: float = 0.25
    offset: float = 0.0
    tails: int = 0
    across: float = 0.0
    drift: Pair = (0.0, 0.0)
    divergence: Pair = (0.0, 0.0)
    swing: Pair = (0.0, 0.0)
    bump: Pair = (0.0, 0.0)
    one_spike: Pair = (0.0, 0.0)
    spikes: Pair = (0.0, 0.0)
    clumping: float = 0.0
    spike_in_every_run: tuple[int, int] = (0, 0)
    nan: tuple[bool, bool] = (False, False)
    copies: str = ""


def draw(scenario: Scenario, generator: Generator) -> tuple[dict[int, Run], dict[int, Run]]:
    """Runs of a candidate and its control, by seed."""
    seeds, t = scenario.seeds, np.arange(STEPS, dtype=np.float64)

    def noise(*shape: int) -> Vector:
        """Independent values of unit variance."""
        k = scenario.tails
        return generator.standard_t(k, shape) / math.sqrt(k / (k - 2)) if k else generator.normal(0, 1, shape)

    def ar1() -> Vector:
        """Stationary AR(1) noise of unit variance, [seeds, steps]."""
        fresh = noise(seeds, STEPS)
        fresh[:, 1:] *= math.sqrt(1 - AR * AR)
        # x_t = AR x_(t-1) + e_t is, but for a factor, a moving average that forgets with AR a step.
        return ema(fresh, t, -1 / math.log2(AR), from_zero=True) / (1 - AR)

    margin = MARGIN * END
    sd = scenario.sd * margin
    alone = sd * math.sqrt(1 - scenario.across)
    fall = END + (START - END) * np.exp(-t / (STEPS / 8))
    shared = fall + 0.01 * ar1()
    scale = alone * math.sqrt(1 - BETWEEN)
    within = ar1() * (scale / mean_sd(round(LATE * STEPS)))
    between = alone * math.sqrt(BETWEEN) * noise(seeds)
    offset = scenario.offset * margin + sd * math.sqrt(scenario.across) * noise()
    ends_within = scale * noise(seeds)
    norms = np.exp(generator.normal(0, 0.1, (seeds, STEPS)))
    ratios = np.exp(generator.normal(0, 0.01, (seeds, STEPS)))
    sides = []
    for side, gap, gap_at_end in (
        (0, offset + between[:, None] + within, offset + between + ends_within),
        (1, np.zeros((seeds, STEPS)), np.zeros(seeds)),
    ):
        added = _planted(scenario, side, t, fall)
        spikes = _spikes(scenario, side, generator)
        loss = shared + gap + added + spikes
        heldout = shared[:, -1] + gap_at_end + added[-1] + spikes[:, -1]
        if scenario.nan[side]:
            loss[0, -STEPS // 20 :] = math.nan
        grad = norms * (ratios if side == 0 else 1.0) * (1 + GRAD_PER_NAT * spikes)
        runs = [
            Run(Curve.of(curve), heldout=Curve.of([end], [STEPS]), grad_norm=Curve.of(norm))
            for curve, end, norm in zip(loss, heldout, grad, strict=True)
        ]
        copied = scenario.copies == "runs" or (scenario.copies == "control" and side == 1)
        sides.append(dict(enumerate(runs[:1] * seeds if copied else runs)))
    return sides[0], sides[1]


def mean_sd(count: int) -> float:
    """Standard deviation of the mean of so many successive values of unit AR(1) noise.

    Var = (1 + 2 sum over k of (1 - k/n) AR^k) / n.
    """
    lags = np.arange(1, count)
    return math.sqrt((1 + 2 * ((1 - lags / count) * AR**lags).sum()) / count)


def _planted(scenario: Scenario, side: int, t: Vector, fall: Vector) -> Vector:
    """What is the same in all runs of one side, but for spikes; nats by step."""
    growth = np.clip(np.log10(np.maximum(t, 1) / (0.1 * STEPS)), 0, None)
    late = np.clip((t / STEPS - 0.75) / 0.25, 0, None)
    return (
        scenario.drift[side] * MARGIN * END * growth
        + scenario.divergence[side] * np.expm1(4 * late) / math.expm1(4)
        + scenario.swing[side] * np.sin(2 * np.pi * (t + 1) / 5)
        + np.where(t < STEPS / 15, scenario.bump[side], 0) * fall
    )


def _spikes(scenario: Scenario, side: int, generator: Generator) -> Vector:
    """Nats that spikes add, [seeds, steps]: log-normal heights and decays, each with Poisson(1) aftershocks."""
    added = np.zeros((scenario.seeds, STEPS))
    added[0, STEPS // 2 : STEPS // 2 + 6] += scenario.one_spike[side]

    def spike(row: Vector, start: float, nats: float) -> None:
        """A linear rise over two steps, then an exponential decay."""
        age = np.arange(max(STEPS - int(start), 0))
        decay = 5.0 * math.exp(generator.normal(0, 0.5))
        row[int(start) :] += nats * np.minimum(1, (age + 1) / 2) * np.exp(-np.maximum(age - 1, 0) / decay)

    for row in added:
        own = scenario.spikes[side]
        own *= generator.gamma(1 / scenario.clumping, scenario.clumping) if scenario.clumping else 1
        count = int(generator.poisson(own)) + scenario.spike_in_every_run[side]
        for start in generator.uniform(0.05, 1, count) * STEPS:
            nats = 0.8 * math.exp(generator.normal(0, 0.5))
            spike(row, start, nats)
            for delay in generator.exponential(15.0, generator.poisson(1.0)):
                spike(row, start + delay, nats * generator.uniform(0.3, 0.9))
    return added


@dataclass(frozen=True)
class Bound:
    """A promised rate of an outcome, or of a gate with a status: "L4 PASS"."""

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
    scenario: Scenario
    bounds: tuple[Bound, ...] = ()
    draws: int = 0
    rates: Counter[str] = field(default_factory=Counter)

    @property
    def label(self) -> str:
        s = self.scenario
        return f"{self.group}, {s.name}, {s.seeds} seeds, sd {s.sd:g} M"


NEVER_FAILS = Bound("FAIL", 0.01)
HARDLY_PASSES = Bound("PASS", 0.05)
CAUGHT = Bound("FAIL", 0.95, at_least=True)
LEVEL = (HARDLY_PASSES, Bound("L4 PASS", 0.05), Bound("L4h PASS", 0.05), Bound("L4 FAIL", 0.05))


def _rows() -> Iterable[Row]:
    for scenario, *bounds in (
        (Scenario("no gap"), NEVER_FAILS, Bound("PASS", 0.95, at_least=True)),
        (Scenario("gap of half a margin", offset=0.5), NEVER_FAILS),
        (Scenario("gap of minus one margin", offset=-1.0), *LEVEL),
        (Scenario("gap of two margins", offset=2.0), HARDLY_PASSES, CAUGHT),
        (Scenario("copies of one pair of runs", copies="runs", offset=0.5), HARDLY_PASSES, NEVER_FAILS),
        (Scenario("copies of one control run", copies="control"), HARDLY_PASSES),
        (Scenario("one spike of 1 nat in one run of the control", one_spike=(0.0, 1.0)), NEVER_FAILS),
    ):
        yield Row("planted", scenario, tuple(bounds))
    for name, fault, size, *bounds in (
        ("one spike of 1 nat in one run", "one_spike", 1.0),
        ("early bump of 2 % that heals", "bump", 0.02, Bound("L3 PASS", 0.05)),
        ("early bump of 10 % that heals", "bump", 0.10, HARDLY_PASSES),
        ("drift to half a margin", "drift", 0.5),
        ("drift to two margins", "drift", 2.0, HARDLY_PASSES),
        ("swings of 0.3 nats", "swing", 0.3, HARDLY_PASSES),
        ("divergence by 0.1 nats at the end", "divergence", 0.1, HARDLY_PASSES),
        ("NaN in one run", "nan", True, HARDLY_PASSES, CAUGHT),
    ):  # each with its twin
        yield Row("planted", replace(Scenario(name), **{fault: (size, type(size)())}), tuple(bounds))
        yield Row(
            "planted", replace(Scenario(f"{name}, in both arms"), **{fault: (size, size)}), (NEVER_FAILS,)
        )
    for tails, sds in ((0, (0.25, 0.6, 0.8)), (3, (0.25, 0.8))):
        group, said = ("heavy tails", ", Student t noise") if tails else ("equivalence", "")
        for offset, sd, seeds in itertools.product((0.0, 1.0), sds, (3, 5, 8, 20, 60)):
            scenario = Scenario(f"gap {offset:g} M{said}", seeds, sd, offset, tails)
            yield Row(group, scenario, LEVEL if offset else (NEVER_FAILS,))
    for offset, across, seeds in itertools.product((0.0, 1.0), (0.2, 0.5), (5, 20)):
        name = f"gap {offset:g} M, correlation {across:g}"
        yield Row("correlated seeds", Scenario(name, seeds, 0.6, offset, across=across))
    for rate, (clumping, said), seeds in itertools.product(
        (0.4, 2.0), ((0.0, ""), (2.0, ", clumped")), (3, 5, 6, 7, 10, 20)
    ):
        name = f"{rate:g} spikes a run in both arms{said}"
        scenario = Scenario(name, seeds, spikes=(rate, rate), clumping=clumping)
        yield Row("spikes", scenario, (NEVER_FAILS,))
    for seeds in (5, 20):
        yield Row(
            "spikes", Scenario("2 spikes a run in the control", seeds, spikes=(0.0, 2.0)), (NEVER_FAILS,)
        )
    for times, seeds in itertools.product((2, 3, 5), (5, 10)):
        name = f"{times:g} times the control's 0.4 spikes a run"
        yield Row("power", Scenario(name, seeds, spikes=(0.4 * times, 0.4)))
    for seeds in (5, 7, 10):
        name = "one spike in every run, none in the control"
        yield Row("power", Scenario(name, seeds, spike_in_every_run=(1, 0)))


ROWS = tuple(_rows())


def measure(row: Row, draws: int) -> Row:
    """The row with its rates."""
    generator = np.random.default_rng(0)
    counted: Counter[str] = Counter()
    for _ in range(draws):
        verdict = judge_pairs(*draw(row.scenario, generator))
        counted[verdict.outcome] += 1
        counted.update(f"{gate.gate} {gate.status}" for gate in verdict.gates)
    return replace(row, draws=draws, rates=Counter({what: n / draws for what, n in counted.items()}))


def broken_promises(rows: Sequence[Row]) -> list[str]:
    """Bounds that were missed, in words: those of single rows, and PASS at no gap that falls with more seeds."""
    missed = [
        f"{r.label}: {b.what} {r.rates[b.what]:.1%}, promised at {'least' if b.at_least else 'most'} {b.limit:g}"
        for r in rows
        for b in r.bounds
        if not b.is_kept(r.rates[b.what], r.draws)
    ]
    no_gap = [r for r in rows if r.group in ("equivalence", "heavy tails") and not r.scenario.offset]
    for fewer, more in itertools.pairwise(no_gap):
        a, b = fewer.rates["PASS"], more.rates["PASS"]
        both = (a + b) / 2
        scatter = SCATTER * math.sqrt(2 * both * (1 - both) / more.draws)
        if fewer.scenario.seeds < more.scenario.seeds and b < a - scatter:
            missed.append(f"{more.label}: PASS {b:.1%}, below the {a:.1%} of {fewer.scenario.seeds} seeds")
    return missed


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """By the name of their marks in a page."""

    def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))

    def pivot(groups: Sequence[str], cell: Callable[[Row], str]) -> str:
        """A row a scenario and a column a number of seeds."""
        of: dict[tuple[str, str], dict[int, str]] = {}
        for r in (r for r in rows if r.group in groups):
            of.setdefault((r.scenario.name, f"{r.scenario.sd:g}"), {})[r.scenario.seeds] = cell(r)
        numbers = sorted({n for found in of.values() for n in found})
        body = ([*key, *(found.get(n, "") for n in numbers)] for key, found in of.items())
        return markdown(["planted", "sd / M", *map(str, numbers)], body)

    def passed(r: Row) -> str:
        return f"{100 * r.rates['PASS']:.0f}"

    at_margin = [r for r in rows if LEVEL[1] in r.bounds and r.group != "planted"]
    sds = (0.25, 0.5, 0.6, 0.8, 1.0)
    missed = broken_promises(rows)
    return {
        "promises": f"{sum(len(r.bounds) for r in rows)} rates are promised, of {rows[0].draws} draws each; missed: "
        + ("; ".join(missed) or "none"),
        "planted": markdown(
            ["planted", *OUTCOMES],
            (
                [r.scenario.name, *(f"{100 * r.rates[o]:.1f}" for o in OUTCOMES)]
                for r in rows
                if r.group == "planted"
            ),
        ),
        "more seeds": pivot(("equivalence", "heavy tails"), passed),
        "levels": markdown(
            ["at one margin", "most of any row, %"],
            (
                [b.what, f"{100 * max((r.rates[b.what] for r in at_margin), default=0.0):.1f}"]
                for b in LEVEL[1:]
            ),
        ),
        "correlated": pivot(("correlated seeds",), passed),
        "spikes": pivot(("spikes",), lambda r: f"{passed(r)}/{100 * r.rates['FAIL']:.1f}"),
        "power": pivot(("power",), lambda r: f"{100 * r.rates['L2 FAIL']:.0f}"),
        "needed": markdown(
            ["true gap / M", *(f"sd {sd:g} M" for sd in sds)],
            ([f"{gap:g}", *(str(seeds_for(sd, 1.0, gap)) for sd in sds)] for gap in (0.0, 0.25, 0.5)),
        ),
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=400, help="of a row")
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
