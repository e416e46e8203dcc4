"""Self-test: how often the verdict gives which answer on simulated curves whose truth is known.

Every draw goes through `judge_pairs` itself. The command exits with 1 where a promised rate is missed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict import error_rates
from harness.judge.verdict.judge import judge_pairs
from harness.judge.verdict.scenarios import ROWS, SCATTER, Row
from harness.judge.verdict.simulated import STEPS, draw
from harness.store.errors import UsageError
from harness.store.words import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.judge.verdict.judge import Verdict
    from harness.judge.verdict.simulated import Scenario

FEWEST = 100  # draws that can show a rate of 5 %: with two, no promise is ever broken


@dataclass(frozen=True, slots=True)
class Measured:
    """One row with the rates that were counted.

    Attributes:
        row: what was planted and promised.
        draws: how many independent draws.
        rates: by outcome, and by gate and status ("L4 PASS"); what never happened is left out.
    """

    row: Row
    draws: int
    rates: Counter[str]

    @property
    def key(self) -> tuple[str, str, int, float]:
        """What tells rows apart: group, name, seeds, sd."""
        s = self.row.scenario
        return self.row.group, s.name, s.seeds, s.sd


def outcomes(scenario: Scenario, draws: int, seed: int = 0) -> list[Verdict]:
    """The verdicts on so many independent draws."""
    generator = np.random.default_rng(seed)
    return [judge_pairs(*draw(scenario, STEPS, generator)) for _ in range(draws)]


def measure(row: Row, draws: int) -> Measured:
    """Counts the answers to one row."""
    counted: Counter[str] = Counter()
    for verdict in outcomes(row.scenario, draws):
        counted[verdict.outcome] += 1
        counted.update(f"{gate.gate} {gate.status}" for gate in verdict.gates)
    return Measured(row, draws, Counter({what: n / draws for what, n in counted.items()}))


def broken_promises(measured: Sequence[Measured]) -> list[str]:
    """Bounds that were missed, in words: those of single rows, and PASS at no gap that falls with more seeds."""
    missed = [
        f"{_label(m)}: {b.what} {100 * m.rates[b.what]:.1f} %, promised at {'least' if b.at_least else 'most'} {100 * b.limit:g} %"
        for m in measured
        for b in m.row.bounds
        if not b.is_kept(m.rates[b.what], m.draws)
    ]
    no_gap = [
        m for m in measured if m.row.group in ("equivalence", "heavy tails") and not m.row.scenario.offset
    ]
    for fewer, more in itertools.pairwise(no_gap):
        a, b = fewer.rates["PASS"], more.rates["PASS"]
        both = (a + b) / 2
        scatter = SCATTER * math.sqrt(2 * both * (1 - both) / more.draws)
        if fewer.row.scenario.seeds < more.row.scenario.seeds and b < a - scatter:
            missed.append(
                f"{_label(more)}: PASS {100 * b:.1f} %, below the {100 * a:.1f} % "
                f"of {fewer.row.scenario.seeds} seeds"
            )
    return missed


def as_json(measured: Sequence[Measured]) -> str:
    """Every row with its rates and promises."""
    rows = [
        {
            "group": m.row.group,
            **dataclasses.asdict(m.row.scenario),
            "draws": m.draws,
            "rates": dict(sorted(m.rates.items())),
            "promises": [dataclasses.asdict(b) for b in m.row.bounds],
        }
        for m in measured
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def from_json(text: str) -> dict[tuple[str, str, int, float], Counter[str]]:
    """Rates by the key of their row, of what `as_json` wrote."""
    return {(r["group"], r["name"], r["seeds"], r["sd"]): Counter(r["rates"]) for r in json.loads(text)}


def main(argv: Sequence[str]) -> int:
    """`python -m harness verdict-selftest`: prints the table; exit 1 where a promised rate is missed."""
    parser = Parser("verdict-selftest", "Error rates of the loss verdict on simulated curves.")
    parser.add_argument("--draws", type=int, default=400, help="draws a row (default: 400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also writes every row with its rates")
    parser.add_argument("--table", type=Path, metavar="FILE", help="also writes the table as markdown")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also writes the page on error rates")
    parser.add_argument(
        "--before", type=Path, metavar="FILE", help="JSON of other rules, shown beside on the page"
    )
    options = parser.parse_args(argv)
    if options.draws < FEWEST:
        raise UsageError(f"draws={options.draws}: fewer than {FEWEST} draws cannot measure rates of 5 %")
    before = {}
    if options.before is not None:
        try:
            before = from_json(options.before.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--before {options.before}: not readable as JSON of --json ({error})"
            ) from error
    measured = [measure(row, options.draws) for row in ROWS]
    missed = broken_promises(measured)
    table = error_rates.table(measured, missed)
    sys.stdout.write(table)
    _write(options.json, as_json(measured))
    _write(options.table, table)
    _write(options.markdown, error_rates.page(measured, before, missed, STEPS))
    return 1 if missed else 0


def _label(m: Measured) -> str:
    s = m.row.scenario
    return f"{m.row.group}, {s.name}, {s.seeds} seeds, sd {s.sd:g} M"


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}); name another file") from error
