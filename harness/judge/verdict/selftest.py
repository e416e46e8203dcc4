"""Self-test: how often the verdict says what on invented curves whose truth is known.

A control falls from 3.5 to 2.1 nats with noise of its own; a candidate shares that noise, as paired runs do, and
adds a gap: what was planted, a constant that differs between seeds, and AR(1) noise. Both parts of the noise
together give the paired late-window mean a standard deviation between seeds of exactly `sd`, and so it is with the
held-out difference, which shares the constant: both are gaps of the same final weights, so two independent ones would
flatter the verdict, as a wrong PASS would need luck twice. Every draw goes through `judge_pairs` itself. What bounds
the verdict's errors: the PASS rate at no gap (at least 95 %), and those at a gap of one margin of the verdict and of
each half of L4 alone (at most 7 %: 5 % plus what 1,000 draws scatter). The halves' bound holds however they correlate.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from harness.judge.verdict.curves import Curve, Run, ema
from harness.judge.verdict.judge import judge_pairs
from harness.judge.verdict.result import LATE, MARGIN
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.judge.verdict.judge import Verdict
    from harness.store.stats import Vector

START, END = 3.5, 2.1  # nats
AR = 0.9  # of the noise of one seed from step to step
BETWEEN = 0.5  # share of the variance of a late mean that is constant within a seed, and shared with the held-out gap
AT_ZERO, AT_MARGIN = 0.95, 0.07  # bounds of the PASS rates
HALVES = ("L4", "L4h")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A planted truth; sizes are in margins (0.25 % of the final loss)."""

    name: str
    offset: float = 0.0
    drift: float = 0.0  # gap at the end, growing with log(step) from 0 at a tenth of the run
    bump: float = 0.0  # gap over the first fifth of the early window's steps, in shares of the loss
    spike: float = 0.0  # nats, for six steps in the middle of one seed
    nan: bool = False  # the last steps of one seed
    sd: float = 0.25  # between seeds, of the paired late mean
    seeds: int = 5


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("no gap"),
    Scenario("half a margin", offset=0.5),
    Scenario("one margin", offset=1.0),
    Scenario("minus one margin", offset=-1.0),
    Scenario("two margins", offset=2.0),
    Scenario("spike of 1 nat", spike=1.0),
    Scenario("drift to half a margin", drift=0.5),
    Scenario("early bump of 2 % that heals", bump=0.02),
    Scenario("early bump of 10 % that heals", bump=0.10),
    Scenario("NaN in the last steps", nan=True),
)
GRID: tuple[Scenario, ...] = tuple(
    Scenario(f"gap {offset:g} M", offset=offset, sd=sd, seeds=seeds)
    for sd, counts in ((0.25, (3, 5)), (0.5, (5, 8)), (1.0, (5, 10)))
    for seeds in counts
    for offset in (0.0, 0.5, 1.0, 2.0)
)


