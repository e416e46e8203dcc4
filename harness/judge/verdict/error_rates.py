"""Error rates: the self-test's counts as markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping, Sequence

    from harness.judge.verdict.selftest import Measured

OUTCOMES = ("PASS", "FAIL", "INCONCLUSIVE")
MOST_GATES = 5  # of a row, the most frequent ones


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
    before: Mapping[tuple[str, str, int, float], Counter[str]],
    missed: Sequence[str],
) -> str:
    """The page docs/loss-verdict-error-rates.md."""
    return table(measured, missed)
