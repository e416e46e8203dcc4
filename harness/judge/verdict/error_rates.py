"""Error rates: the self-test's counts as markdown, as one table and as the page docs/loss-verdict-error-rates.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.judge.verdict.power import seeds_for

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from harness.judge.verdict.selftest import Measured

    Key = tuple[str, str, int, float]

OUTCOMES = ("PASS", "FAIL", "INCONCLUSIVE")
MOST_GATES = 5  # of a row, the most frequent ones
SPREADS, GAPS = (0.25, 0.5, 0.6, 0.8, 1.0), (0.0, 0.25, 0.5)  # of the table of seeds, in margins

HEAD = """# Error rates of the loss verdict

`python -m harness verdict-selftest --before results/published/verdict_selftest/before.json --markdown
docs/loss-verdict-error-rates.md` simulates loss curves with a known truth, counts the answers of the
[loss verdict](loss-verdict.md) and writes this page. It exits with 1 where a promised rate is missed.

Curves have {steps} steps and AR(1) noise. Pairs share the noise of their batches; the late and the held-out gap share a
constant of their seed. Spikes come at random with log-normal heights, exponential tails and aftershocks. Each fault has its
honest twin: the same thing in both arms.

Each row has {draws:,} draws. M is the margin. The sd is that of the paired late mean between seeds. Figures in parentheses are those of
the earlier rules (commit 3a92899) on the same curves. All rows, with the gates that did not pass:
[after](../results/published/verdict_selftest/after.md), [before](../results/published/verdict_selftest/before.md).

{promises} rates are promised. {missed}
"""

PLANTED = """
## Planted faults and their twins

Five seeds, sd M/4. Rates in %.
"""

EQUIVALENCE = """
## More seeds

PASS in %, by number of seeds. At no gap it rises with the seeds; at one margin it is at most 5 %, but for scatter.
"""

LEVELS = """
At one margin, L4 alone passes in at most {l4:.1f} % and L4 held-out in at most {l4h:.1f} % of the draws of any row, and L4
fails in at most {fail:.1f} %. {draws:,} draws of a rate of 5 % scatter by {scatter:.1f} % (one sd). Both halves together
pass more rarely, but how much depends on their correlation, so 5 % is what the verdict promises.
"""

ACROSS = """
The t interval assumes independent seeds. Where a share of the gap is common to all seeds (the same data order, one wrong
library), nothing in the gaps shows it, and no rate is promised. PASS in %, sd 0.6 M:
"""

SPIKES = """
## Spikes

L2 compares the counts of bursts. Its p is the share of the ways to deal all runs' counts to two arms that give the candidate
at least its sum. FAIL up to 0.01, can't tell up to 1/8. It needs no law for the counts. A binomial test of the sum
failed arms of one law in up to 20 % of cases where a few runs have most spikes ("clumped").

Two arms of one law. PASS / FAIL in % by number of seeds (FAIL of the earlier rules); the rest is INCONCLUSIVE, mostly because a run
ends within a spike or because spikes of less than a tenth of the loss, which L2 does not count, widen the gap's interval.
"""

POWER = """
FAIL of L2 in %, by number of seeds. With 3 or 4 seeds spikes alone are at most INCONCLUSIVE (p is at least 1/20 and 1/70). With
five, one burst in every run against none is a FAIL (1/252), if all five are detected.
"""

SEEDS = """
## How many seeds are enough

The smallest number of seeds with which one half of L4 passes in 80 % of cases, by its sd and true gap. It is exact for normal
gaps (`harness.judge.verdict.power.seeds_for`).
"""

TAIL = """
Real runs: `sweep=divergence` on a CPU (`nano`, 300 steps, 5 seeds) shows a paired sd of 0.024 to 0.054 % for correct FP8, M/5
to M/10, and PASS. After 100 steps with 3 seeds the sd is 0.06 to 0.09 %, about M/3. The negative control fails in both (+25 %
and +28 %).

## What is not promised

