"""Charts of the suites: a figure of a suite by case, whatever was measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.report.drawing import (
    BAND,
    INK,
    MUTED,
    Chart,
    bands,
    forest,
    look,
    ratio_axis,
    ratio_limits,
    sheet,
    styled,
)
from harness.report.records import arm_records, has_time
from harness.report.runs import newest
from harness.report.table import known
from harness.report.verdicts import fp8_pairs
from harness.store import text
from harness.store.case import arm_of
from harness.store.rows import grouped

if TYPE_CHECKING:
    from harness.report.runs import Machine

MOST_ROWS = 28  # cases in one figure; the caption says how many of how many


@styled
def by_case(machine: Machine, suite: str, field: str, what: str) -> list[Chart]:
    """A field of a suite's newest records, measured alone: a row a case, a mark an arm, a panel a mode.

    A speedup has its interval and the noise floor of its case, a rate of products the best ones of this device.
    """
    is_ratio = field == "speedup"
    every = fp8_pairs(machine) if is_ratio else newest(arm_records(machine, suite), has_time)
    own = [
        r for r in every if r["suite"] == suite and r["regime"] in ("isolated", "") and known(r.get(field))
    ]
    if not own:
        return []
    sizes = {r["case_id"]: [v for v in text.axes_of(r["axes"]).values() if isinstance(v, int)] for r in own}
    largest = sorted(sizes, key=lambda case: -math.prod(sizes[case]))[:MOST_ROWS]
    names = {r["case_id"]: text.short(machine.label(r), 48) for r in own if r["case_id"] in largest}
    place, modes = {case: y for y, case in enumerate(names)}, grouped((arm_of(r).mode, r) for r in own)
    styles = {str(arm.modeless): look(machine, arm) for arm in map(arm_of, own)}
    height = 1.0 + len(names) * max(0.24, 0.1 * len(styles) * is_ratio)
    key = f"{field}-{suite}-{machine.env_id}"
    drawn = sheet(key, height, len(modes), grid="x", rows=list(names.values()), sharex=True, sharey=True)
    ends = [1.0]
    for axes, (mode, shown) in zip(drawn.panels, sorted(modes.items()), strict=True):
        for i, (arm, style) in enumerate(styles.items()):
            shift = is_ratio * 0.62 * (i - (len(styles) - 1) / 2) / max(len(styles), 2)
            mine = [r for r in shown if r["case_id"] in place and str(arm_of(r).modeless) == arm]
            spans = ((r["low"], r["high"]) if is_ratio else (None, None) for r in mine)
            at = [place[r["case_id"]] + shift for r in mine]
            ends += forest(
                axes, [(y, r[field], *ends) for y, r, ends in zip(at, mine, spans, strict=True)], style
            )
        axes.set(title=f"{mode} against {mode}" if is_ratio and mode else mode, xlabel=what)
        if is_ratio:
            axes.axvline(1, color=INK, linewidth=0.9)
            bands(
                axes, {place[r["case_id"]]: r["floor"] for r in shown if r["case_id"] in place}.items(), 0.84
            )
            ratio_axis(axes.xaxis, log=axes.set_xscale)
    for arm, style in styles.items():
        drawn.axes.plot([], [], **style, label=text.short(arm, 40))
    if is_ratio:
        drawn.axes.set_xlim(*ratio_limits(ends))
        drawn.axes.fill_betweenx([], [], [], color=BAND, label="A/A noise floor")
    for kind, rate in sorted(machine.achieved.items()) if field == "tflops" else ():
        drawn.axes.axvline(rate, color=MUTED, linestyle=":", label=f"best {kind} product of the ceilings")
    left = f"The {len(names)} largest of {len(sizes)} cases; the table has all. " * (len(names) < len(sizes))
    lines = "Right of 1 FP8 is faster. Lines: 95 % intervals over rounds." * is_ratio
    return [drawn.chart(f"{what} by case", f"{left}{lines or 'Medians, each arm alone.'}")]
