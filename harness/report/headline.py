"""Headline: one row an FP8 arm of a machine, with its speed, its exactness and its loss side by side.

A number that is fast and wrong must not look good, so none stands alone. Each speed is that of the part that decides:
whole steps before layers before single GEMMs. On a CPU there is no speed to show, and its arms are rows by recipe.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness.judge.model_title import title_of
from harness.judge.verdict.result import percent
from harness.machine import mfu
from harness.report.compared import names
from harness.report.numerics import SQNR, fp8_newest, numerics_by_arm
from harness.report.records import arm_records, newest
from harness.report.runs import once
from harness.report.table import Cell, Column, Table, filled, known, number, resolved_of
from harness.report.training import STYLES, is_candidate
from harness.report.verdicts import WHAT, counted, fp8_pairs, what_of
from harness.store import text
from harness.store.arm import Arm, arm_of
from harness.store.compare import TIMES, rows_of, summary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.report.claims import Ledger
    from harness.report.numerics import Worst
    from harness.report.runs import Machine

_NO_RECIPE = ("torch", "fp8", "fp8_precomputed")  # arms of suites that compare no recipes
MOST_ROWS, MOST_OF_EACH = 14, 4  # of one machine; of each where there are several
Rows = list[tuple[str, str]]  # (run id, case id) that a number rests on
HeadlineRow = tuple[Cell, ...]
COLUMNS = (
    Column("FP8 arm"),
    number(
        "speedup over bf16",
        hint="geometric mean over the cases; below it the interval of one case, or the range over several",
    ),
    number(
        "mixed MFU",
        hint="sum of F_d / P_d over the step's time, each dtype against its own published peak; of several the median and range",
    ),
    number("worst SQNR (dB)", hint="least of all results of this recipe against a high-precision reference"),
    number("FP8 GEMMs", hint="seen by a profiler / expected"),
    Column("loss", hint="verdict of the gates on training runs of this recipe"),
    Column("measured"),
)


@dataclass(slots=True)
class Standing:
    """One arm: what is known of it."""

    fields: Arm
    suite: str = ""
    pairs: list[dict[str, Any]] = field(default_factory=list)
    gain: float = float("nan")

    @property
    def arm(self) -> str:
        """Its name."""
        return str(self.fields)


def headline_rows(machine: Machine, conditions: str, ledger: Ledger) -> list[HeadlineRow]:
    """A row an FP8 arm, the best first, with each of its numbers entered into the ledger."""
    return [_row(machine, conditions, ledger, s) for s in standings(machine)[:MOST_ROWS]]


def headline(machine: Machine, rows: Sequence[HeadlineRow]) -> Table | None:
    """The rows of one machine as a table; None where no FP8 arm was measured."""
    left = len(standings(machine)) - len(rows)
    caption = f"{text.plural(left, 'more arm')} in the tables below." if left else ""
    return _table(f"headline-{machine.env_id}", rows, caption) if rows else None


def overview(rows: Mapping[Machine, Sequence[HeadlineRow]]) -> Table | None:
    """The best rows of each machine with its name; None where there is none."""
    whole = []
    for name, (machine, own) in zip(names(list(rows)), rows.items(), strict=True):
        for arm, *numbers in own[:MOST_OF_EACH]:
            whole.append((Cell(arm.text, arm.order, note=name, href=f"#m-{machine.env_id}"), *numbers))
    cut = any(len(own) > MOST_OF_EACH for own in rows.values())
    caption = f"The best {MOST_OF_EACH} arms of each machine." if cut else ""
    return _table("headline", whole, caption) if whole else None


def _table(key: str, rows: Sequence[HeadlineRow], caption: str) -> Table:
    return filled(Table(key, COLUMNS, tuple(rows), caption, sortable=False, as_cards=True))


@once
def standings(machine: Machine) -> list[Standing]:
    """Arms of the deciding suite by gain; where no speed counts, one for each recipe."""
    pairs = fp8_pairs(machine)
    pairs = pairs[pairs["speedup"].notna() & (pairs["regime"] != "sustained")]
    if machine.is_gpu and len(pairs):
        rank = {suite: i for i, suite in enumerate(WHAT)}
        suite = min(pairs["suite"].unique(), key=lambda s: (rank.get(s, len(rank)), s))
        own = pairs[pairs["suite"] == suite]
        found = [
            Standing(arm_of(mine[0]), suite, mine, s["geometric_mean"])
            for s in rows_of(summary(own))
            if (mine := rows_of(own[own["arm"] == s["arm"]]))
        ]
        return sorted(found, key=lambda s: (-s.gain, s.arm))
    arms = [w.fields for w in numerics_by_arm(machine) if w.fp8 and w.sqnr]
    arms += [v.fields for v in machine.verdicts if is_candidate(v.fields)]
    return [Standing(what) for what in dict.fromkeys(map(recipe, arms)) if what != Arm()]


def recipe(arm: Arm) -> Arm:
    """What an arm computes, however it is run: the recipe and whose it is; an empty arm where it is of no recipe.

    >>> from harness.store.arm import parse
    >>> str(recipe(parse("tensorwise_fused_eager"))), str(recipe(parse("torchao_rowwise_eager")))
    ('tensorwise', 'torchao_rowwise')
    """
    return Arm() if arm.variant in _NO_RECIPE else arm.computes


def _row(machine: Machine, conditions: str, ledger: Ledger, standing: Standing) -> HeadlineRow:
    computed = recipe(standing.fields)

    def claim(what: str, cell: Cell, rows: Rows) -> Cell:
        if not cell.text or not rows:
            return cell
        entry = f"{what} {cell.text}" + (f" ({cell.interval})" if cell.interval else "")
        entry += f", {cell.note}" if cell.note else ""
        key = ledger.add(machine, conditions, standing.arm, entry, rows)
        return replace(cell, href=f"#{key}")

    titles = _titles(machine, standing)
    what = what_of(standing.suite) if standing.suite else ""
    cases = {p["case_id"] for p in standing.pairs}
    count = text.plural(len(cases), "case") if cases else ""
    worst, where = _worst(machine, standing.fields, computed)
    used, of = _mixed_mfu(machine, standing)
    seen, ran = proof(machine, standing.fields, computed)
    loss, trained = _loss(machine, computed)
    return (
        Cell(standing.arm, standing.arm),
        claim(
            f"speedup over bf16, {what}",
            _gain(standing),
            [(p["run_id"], p["case_id"]) for p in standing.pairs],
        ),
        claim("mixed MFU", used, of),
        claim("worst SQNR (dB)", worst, where),
        claim("FP8 GEMMs", seen, ran),
        claim("loss", loss, trained),
        Cell(what, what, note=f"{titles}, {count}" if titles else count),
    )


def _titles(machine: Machine, standing: Standing) -> str:
    """What training steps were of, as it really ran; "" for other suites, and where there are several."""
    if standing.suite != "train":
        return ""
    cases = {(p["run_id"], p["case_id"]) for p in standing.pairs}
    own = [r for r in machine.rows if (r["run_id"], r["case_id"]) in cases and r["arm"] == standing.arm]
    found = {title_of(r) for r in own if r["metric"] == "time_ms" and r["status"] == "ok"}
    return found.pop() if len(found) == 1 else ""


def _gain(standing: Standing) -> Cell:
    if not standing.pairs:
        return Cell("", None)
    verdicts = Counter(p["verdict"] for p in standing.pairs)
    style = next(iter(verdicts)) if len(verdicts) == 1 else ""
    values = [p["speedup"] for p in standing.pairs]
    shown = Cell(text.ratio(standing.gain), standing.gain, style)
    if len(values) > 1:
        return replace(shown, note=text.spread(min(values), max(values), *counted(standing.pairs)))
    interval = text.interval(standing.pairs[0]["low"], standing.pairs[0]["high"])
    return shown if interval == text.NONE else replace(shown, interval=interval)


def _worst(machine: Machine, arm: Arm, computed: Arm) -> tuple[Cell, Rows]:
    """The least SQNR of the arm itself; of any arm of its recipe where it has none, or stands for the recipe."""
    every = [w for w in numerics_by_arm(machine) if w.fp8 and w.sqnr]
    own = [w for w in every if w.fields == arm != computed] or [
        w for w in every if recipe(w.fields) == computed
    ]
    if not own:
        return Cell("", None), []
    least: Worst = min(own, key=lambda w: w.worst[1])
    metric, value = least.worst
    bad = any(w.below(m) for w in own for m in w.sqnr)
    note = f"{SQNR[metric]}, {least.suite}"
    return Cell(text.number(value), value, "bad" if bad else "", note), [least.where[metric]]


def _mixed_mfu(machine: Machine, standing: Standing) -> tuple[Cell, Rows]:
    """Mixed MFU of training steps, by the causal count where there is one, since it counts what runs."""
    if standing.suite != "train":
        return Cell("", None), []
    shares: list[float] = []
    flags: set[str] = set()
    rows: Rows = []
    for r in newest(arm_records(machine, "train")):
        if r["arm"] == standing.arm and r["status"] == "ok":
            found = mfu.of_row(r, machine.device, machine.achieved)
            executed = [u for u in found if u.formula in mfu.EXECUTED] or list(found)
            if executed and known(executed[-1].mfu_mixed):
                shares.append(executed[-1].mfu_mixed)
                flags |= set(executed[-1].flags) - {"bf16_peak_passed"}
                rows.append((r["run_id"], r["case_id"]))
    if not shares:
        return Cell(text.NONE, None, "muted"), []
    middle = statistics.median(shares)
    over = text.plural(len(shares), "case")
    notes = (
        [f"{text.percent(min(shares))} to {text.percent(max(shares))}, range over {over}"]
        if len(shares) > 1
        else []
    )
    notes += [flag.replace("_", " ") for flag in sorted(flags)]
    return Cell(text.percent(middle), middle, "bad" if "over_peak" in flags else "", "; ".join(notes)), rows


def proof(machine: Machine, arm: Arm, computed: Arm) -> tuple[Cell, Rows]:
    """FP8 GEMMs that a profiler saw of those expected; "" where nothing counted them."""
    rows = fp8_newest(machine)
    own = [r for r in rows if arm_of(r) == arm != computed] or [
        r for r in rows if recipe(arm_of(r)) == computed
    ]
    counted = [(r, resolved_of(r)) for r in own if "fp8_gemms" in resolved_of(r) and r["metric"] in TIMES]
    if not counted:
        direct = [r for r in own if "float8" in str(resolved_of(r).get("a_dtype"))]
        return (
            (Cell("direct", "direct", note="float8 operands"), _of(direct))
            if direct
            else (Cell("", None), [])
        )
    seen = sum(about["fp8_gemms"] for _, about in counted)
    due = sum(about.get("fp8_gemms_expected", about["fp8_gemms"]) for _, about in counted)
    return Cell(f"{seen} of {due}", seen / due if due else 0.0, "bad" if seen < due else ""), _of(
        [r for r, _ in counted]
    )


def _loss(machine: Machine, computed: Arm) -> tuple[Cell, Rows]:
    own = [v for v in machine.verdicts if v.fields == computed]
    if not own:
        return Cell("", None), []
    outcomes = Counter(v.verdict.outcome for v in own)
    outcome = next(iter(outcomes)) if len(outcomes) == 1 else ""
    words = outcome or ", ".join(f"{count} {word}" for word, count in outcomes.items())
    runs = {v.run_id for v in own}
    rows = [
        r for r in machine.rows if r["run_id"] in runs and arm_of(r) == computed and r["metric"] == "loss"
    ]
    late = [g.effect for v in own if (g := v.verdict.gate("L4")) is not None and math.isfinite(g.effect)]
    note = f"late gap {percent(late[0])}" if len(own) == 1 and late else ""
    return Cell(words, words, STYLES.get(outcome, ""), note), _of(rows)


def _of(rows: Sequence[dict[str, Any]]) -> Rows:
    return [(r["run_id"], r["case_id"]) for r in rows]