- A fault smaller than the margin passes, and with enough seeds it passes surely.
- A spike in one or two of five runs is a warning: two arms of one law differ by that much in most cases.
- A gap in fewer than an eighth of the seeds is a warning in L3 and only widens the intervals of L4.
- Correlation between seeds; see above.
"""


def table(measured: Sequence[Measured], missed: Sequence[str]) -> str:
    """Markdown: a row a scenario with its outcomes and the gates that did not pass, then the promises."""
    lines = [
        f"{measured[0].draws:,} draws a row. M: the margin; sd: between seeds, of the paired late mean.",
        "",
        "| group | planted | sd / M | seeds | PASS % | FAIL % | INCONCLUSIVE % | gates that did not pass, % of draws |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for m in measured:
        s = m.row.scenario
        gates = sorted(
            ((what, rate) for what, rate in m.rates.items() if " " in what and not what.endswith(" PASS")),
            key=lambda item: -item[1],
        )
        shown = ", ".join(f"{what} {100 * rate:.1f}" for what, rate in gates[:MOST_GATES])
        rates = " | ".join(f"{100 * m.rates[o]:.1f}" for o in OUTCOMES)
        lines.append(f"| {m.row.group} | {s.name} | {s.sd:g} | {s.seeds} | {rates} | {shown} |")
    promises = sum(len(m.row.bounds) for m in measured)
    lines += ["", f"{promises} promised rates, {len(missed)} promises missed{':' if missed else '.'}"]
    lines += [f"- {said}" for said in missed]
    return "\n".join(lines) + "\n"


def page(
    measured: Sequence[Measured],
    before: Mapping[Key, Counter[str]],
    missed: Sequence[str],
    steps: int,
) -> str:
    """The page on error rates.

    Args:
        measured: every row with its rates.
        before: rates of other rules, by the key of the row; rows without them show none.
        missed: broken promises, in words.
        steps: of a simulated curve.
    """
    groups: dict[str, list[Measured]] = {}
    for m in measured:
        groups.setdefault(m.row.group, []).append(m)
    draws = measured[0].draws
    at_margin = [
        m for m in measured if m.row.scenario.offset and m.row.group in ("equivalence", "heavy tails")
    ]

    def worst(what: str) -> float:
        return max((100 * m.rates[what] for m in at_margin), default=0.0)

    def passed(m: Measured) -> str:
        return f"{100 * m.rates['PASS']:.0f}{_earlier(m, before, 'PASS')}"

    parts = [
        HEAD.format(
            steps=steps,
            draws=draws,
            promises=sum(len(m.row.bounds) for m in measured),
            missed="All are kept." if not missed else "Missed: " + "; ".join(missed) + ".",
        ),
        PLANTED,
        "\n| planted | PASS | FAIL | INCONCLUSIVE |\n| --- | ---: | ---: | ---: |\n",
        *(
            f"| {m.row.scenario.name} | "
            + " | ".join(f"{100 * m.rates[o]:.1f}{_earlier(m, before, o)}" for o in OUTCOMES)
            + " |\n"
            for m in groups.get("planted", [])
        ),
        EQUIVALENCE,
        _pivot([*groups.get("equivalence", []), *groups.get("heavy tails", [])], passed),
        LEVELS.format(
            l4=worst("L4 PASS"),
            l4h=worst("L4h PASS"),
            fail=worst("L4 FAIL"),
            draws=draws,
            scatter=100 * (0.05 * 0.95 / draws) ** 0.5,
        ),
        ACROSS,
        _pivot(groups.get("correlated seeds", []), passed),
        SPIKES,
        _pivot(
            [*groups.get("spikes, same law", []), *groups.get("spikes, control only", [])],
            lambda m: f"{100 * m.rates['PASS']:.0f}/{100 * m.rates['FAIL']:.1f}{_earlier(m, before, 'FAIL')}",
        ),
        POWER,
        _pivot(groups.get("spikes, power", []), lambda m: f"{100 * m.rates['L2 FAIL']:.0f}"),
        SEEDS,
        "\n| true gap / M | " + " | ".join(f"sd {sd:g} M" for sd in SPREADS) + " |\n",
        "| ---: |" + " ---: |" * len(SPREADS) + "\n",
        *(
            f"| {gap:g} | " + " | ".join(str(seeds_for(sd, 1.0, gap)) for sd in SPREADS) + " |\n"
            for gap in GAPS
        ),
        TAIL,
    ]
    return "".join(parts)


def _earlier(m: Measured, before: Mapping[Key, Counter[str]], what: str) -> str:
    """The rate of the earlier rules, in parentheses; empty where there is none."""
    return f" ({100 * before[m.key][what]:.0f})" if m.key in before else ""


def _pivot(rows: Iterable[Measured], cell: Callable[[Measured], str]) -> str:
    """A table with a row a scenario and a column a number of seeds."""
    cells: dict[tuple[str, float], dict[int, str]] = {}
    for m in rows:
        s = m.row.scenario
        cells.setdefault((s.name, s.sd), {})[s.seeds] = cell(m)
    numbers = sorted({n for found in cells.values() for n in found})
    lines = [
        "",
        "| planted | sd / M | " + " | ".join(map(str, numbers)) + " |",
        "| --- | ---: |" + " ---: |" * len(numbers),
    ]
    for (name, sd), found in cells.items():
        lines.append(f"| {name} | {sd:g} | " + " | ".join(found.get(n, "") for n in numbers) + " |")
    return "\n".join(lines) + "\n"
