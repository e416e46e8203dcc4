"""What four bits cost in loss: the verdict on every arm of the published run, as a table and a figure.

    python reports/studies/four_bits.py      # writes reports/published/studies/four-bits.{md,svg}

The run is that of `sweep=four_bits`; the words are those of `harness.judge.verdict`, the public figures the ledger's.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from documented_table import fill

import harness.report
from harness.advise import four_bits
from harness.judge.verdict.result import MARGIN, percent
from harness.judge.verdict.rows import judge
from harness.report.drawing import BAND, INK, MUTED, SERIES, sheet, standalone, styled
from harness.report.table import Column, make_table
from harness.store import read
from harness.store.printer import markdown_table

if TYPE_CHECKING:
    from harness.judge.verdict.result import GateResult
    from harness.judge.verdict.rows import ArmVerdict

ROOT = Path(__file__).parents[2]
RUN = ROOT / "results" / "published" / "cpu" / "2026-11-29" / "nanogpt_char_four_bits"
PAGE = ROOT / "reports" / "published" / "studies" / "four-bits.md"
TICKS = (-0.25, 0, 0.25, 1, 3, 10, 30)
TITLE = "Loss of training in four bits against base, nanoGPT's character setting, 500 steps"


@cache
def verdicts() -> tuple[ArmVerdict, ...]:
    """Every arm of the run that was held against base, in its order."""
    return tuple(judge(read([RUN])))


def name(found: ArmVerdict) -> str:
    """The arm, with the schedule of its set-up."""
    schedule = str(found.axes["schedule"])
    return found.arm + f", {schedule}" * bool(schedule)


def gap(gate: GateResult | None) -> str:
    """A late gap with its interval."""
    return f"{percent(gate.effect)} ({percent(gate.low)} to {percent(gate.high)})" if gate else "not formed"


def table() -> str:
    """One row an arm."""
    records = [
        {
            "arm": name(v),
            "late gap": gap(v.verdict.gate("L4")),
            "held-out gap": gap(v.verdict.gate("L4h")),
            "verdict": v.verdict.outcome,
            "decided by": ", ".join(
                g.gate for g in v.verdict.gates if g.status == v.verdict.outcome != "PASS"
            ),
            "notes": " ".join(f"{note}." for note in v.verdict.notes),
        }
        for v in verdicts()
    ]
    return markdown_table(make_table("verdicts", [Column(title) for title in records[0]], records)).rstrip()


def public() -> str:
    """Four bits against FP8, as the ledger has it, a line a comparison."""
    found = {p.source: p for p in four_bits.comparisons()}
    return "\n".join(
        f"- {p.precision} against {p.against}, {p.model}, {p.arms}: loss at equal tokens {p.loss}; "
        f"{p.samples} times the samples to a loss of {p.target}; {p.differs} other settings differ ({source.rpartition('/')[2]})."
        for source, p in found.items()
    )


@styled
def figure() -> str:
    """Late and held-out gaps with their intervals beside the margin, as an SVG file."""
    shown = [v for v in verdicts() if v.verdict.gate("L4")]
    drawn = sheet(
        "four-bits",
        0.42 * len(shown) + 1.1,
        grid="x",
        rows=[f"{name(v)}: {v.verdict.outcome}" for v in shown],
    )
    axes = drawn.axes
    axes.axvspan(-100 * MARGIN, 100 * MARGIN, color=BAND, label="margin")
    axes.axvline(0, color=MUTED, linewidth=0.6)
    for gate, label, shift, colour in (
        ("L4", "late gap", -0.12, INK),
        ("L4h", "held-out gap", 0.12, SERIES[1]),
    ):
        for y, found in enumerate(shown):
            figure = found.verdict.gate(gate)
            if figure is None:
                continue
            low, middle, high = (100 * value for value in (figure.low, figure.effect, figure.high))
            axes.plot((low, high), (y + shift, y + shift), color=colour, linewidth=1.2)
            axes.plot([middle], [y + shift], "o", color=colour, label="" if y else label)
    axes.set_xlabel("change of the loss against base, %, with the 92 % interval over five seeds")
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xticks(TICKS, [f"{tick:+g}" if tick else "0" for tick in TICKS])
    axes.minorticks_off()
    css = Path(harness.report.__file__).with_name("page.css").read_text(encoding="utf-8")
    return standalone(drawn.chart(TITLE, ""), css)


def main() -> int:
    """Writes page and figure."""
    fill(PAGE, {"verdicts": table(), "public": public()})
    PAGE.with_suffix(".svg").write_text(figure(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
