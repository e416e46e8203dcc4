"""How often the verdict on anyone's curves is wrong: simulated runs that share no seed, judged as `harness.verdict` does.

    python tests/studies/curve_verdict_rates.py [--draws N] [PAGE ...]

Prints the tables, writes them between their marks in each PAGE, and exits with 1 where a promised rate is missed.

Losses fall from 4 to 2 nats in ten values. Noise is each run's own and has an exact standard deviation at the end, `sd` margins:
normal; heavy-tailed (Student's t, 3 degrees); drifting (a random walk over the run, the mean of the last three values judged);
unequal (the candidate's three times the base's, `sd` the root of the mean of both variances).
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from documented_table import fill
from scipy.optimize import brentq
from verdict_error_rates import FEWEST, OUTCOMES, Bound

from harness.judge.curve_verdict import CurveVerdict, OneRun, conclude, unpaired
from harness.judge.verdict import Curve
from harness.judge.verdict.result import MARGIN
from harness.judge.verdict.stored_noise import POWER, tost_power

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.random import Generator

STEPS = np.arange(10) * 100.0
FALL = 2 + 2 * np.exp(-STEPS / 50.0)
LATE = 3  # values of the window of drifting runs
NOISES = "normal", "heavy-tailed", "drifting", "unequal"
RUNS = 3, 5, 8, 13, 20


@dataclass(frozen=True)
class Row:
    """What is planted: `gap` and `sd` in margins; what is promised of it; the rates, once counted."""

    noise: str
    runs: int
    gap: float
    sd: float
    bounds: tuple[Bound, ...]
    draws: int = 0
    rates: Counter[str] | None = None


def draw(row: Row, generator: Generator) -> list[list[OneRun]]:
    """Runs of the base and of the candidate."""
    sides = []
    for side in (0, 1):
        noise = generator.normal(0, 1, (row.runs, STEPS.size))
        if row.noise == "heavy-tailed":
            noise = generator.standard_t(3, noise.shape) / math.sqrt(3)
        if row.noise == "drifting":  # weights of each step in the mean of the last values of the walk
            weights = np.minimum(np.arange(STEPS.size)[::-1] + 1, LATE) / LATE
            noise = noise.cumsum(axis=1) / math.sqrt((weights**2).sum())
        if row.noise == "unequal":
            noise *= math.sqrt((0.2, 1.8)[side])
        losses = FALL + 2 * MARGIN * (row.sd * noise + side * row.gap) * (STEPS > 0)
        sides.append([OneRun("", Curve(STEPS, own), None, STEPS[-1], ("", ""), {}, None) for own in losses])
    return sides


def measure(row: Row, draws: int) -> Row:
    """The row with its rates."""
    generator, window = np.random.default_rng(0), LATE if row.noise == "drifting" else 1
    counts: Counter[str] = Counter()
    for _ in range(draws):
        found = CurveVerdict(MARGIN, draw(row, generator))
        unpaired(found, window)
        counts[conclude(found, window).outcome] += 1
    return replace(row, draws=draws, rates=Counter({outcome: n / draws for outcome, n in counts.items()}))


def sd_at_power(runs: int, gap: float) -> float:
    """The noise, in margins, at which so many runs a side are said to pass in 80 % of cases."""
    return float(brentq(lambda sd: tost_power(sd, 1.0, runs, gap, sides=2) - POWER, 0.05, 5.0))


RARELY_PASSES, RARELY_FAILS = Bound("PASS", 0.05), Bound("FAIL", 0.05)
ROWS = (
    *(
        Row(noise, runs, gap, sd, (RARELY_PASSES, RARELY_FAILS) if gap else (RARELY_FAILS,))
        for noise, runs, gap, sd in itertools.product(NOISES, RUNS, (0.0, 1.0), (0.3, 0.8))
    ),
    *(
        Row("normal", runs, gap, sd_at_power(runs, gap), (Bound("PASS", POWER, at_least=True),))
        for runs, gap in itertools.product(RUNS, (0.0, 0.5))
    ),
    *(Row("normal", runs, 3.0, 0.3, (Bound("FAIL", POWER, at_least=True),)) for runs in RUNS[1:]),
)


def broken_promises(rows: Sequence[Row]) -> list[str]:
    """Bounds that were missed, in words."""
    return [
        f"{row.noise}, {row.runs} runs, gap {row.gap:g} M, sd {row.sd:.2g} M: {bound.what} {row.rates[bound.what]:.1%}"
        for row in rows
        for bound in row.bounds
        if row.rates is not None and not bound.is_kept(row.rates[bound.what], row.draws)
    ]


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """By the name of their marks in a page."""
    head = ["noise", "gap / M", "sd / M", *(f"{runs} runs" for runs in RUNS)]
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for row in rows:
        sd = f"{row.sd:g}" if row.sd in (0.3, 0.8) else "power 80 %"
        rates = row.rates or Counter()
        shown = "/".join(f"{100 * rates[outcome]:.0f}" for outcome in OUTCOMES[:2])
        cells.setdefault((row.noise, f"{row.gap:g}", sd), {})[row.runs] = shown
    body = ([*key, *(of.get(runs, "") for runs in RUNS)] for key, of in cells.items())
    promises = sum(len(row.bounds) for row in rows)
    missed = "; ".join(broken_promises(rows)) or "none"
    return {
        "rates": "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)),
        "promises": f"{promises} rates are promised, of {rows[0].draws} draws each; missed: {missed}",
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
    for page in options.pages:
        fill(page, tables(rows))
    print("\n\n".join(tables(rows).values()))
    return 1 if broken_promises(rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
