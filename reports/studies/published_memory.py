"""The memory model against published peaks: `python reports/studies/published_memory.py` prints the tables of reports/published/studies/memory.md."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memory_cases import CASES, Held

from harness.advise.memory import GIB
from harness.advise.scale.held import memory

if TYPE_CHECKING:
    from collections.abc import Sequence

NEAR = 0.10


@dataclass(frozen=True, slots=True)
class Outcome:
    """A published peak and its prediction, GiB."""

    case: Held
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.case.gib - 1


def outcomes() -> list[Outcome]:
    """The prediction for every published peak."""
    return [Outcome(case, sum(memory(case.job).values()) / GIB) for case in CASES]


def table(found: Sequence[Outcome]) -> list[str]:
    """Markdown: a row for each published peak."""
    rows = [
        "| run | GPUs | mode | precision | published | predicted | error | in view |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        case = one.case
        cells = (case.key, case.gpu, case.mode, case.precision, f"{case.gib:.1f}", f"{one.predicted:.1f}")
        rows.append(f"| {' | '.join(cells)} | {100 * one.error:+.0f} % | {'yes' * case.in_view} |")
    return rows


def differences(found: Sequence[Outcome]) -> list[str]:
    """Markdown: FP8's extra over bf16 of the same conditions."""
    bf16 = {
        (one.case.key, one.case.gpu): one
        for one in found
        if one.case.precision == "bf16" and one.case.mode == "compile"
    }
    rows = ["| run | precision | published | predicted |", "|---|---|---|---|"]
    for one in found:
        if one.case.pair:
            base = bf16[one.case.pair, one.case.gpu]
            more = f"{one.case.gib - base.case.gib:+.2f} | {one.predicted - base.predicted:+.2f}"
            rows.append(f"| {one.case.key}, {one.case.gpu} | {one.case.precision} | {more} |")
    return rows


def summary(found: Sequence[Outcome]) -> list[str]:
    """Markdown: how far off, all rows and those that no choice was made with."""
    rows = [
        "| rows | figures | median error | within 10 % | worst shortfall | worst excess |",
        "|---|---|---|---|---|---|",
    ]
    for name, errors in (
        ("all", [one.error for one in found]),
        ("not in view", [one.error for one in found if not one.case.in_view]),
    ):
        middle = statistics.median(abs(error) for error in errors)
        near = sum(abs(error) <= NEAR for error in errors)
        ends = f"{100 * min(errors):+.0f} % | {100 * max(errors):+.0f} %"
        rows.append(f"| {name} | {len(errors)} | {100 * middle:.0f} % | {near} | {ends} |")
    return rows


def main() -> int:
    """Prints the tables of the page."""
    found = outcomes()
    sys.stdout.write("\n".join([*summary(found), "", *table(found), "", *differences(found)]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
