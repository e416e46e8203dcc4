"""Public FP8 runs, judged by one rule: `python tests/studies/evidence.py` rewrites the ledger in docs/evidence.md and docs/evidence.csv.

`evidence.csv` beside this file holds what was published: figures and sources. Where every run was published, `curves` names
the file in results/published/curves and the verdict is that of `python -m harness verdict` on it; of a single pair the rule is
asked as well, by one run a side.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from documented_table import fill

import harness
from harness.judge.verdict.result import percent
from harness.store.curve_files import read_all
from harness.store.text import NONE

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".csv")
PAGE, LEDGER = ROOT / "docs" / "evidence.md", ROOT / "docs" / "evidence.csv"
CURVES = ROOT / "results" / "published" / "curves"


def judged(row: Mapping[str, str]) -> dict[str, str]:
    """One line of the ledger."""
    line = {name: row[name] for name in ("run", "conditions", "base", "candidate")}
    if row["curves"]:
        arms = pd.read_csv(CURVES / row["curves"])["arm"].unique()
        found = harness.verdict(*(read_all([f"{CURVES / row['curves']}:{arm}/*"], arm) for arm in arms))
    else:  # a single pair: of its curves the ends are public, and their level where it is
        level, gap = float(row["base_loss"] or 1), float(row["gap_nats"] or float(row["gap_percent"]) / 100)
        ends = [
            pd.DataFrame({"step": [float(row["steps"] or 1)], "val_loss": [end]})
            for end in (level, level + gap)
        ]
        found = harness.verdict(ends[:1], ends[1:])
    nats = f"{float(row['gap_nats']):+.4f} nats" if row["gap_nats"] else ""
    share = row["curves"] or row["gap_percent"] or row["base_loss"]
    needed = " / ".join(map(str, found.needed)) if found.needed else NONE
    return line | {
        "runs": " + ".join(str(len(side)) for side in found.sides),
        "gap": ", ".join(filter(None, (percent(found.gap) if share else "", nats))),
        "interval (95 %)": NONE
        if math.isnan(found.low)
        else f"{percent(found.low)} to {percent(found.high)}",
        "shows": NONE if math.isnan(found.shows) else percent(found.shows)[1:],
        "gained": f"time {found.time}" if found.time else row["gain"],
        "verdict": found.outcome,
        "runs needed": "" if found.outcome == "PASS" else needed,
        "source": row["source"],
    }


def ledger() -> list[dict[str, str]]:
    """Every line."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [judged(row) for row in csv.DictReader(file)]


def markdown(lines: list[dict[str, str]]) -> str:
    """The table of the page: the source behind the name, and what was compared beside the conditions."""
    cells = [
        {
            "run": f"[{line['run']}]({line['source']})",
            "what": f"{line['candidate']} against {line['base']}; {line['conditions']}",
            **{name: line[name] for name in list(line)[4:-1]},
        }
        for line in lines
    ]
    rows = [list(cells[0]), ["---"] * len(cells[0]), *(list(cell.values()) for cell in cells)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Writes both."""
    lines = ledger()
    fill(PAGE, {"ledger": markdown(lines)})
    with LEDGER.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    main()