def draw(
    scenario: Scenario, steps: int, generator: np.random.Generator
) -> tuple[Mapping[int, Run], Mapping[int, Run]]:
    """Runs of a candidate and its control, by seed."""
    s, t = scenario.seeds, np.arange(steps, dtype=np.float64)
    margin = MARGIN * END
    sd = scenario.sd * margin
    fall = END + (START - END) * np.exp(-t / (steps / 8))
    shared = fall + _ar1(generator, s, steps) * 0.01
    late = round(LATE * steps)
    own = _ar1(generator, s, steps) * (sd * math.sqrt(1 - BETWEEN) / _mean_sd(late))
    between = generator.normal(0, sd * math.sqrt(BETWEEN), s)
    gap = scenario.offset * margin + own + between[:, None]
    if scenario.drift:
        gap = gap + scenario.drift * margin * np.clip(np.log10(np.maximum(t, 1) / (0.1 * steps)), 0, None)
    if scenario.bump:
        gap = gap + np.where(t < steps / 15, scenario.bump, 0) * fall
    candidate = shared + gap
    candidate[0, steps // 2 : steps // 2 + 6] += scenario.spike
    if scenario.nan:
        candidate[0, -steps // 20 :] = math.nan
    norms = np.exp(generator.normal(0, 0.1, (s, steps)))
    ratios = np.exp(generator.normal(0, 0.01, (s, steps)))
    ends = shared[:, -1]
    ends_gap = (scenario.offset + scenario.drift) * margin + between
    ends_gap = ends_gap + generator.normal(0, sd * math.sqrt(1 - BETWEEN), s)
    return (
        {i: _run(candidate[i], ends[i] + ends_gap[i], norms[i] * ratios[i]) for i in range(s)},
        {i: _run(shared[i], ends[i], norms[i]) for i in range(s)},
    )


def outcomes(scenario: Scenario, draws: int, steps: int = 300, seed: int = 0) -> list[Verdict]:
    """The verdicts on so many independent draws."""
    generator = np.random.default_rng(seed)
    return [judge_pairs(*draw(scenario, steps, generator)) for _ in range(draws)]


def table(scenarios: Sequence[Scenario], draws: int, steps: int = 300) -> list[str]:
    """Markdown: a row a scenario, its outcomes in percent and the gates that decided."""
    lines = [
        f"{draws:,} draws a row, {steps} steps; M = {100 * MARGIN:g} % of the loss; sd: between seeds, of the paired late mean.",
        "",
        "| planted | sd / M | seeds | PASS % | FAIL % | INCONCLUSIVE % | gates that did not pass, % of draws |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for scenario in scenarios:
        verdicts = outcomes(scenario, draws, steps)
        count = Counter(v.outcome for v in verdicts)
        decided = Counter(f"{g.gate} {g.status}" for v in verdicts for g in v.gates if g.status != "PASS")
        rates = [f"{100 * count[o] / draws:.1f}" for o in ("PASS", "FAIL", "INCONCLUSIVE")]
        shown = ", ".join(f"{name} {100 * n / draws:.1f}" for name, n in decided.most_common(5))
        lines.append(
            f"| {scenario.name} | {scenario.sd:g} | {scenario.seeds} | {' | '.join(rates)} | {shown} |"
        )
    return lines


def main(argv: Sequence[str]) -> int:
    """`python -m harness verdict-selftest`: prints the table; exit 1 where one of the two bounds is missed."""
    parser = _Parser(
        prog="python -m harness verdict-selftest",
        description="Error rates of the loss verdict on known curves.",
    )
    parser.add_argument("--draws", type=int, default=1000, help="draws a row (default: 1000)")
    parser.add_argument("--steps", type=int, default=300, help="steps of a curve (default: 300)")
    options = parser.parse_args(argv)
    if options.draws < 1 or options.steps < 100:
        raise UsageError(f"draws={options.draws}, steps={options.steps}: needs draws >= 1 and steps >= 100")
    for lines in (
        table(SCENARIOS, options.draws, options.steps),
        [""],
        table(GRID, options.draws, options.steps),
    ):
        sys.stdout.write("\n".join(lines) + "\n")
    said, good = bounds(
        *(outcomes(scenario, options.draws, options.steps) for scenario in (SCENARIOS[0], *SCENARIOS[2:4]))
    )
    sys.stdout.write(f"\n{said}: {'ok' if good else 'MISSED'}\n")
    return 0 if good else 1


def bounds(no_gap: Sequence[Verdict], *at_margin: Sequence[Verdict]) -> tuple[str, bool]:
    """The PASS rates that bound the verdict's errors in one sentence, and whether all bounds are kept.

    Args:
        no_gap: verdicts where nothing was planted.
        at_margin: sets of verdicts with a gap of one margin, of either sign; each set keeps its bounds.
    """
    zero = sum(v.outcome == "PASS" for v in no_gap) / len(no_gap)
    rates = {"verdict": max(sum(v.outcome == "PASS" for v in vs) / len(vs) for vs in at_margin)}
    for half in HALVES:
        statuses = [[g.status for v in vs for g in v.gates if g.gate == half] for vs in at_margin]
        rates[half] = max(found.count("PASS") / len(found) for found in statuses)
    shown = ", ".join(f"{name} {100 * rate:.1f} %" for name, rate in rates.items())
    return (
        f"PASS at no gap {100 * zero:.1f} % (at least {100 * AT_ZERO:g}), at one margin on either side {shown} "
        f"(at most {100 * AT_MARGIN:g} each)",
        zero >= AT_ZERO and max(rates.values()) <= AT_MARGIN,
    )


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, as every other command does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see python -m harness verdict-selftest --help")


def _run(loss: Vector, heldout: float, norms: Vector) -> Run:
    return Run(Curve.of(loss), heldout=Curve.of([heldout], [loss.size]), grad_norm=Curve.of(norms))


def _ar1(generator: np.random.Generator, seeds: int, steps: int) -> Vector:
    """Stationary AR(1) noise of unit variance, [seeds, steps]."""
    noise = generator.normal(0, 1, (seeds, steps))
    noise[:, 1:] *= math.sqrt(1 - AR * AR)
    # x_t = AR x_(t-1) + e_t is, but for a factor, a moving average that forgets with AR a step.
    return ema(noise, np.arange(steps, dtype=np.float64), -1 / math.log2(AR), from_zero=True) / (1 - AR)


def _mean_sd(count: int) -> float:
    """Standard deviation of the mean of so many successive values of unit AR(1) noise.

    Var = (1 + 2 sum over k of (1 - k/n) AR^k) / n.
    """
    lags = np.arange(1, count)
    return float(math.sqrt((1 + 2 * ((1 - lags / count) * AR**lags).sum()) / count))
