"""Numerics: the worst figures of each arm against the bounds that its suite stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.report.records import newest
from harness.report.runs import once
from harness.report.table import Cell, Column, Table, filled, make_table, number
from harness.store import text
from harness.store.arm import Arm, arms_of, controls
from harness.store.compare import FP8_DTYPES, TIMES, rows_of
from harness.store.json_columns import parse

if TYPE_CHECKING:
    import pandas as pd

    from harness.report.runs import Machine

SQNR = {"sqnr_db": "output", "grad_input_sqnr_db": "grad_input", "grad_weight_sqnr_db": "grad_weight"}
ROW_SQNR = ("sqnr_row_min_db", "grad_input_sqnr_row_min_db", "grad_weight_sqnr_row_min_db")
NUMERICS = (
    *SQNR,
    *ROW_SQNR,
    "accum_sqnr_db",
    "rel_err_max",
    "underflow_frac",
    "saturated_frac",
    "mismatches",
)


@dataclass(frozen=True, slots=True)
class Worst:
    """Worst figures of one arm of one suite over its cases."""

    suite: str
    arm: str
    fields: Arm
    fp8: bool
    cases: int
    sqnr: dict[str, float]  # metric of SQNR -> dB of the case that comes nearest to its bound
    bounds: dict[str, float]  # metric of SQNR -> that case's bound in dB, where its suite stores one
    where: dict[str, tuple[str, str]]  # metric of SQNR -> (run id, case id) of that case
    row_min: float
    accumulation: float
    underflow: float
    mismatches: float
    checked_codes: int

    @property
    def judged(self) -> bool:
        """Whether it claims to be right; a plain `.to()` shows what this version of torch does (suite `codes`)."""
        return (self.suite, self.arm) != ("codes", "plain")

    @property
    def worst(self) -> tuple[str, float]:
        """The result (metric) with the smallest SQNR, and that SQNR in dB."""
        return min(self.sqnr.items(), key=lambda item: item[1])

    def below(self, metric: str) -> bool:
        """Whether a figure lies below the bound stored for it; one that is no number does."""
        return not self.sqnr[metric] >= self.bounds.get(metric, -math.inf)


@once
def numerics_by_arm(machine: Machine) -> list[Worst]:
    """Worst figures of each arm of each suite, with the bounds that its suite stored (`resolved.sqnr_bound_db`)."""
    frame = machine.frame
    checked = frame[frame["metric"].isin(NUMERICS) & (frame["status"] == "ok") & (frame["part"] == "")]
    rows = fp8_rows(machine)
    fp8 = set(zip(rows["suite"], rows["arm"], strict=True))
    # A cast does no FLOPs; what it makes is FP8 all the same.
    fp8 |= {
        (s, a)
        for s, a, m in zip(checked["suite"], checked["arm"], checked["metric"], strict=True)
        if m == "mismatches"
    }
    out = []
    for (suite, arm), group in checked.groupby(["suite", "arm"], sort=False):
        sqnr, bounds, where = _nearest_to_bound(group)
        low = group.groupby("metric")["value"].min()
        high = group.groupby("metric")["value"].max()
        out.append(
            Worst(
                str(suite),
                str(arm),
                arms_of(group)[0],
                (suite, arm) in fp8,
                group["case_id"].nunique(),
                sqnr,
                bounds,
                where,
                float(low.reindex(ROW_SQNR).min()),
                float(low.get("accum_sqnr_db", math.nan)),
                float(high.get("underflow_frac", math.nan)),
                float(high.get("mismatches", 0.0)),
                int((group["metric"] == "mismatches").sum()),
            )
        )
    return out


def _nearest_to_bound(
    group: pd.DataFrame,
) -> tuple[dict[str, float], dict[str, float], dict[str, tuple[str, str]]]:
    """Figure, bound and case with the smallest margin, for each SQNR; the lowest figure where there is no bound.

    Every case has a bound of its own (`resolved.sqnr_bound_db`: a number for `sqnr_db`, or a mapping from metric to
    dB): that of e4m3 x e5m2 lies 4 dB below that of e4m3 x e4m3.
    """
    found: dict[str, tuple[float, float, float | None, tuple[str, str]]] = {}
    columns = (group[name] for name in ("metric", "value", "resolved", "run_id", "case_id"))
    for metric, value, resolved, run_id, case_id in zip(*columns, strict=True):
        if metric not in SQNR:
            continue
        stored = _stored_bound(resolved or "{}")
        bound = stored.get(metric) if isinstance(stored, dict) else stored if metric == "sqnr_db" else None
        margin = float(value) if bound is None else float(value) - float(bound)
        if metric not in found or margin < found[metric][0]:
            found[metric] = (margin, float(value), bound, (run_id, case_id))
    sqnr = {metric: found[metric][1] for metric in SQNR if metric in found}
    bounds = {metric: float(found[metric][2] or 0) for metric in sqnr if found[metric][2] is not None}
    return sqnr, bounds, {metric: found[metric][3] for metric in sqnr}


def _stored_bound(resolved: str) -> Any:
    """`resolved.sqnr_bound_db` of a row."""
    return parse(resolved).get("sqnr_bound_db")


def numerics_table(machine: Machine) -> Table:
    """Worst figures by arm, without empty columns."""
    columns = (
        Column("suite", "suite"),
        Column("arm", "arm"),
        number("cases", "cases", str),
        *(number(f"{name} (dB)", partial(_sqnr_cell, m)) for m, name in SQNR.items()),
        number("bound (dB)", _bound_cell),
        number("worst row (dB)", lambda w: Cell(text.number(w.row_min), w.row_min)),
        number("accumulation (dB)", lambda w: Cell(text.number(w.accumulation), w.accumulation)),
        number("underflow", lambda w: Cell(text.percent(w.underflow), w.underflow)),
        number(
            "codes that differ",
            lambda w: Cell(text.count(w.mismatches) if w.checked_codes else text.NONE, w.mismatches),
        ),
    )
    found = make_table(f"numerics-{machine.env_id}", columns, numerics_by_arm(machine), sortable=False)
    return filled(found, text.NONE)


def _sqnr_cell(metric: str, worst: Worst) -> Cell:
    found = worst.sqnr.get(metric)
    return Cell(text.number(found), found, "bad" if metric in worst.sqnr and worst.below(metric) else "")


def _bound_cell(worst: Worst) -> Cell:
    bounds = [text.number(worst.bounds[m], 4) for m in SQNR if m in worst.bounds]
    return Cell(" / ".join(bounds) or text.NONE, max(worst.bounds.values(), default=None))


@once
def fp8_rows(machine: Machine) -> pd.DataFrame:
    """Times of the arms that spent FLOPs in FP8, one a (run, case, arm), controls left out."""
    frame = machine.frame
    timed = frame[frame["metric"].isin(TIMES) & (frame["status"] == "ok") & ~controls(frame)]
    fp8 = timed["flops"].map(lambda t: any(str(k).startswith(FP8_DTYPES) for k in parse(t)))
    return timed[fp8.astype(bool)].drop_duplicates(["run_id", "case_id", "arm"])


@once
def fp8_newest(machine: Machine) -> list[dict[str, Any]]:
    """The same of the newest run of each case."""
    return newest(rows_of(fp8_rows(machine)))
