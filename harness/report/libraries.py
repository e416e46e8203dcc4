"""Libraries: which of them backend "fastest" chose for each product, and how far that is from the better one.

The arms `<product>` (cuBLAS), `<product>_triton` (fp8core's kernel) and `<product>_fastest` of a case are timed in the
same rounds. The better one is judged by those rounds and not by the library's own measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from harness.report.records import arm_records
from harness.report.table import Cell, Column, axis_column, make_table, number, resolved_of
from harness.store import stats, text
from harness.store.arm import arm_of
from harness.store.effect import MIN_ROUNDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.report.runs import Machine
    from harness.report.table import Record, Table

FASTEST = "fastest"
OWN = "triton"
BAR = 0.95  # of the better library's speed, which the choice must not fall below at any shape
BLOCKS = "blockwise_triton_eager"


@dataclass(frozen=True, slots=True)
class Choice:
    """One product of which both libraries and the choice have a time.

    Attributes:
        record: of the arm that chooses.
        product: the arm of cuBLAS, which names scales and accumulation.
        chosen: "torch" or "triton", as the row says.
        times: ms of "torch", "triton" and "fastest".
        of_best: time of the better library / time of the choice, over paired rounds; 1 is the best there is.
        low, high: its 95 % interval.
        blocks: time of the choice / time of the blockwise product; above 1 that is faster, by other numbers. NaN where
            it was not timed.
    """

    record: Record
    product: str
    chosen: str
    times: Mapping[str, float]
    of_best: float
    low: float
    high: float
    blocks: float

    @property
    def axes(self) -> str:
        """Axes of its case, as JSON."""
        return str(self.record["axes"])

    @property
    def below(self) -> bool:
        """The whole interval lies below the bar."""
        return self.high < BAR


def choices(machine: Machine) -> list[Choice]:
    """Newest run, for each case and product, in which all three arms have a time in the isolated regime."""
    cases: dict[tuple[str, str], dict[str, Record]] = {}
    for r in arm_records(machine, "gemm"):
        if r["status"] == "ok" and r["regime"] in ("isolated", ""):
            cases.setdefault((r["run_id"], r["case_id"]), {})[r["arm"]] = r
    found: dict[tuple[str, str], Choice] = {}
    for (_, case), arms in cases.items():
        for record in arms.values():
            fields = arm_of(record)
            if fields.variant != FASTEST:
                continue
            names = {way: str(replace(fields, variant=variant)) for way, variant in _ARMS.items()}
            ways = {way: arms[name] for way, name in names.items() if name in arms}
            choice = (
                _choice(record, names["torch"], ways, arms.get(BLOCKS))
                if ways.keys() == names.keys()
                else None
            )
            if choice is not None:
                found[case, choice.product] = choice
    return list(found.values())


def chosen_table(machine: Machine) -> Table:
    """The choices, and in the caption the worst of them against the bar."""
    found = choices(machine)
    columns = [
        *map(axis_column, ("role", *text.SIZES)),
        Column("product", "product"),
        Column("chosen", "chosen"),
        *(number(f"{name} (ms)", partial(_time, name)) for name in _ARMS),
        number("of the best", _of_best, hint=f"better library's time / the choice's, paired; bar {BAR:g}"),
    ]
    if any(not math.isnan(choice.blocks) for choice in found):
        hint = "speed of blockwise over the choice; its scales and sums are others"
        columns.append(number("blockwise", "blocks", text.ratio, hint))
    return make_table(f"libraries-{machine.env_id}", columns, found, _said(found))


_ARMS = {"torch": "", "triton": OWN, "fastest": FASTEST}


def _choice(
    record: Record, product: str, ways: Mapping[str, Record], blockwise: Record | None
) -> Choice | None:
    """None where the arms share too few rounds."""
    medians = {name: _medians(way) for name, way in ways.items()}
    ratios = {name: _log_ratios(medians[name], medians["fastest"]) for name in ("torch", "triton")}
    if min(map(len, ratios.values())) < MIN_ROUNDS:
        return None
    best = min(ratios.values(), key=lambda own: sum(own) / len(own))
    low, high = stats.t_interval(best)
    blocks = _log_ratios(medians["fastest"], _medians(blockwise)) if blockwise else []
    return Choice(
        record,
        product,
        str(resolved_of(record).get("chosen", "")),
        {name: way["value"] for name, way in ways.items()},
        math.exp(sum(best) / len(best)),
        math.exp(low),
        math.exp(high),
        math.exp(sum(blocks) / len(blocks)) if blocks else math.nan,
    )


def _medians(record: Record) -> dict[int, float]:
    return stats.round_medians(record["samples"], record["rounds"]) if len(record["rounds"]) else {}


def _log_ratios(over: Mapping[int, float], under: Mapping[int, float]) -> list[float]:
    return [math.log(over[r] / under[r]) for r in over if r in under]


def _time(name: str, choice: Choice) -> float:
    return choice.times[name]


def _of_best(choice: Choice) -> Cell:
    shown = f"{choice.of_best:.3f}"
    interval = text.interval(choice.low, choice.high)
    return Cell(shown, choice.of_best, "slower" if choice.below else "", interval=interval)


def _said(found: list[Choice]) -> str:
    if not found:
        return ""
    worst = min(found, key=lambda choice: choice.of_best)
    under = sum(choice.of_best < BAR for choice in found)
    verdict = (
        f"{under} of {text.plural(len(found), 'product')} fall below it" if under else "none falls below it"
    )
    own = sum(choice.chosen == "triton" for choice in found)
    case = text.case_label(text.axes_of(worst.record["axes"]), ())
    return (
        f'Backend "fastest" took cuBLAS for {len(found) - own} and fp8core\'s kernel for {own} of '
        f"{text.plural(len(found), 'product')}. Worst choice: {worst.of_best:.3f} of the better library's speed "
        f"({worst.product}, {case}); the bar is {BAR:g}, {verdict}. Paired rounds, isolated regime."
    )
