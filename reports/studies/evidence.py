"""Public FP8 runs that others report in threads, judged by the rule of the ledger.

`evidence.csv` beside this file holds what was published: figures and sources. Where every run was published, `curves` names
the file in results/published/curves and the verdict is that of `python -m harness verdict` on it. Of single pairs, and of
means, the rule is asked as well, by one run a side.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

import harness
from harness.judge.verdict.result import percent
from harness.store.curve_files import read_all
from harness.store.text import NONE

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".csv")
CURVES = ROOT / "results" / "published" / "curves"


def judged(row: Mapping[str, str]) -> dict[str, str]:
    """One line of the table."""
    line = {name: row[name] for name in ("run", "conditions", "loss", "base", "candidate")}
    if row["curves"]:
        arms = pd.read_csv(CURVES / row["curves"])["arm"].unique()
        found = harness.verdict(*(read_all([f"{CURVES / row['curves']}:{arm}/*"], arm) for arm in arms))
    else:  # the ends alone are public, and their level where it is
        level = float(row["base_loss"] or 1)
        gap = float(row["gap_nats"] or float(row["gap_percent"] or 0) / 100)
        ends = [
            pd.DataFrame({"step": [float(row["steps"] or 1)], "val_loss": [end]})
            for end in (level, level + gap)
        ]
        found = harness.verdict(ends[:1], ends[1:])
    share = found.gap
    if not row["curves"]:  # what was published; the rule prints no gap of one run a side
        share = float(row["gap_percent"] or math.nan) / 100
        if row["gap_nats"] and row["base_loss"]:
            share = float(row["gap_nats"]) / float(row["base_loss"])
    nats = f"{float(row['gap_nats']):+.4f} nats" if row["gap_nats"] else ""
    runs = (
        [str(len(side)) for side in found.sides]
        if row["curves"]
        else [row["base_runs"], row["candidate_runs"]]
    )
    needed = " / ".join(map(str, found.needed)) if found.needed else NONE
    return line | {
        "runs": " + ".join(runs),
        "gap": ", ".join(filter(None, ("" if math.isnan(share) else percent(share), nats)))
        or ("" if row["loss"] == "no" else "not published"),
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
    """The list of docs/evidence.md: the source behind the name, what was compared, the gap and the gain."""
    return "\n".join(
        f"- [{line['run']}]({line['source']}): {line['candidate']} against {line['base']}; {line['conditions']}; "
        + f"{line['loss']} loss {line['gap']}".rstrip()
        + f"; {'gain ' * (line['gained'] == 'not published')}{line['gained']}"
        for line in lines
    )
