"""Headline: the table of arms, a row an FP8 arm of a machine, with its speed, its exactness and its loss side by side.

A number that is fast and wrong must not look good, so none stands alone. Each speed is that of the part that decides:
whole steps before layers before single GEMMs. On a CPU there is no speed to show, and its arms are rows by recipe.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.judge.model_title import title_of
from harness.judge.verdict.result import percent
from harness.machine import mfu
from harness.report.records import (
    SQNR,
    arm_records,
    fp8_by_arm,
    gemms,
    has_time,
    key_of,
    numerics_by_arm,
    tokens_per_s,
)
from harness.report.runs import once
from harness.report.standings import recipe, reservations, standings
from harness.report.table import STYLES, columns, known, number4, resolved_of
from harness.report.verdicts import what_of
from harness.store import text
from harness.store.case import arm_of
from harness.store.compare import SECONDS
from harness.store.printer import Cell, Table, filled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from harness.report.runs import Machine
    from harness.report.standings import Standing
    from harness.report.table import Record

MOST_ROWS = 14
HeadlineRow = tuple[Cell, ...]
COLUMNS = columns("headline")
NOTHING = Cell("")


def headline_rows(machine: Machine) -> list[HeadlineRow]:
    """A row an FP8 arm, the best first."""
    rows = []
    for standing in standings(machine)[:MOST_ROWS]:
        both = partial(_both, machine, standing)
        made = {
            "speedup over bf16": standing.qualified if standing.pairs else NOTHING,
            "time (ms)": both(lambda r: 1e3 * r["value"] * SECONDS[r["unit"]], number4),
            "tokens/s": both(tokens_per_s, text.count),
            "mixed MFU": _mixed_mfu(machine, standing),
            "mJ/token": both(lambda r: 1e3 * r.get("joules_per_token", math.nan), text.number),
            "worst SQNR (dB)": _worst(machine, standing),
            "FP8 GEMMs": proof(machine, standing),
            "loss": _loss(machine, standing),
            "in doubt": Cell("; ".join(reservations(machine, standing)) if standing.pairs else ""),
        }
        what = what_of(standing.suite) if standing.suite else ""
        theirs = machine.reproductions.get(standing.arm)
        cells = [Cell(standing.arm, standing.arm, note=theirs.words if theirs else "")]
        cells += [made[column.title] for column in COLUMNS[1:-1]]
        cases = {p["case_id"] for p in standing.pairs}
        note = [_title(machine, standing), text.plural(len(cases), "case") if cases else ""]
        rows.append((*cells, Cell(what, what, note=", ".join(filter(None, note)))))
    return rows


def headline(machine: Machine, rows: Sequence[HeadlineRow]) -> Table | None:
    """The rows of one machine as a table; None where no FP8 arm was measured."""
    if not rows:
        return None
    left = len(standings(machine)) - len(rows)
    caption = [f"{text.plural(left, 'more arm')} in the tables below."] * bool(left)
    shown, what = len(COLUMNS), rows[0][-1]
    if what.text and all(row[-1] == what for row in rows):
        shown -= 1
        caption.append(f"All of {what.text}: {what.note}.")
    headings, cells = [c.heading for c in COLUMNS[:shown]], [row[:shown] for row in rows]
    key = f"headline-{machine.env_id}"
    return filled(Table(key, headings, cells, " ".join(caption), sortable=False, as_cards=True))


def _title(machine: Machine, standing: Standing) -> str:
    """What training steps were of, as it really ran; "" for other suites, and where there are several."""
    cases = {(p["run_id"], p["case_id"]) for p in standing.pairs if standing.suite == "train"}
    rows = machine.pick(suite="train", arm=standing.arm, metric="time_ms", status="ok")
    found = {title_of(r) for r in rows if (r["run_id"], r["case_id"]) in cases}
    return found.pop() if len(found) == 1 else ""


@once
def _records(machine: Machine, suite: str) -> dict[tuple[str, str, str], Record]:
    """Records of arms that have a time, by run, case and arm."""
    return {key_of(r): r for r in arm_records(machine, suite) if has_time(r) and r["regime"] != "sustained"}


def _sides(machine: Machine, standing: Standing) -> list[list[Record | None]]:
    """Records of an arm and of its baseline, a pair each; None for one without a time."""
    found = _records(machine, standing.suite)
    return [
        [found.get((p["run_id"], p["case_id"], p[arm])) for arm in ("arm", "baseline")]
        for p in standing.pairs
    ]


def _both(
    machine: Machine, standing: Standing, figure: Callable[[Record], Any], show: Callable[[float], str]
) -> Cell:
    """A figure of an arm, and below it that of its baseline; of several cases, which share no figure, nothing."""
    if len({p["case_id"] for p in standing.pairs}) != 1:
        return NOTHING
    mine, base = (figure(side) if side else None for side in _sides(machine, standing)[0])
    if not known(mine):
        return NOTHING
    return Cell(show(mine), mine, note=f"{standing.pairs[0]['baseline']} {show(base)}" if known(base) else "")


def _worst(machine: Machine, standing: Standing) -> Cell:
    """The least SQNR of the arm itself; of any arm of its recipe where it has none, or stands for the recipe."""
    every = [w for w in numerics_by_arm(machine) if w.fp8 and w.sqnr]
    own = [w for w in every if w.fields == standing.fields != standing.computes]
    own = own or [w for w in every if recipe(w.fields) == standing.computes]
    if not own:
        return NOTHING
    least = min(own, key=lambda w: w.worst[1])
    metric, value = least.worst
    style = "bad" if any(w.failing for w in own) else ""
    bare = ", not judged: no bound" * any(w.unjudged for w in own)
    return Cell(text.number(value), value, style, f"{SQNR[metric]}, {least.suite}{bare}")


def _mixed_mfu(machine: Machine, standing: Standing) -> Cell:
    """Mixed MFU of training steps and of their baselines, by the causal count where there is one, since it counts what runs."""
    if standing.suite != "train":
        return NOTHING
    # 0 layers where none is advised: the arm ran in bf16
    pairs = [
        sides
        for sides in _sides(machine, standing)
        if sides[0] and resolved_of(sides[0]).get("fp8_layers", 1)
    ]
    sides = [
        [used for row in own if row and (used := _used(machine, row))] for own in zip(*pairs, strict=True)
    ] or [[], []]
    doubts = {doubt for used in sides[0] for doubt in used.doubts}
    if not sides[0] or doubts:  # a share above 100 % stands in the table of MFU alone
        style = "bad" if doubts else "muted"
        return Cell(text.NONE, None, style, "; ".join(sorted(doubts)).replace("_", " "))
    shares, theirs = ([used.mfu_mixed or 0.0 for used in own if not used.doubts] for own in sides)
    middle = statistics.median(shares)
    notes = [
        f"{text.percent(min(shares))} to {text.percent(max(shares))}, range over {text.plural(len(shares), 'case')}"
    ] * (len(shares) > 1)
    if theirs:
        notes.append(f"{standing.pairs[0]['baseline']} {text.percent(statistics.median(theirs))}")
    notes += dict.fromkeys(used.formula for used in sides[0])
    return Cell(text.percent(middle), middle, note=", ".join(notes))


def _used(machine: Machine, row: Record) -> mfu.Utilization | None:
    """How well a step used the GPU, where its mixed MFU is known."""
    found = mfu.of_row(row, machine.device, machine.achieved or None)
    used = next((u for u in reversed(found) if u.formula in mfu.EXECUTED), found[-1] if found else None)
    return used if used and known(used.mfu_mixed) else None


def proof(machine: Machine, standing: Standing) -> Cell:
    """FP8 GEMMs that a profiler saw of those expected; "" where nothing counted them."""
    arms = fp8_by_arm(machine).values()
    own = [r for rows in arms if arm_of(rows[0]) == standing.fields != standing.computes for r in rows]
    own = own or [r for rows in arms if recipe(arm_of(rows[0])) == standing.computes for r in rows]
    counts = [r for r in own if gemms(r).seen is not None]
    if not counts:
        is_direct = any(gemms(r).direct for r in own)
        return Cell("direct", "direct", note="float8 operands") if is_direct else NOTHING
    seen, due = (
        sum(each) for each in zip(*((ran.seen or 0, ran.due) for ran in map(gemms, counts)), strict=True)
    )
    return Cell(f"{seen} of {due}", seen / due if due else 0.0, "bad" if seen < due else "")


def _loss(machine: Machine, standing: Standing) -> Cell:
    own = [v for v in machine.verdicts if v.fields == standing.computes]
    if not own:
        return NOTHING
    outcomes = Counter(v.verdict.outcome for v in own)
    outcome = own[0].verdict.outcome if len(outcomes) == 1 else ""
    words = outcome or ", ".join(f"{count} {word}" for word, count in outcomes.items())
    late = [g.effect for v in own if (g := v.verdict.gate("L4")) is not None and math.isfinite(g.effect)]
    note = f"late gap {percent(late[0])}" if len(own) == 1 and late else ""
    return Cell(words, words, STYLES.get(outcome, ""), note)
