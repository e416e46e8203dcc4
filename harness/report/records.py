"""Records: what a machine's rows say of each arm: its times with what it gained, how exact it is, what it proved."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.machine import mfu
from harness.report.runs import newest, once
from harness.report.table import estimate, known, resolved_of
from harness.store.case import Arm, arm_of
from harness.store.compare import FP8_DTYPES, SECONDS, TIMES
from harness.store.measurement import ProofOutcome, proof_outcome
from harness.store.outside import parse
from harness.store.rows import grouped, rows_of

if TYPE_CHECKING:
    from collections import defaultdict
    from collections.abc import Mapping

    import pandas as pd

    from harness.machine.hardware import Device
    from harness.report.runs import Machine
    from harness.report.table import Record, Row

FigureKey = tuple[str, str, str]  # run, case, arm
FIGURE = ["run_id", "case_id", "arm", "metric", "value"]  # columns
GAINS = ("speedup", "low", "high", "floor", "verdict", "condition")
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
# Of `resolved.evidence`: cases that break recipes on purpose can refute, and prove nothing; what is recorded is not judged
REFUTES, RECORDED = "refutes", "none"
_STATED_SINCE = {  # what rows of before do not state
    ("outliers", ""): REFUTES,
    ("codes", ""): REFUTES,
    ("codes", "plain"): RECORDED,
}
COMPILE_FACTS = ("compile_graphs", "compile_graph_breaks", "recompiles")  # of `resolved`, about a compilation


def key_of(row: Record) -> FigureKey:
    """Run, case and arm of a row."""
    return row["run_id"], row["case_id"], row["arm"]


# Times


@once
def timed_records(machine: Machine, suite: str) -> list[Row]:
    """Time rows of a suite, of all runs, with `GAINS` of the paired ratio where they are known; A/A controls left out."""
    ratios = {(key_of(r), r["regime"], r["metric"]): r for r in machine.every_pair if r["suite"] == suite}
    own = [r for r in machine.pick(suite=suite, metric=TIMES) if not arm_of(r).control]
    pairs = (ratios.get((key_of(r), r["regime"], r["metric"]), {}) for r in own)
    return [{**r, **{name: pair.get(name) for name in GAINS}} for r, pair in zip(own, pairs, strict=True)]


@once
def arm_records(machine: Machine, suite: str, most: int | None = None) -> list[Row]:
    """All of `timed_records`, or so many, with what else is known of the arm.

    That is every other metric by its name, `copy_share` of the measured copy bandwidth, `peak_share` and `over_peak` of the
    published peak.
    """
    own = timed_records(machine, suite)[:most]
    others = machine.rows.where(
        suite=suite,
        case_id={r["case_id"] for r in own},
        status="ok",
        part="",
        metric=lambda metric: metric not in TIMES,
    )
    figures: dict[FigureKey, dict[str, float]] = {}
    for run, case, arm, metric, value in machine.frame.loc[others, FIGURE].itertuples(index=False, name=None):
        figures.setdefault((run, case, arm), {})[metric] = value
    reached = machine.ceilings if suite != "ceilings" else None
    records = []
    for row in own:
        record = {**row, **figures.get(key_of(row), {})}
        if reached is not None and known(row["gb_per_s"]) and (copy := reached.bandwidth(row["bytes_moved"])):
            record["copy_share"] = 1e9 * row["gb_per_s"] / copy
        if machine.is_gpu and (known(row["tflops"]) or known(row["gb_per_s"])):
            record.update(_against_peak(machine.device, row))
        expected = resolved_of(row).get("prediction")
        record["tokens_per_s"] = tokens_per_s(row)
        if isinstance(expected, dict) and expected.get("speedup"):
            record["prediction"] = estimate(*expected["speedup"])
        records.append(record)
    return records


def has_time(record: Row) -> bool:
    """Whether an arm was measured."""
    return bool(record["status"] == "ok")


def tokens_per_s(record: Record) -> float | None:
    """Tokens of a training step, of all ranks, over its time; None where the step's time or tokens are not known."""
    resolved = resolved_of(record)
    tokens = resolved.get("tokens_per_step")
    if record["status"] != "ok" or not known(tokens) or not tokens:
        return None
    return float(tokens * (resolved.get("ranks") or 1) / (record["value"] * SECONDS[record["unit"]]))


def _against_peak(device: Device | None, row: Record) -> Row:
    """Share of the published dense peak: of each GEMM's own dtype (sum of F_d / P_d over the time), else of bandwidth.

    `over_peak`: which peak it passed by the rule that counted its FLOPs (`mfu.FLAGS`); "" for none.
    """
    if device is None:
        return {"peak_share": math.nan, "peak_known": False}
    seconds, flags = row["value"] * SECONDS[row["unit"]], []
    shares: list[float | None] = []
    for rule, work in mfu.counts(row).items():
        least = mfu.floor_seconds(work, {d: device.peak_tflops(d) for d in work})
        shares.append(None if least is None else least / seconds)
        flags.append(mfu.passed(device, work, seconds, rule, shares[-1], mfu.clock_of(row)))
    if not shares:
        shares = [row["gb_per_s"] / (1e3 * device.bandwidth_tb_s)]
        flags = ["over_published" * bool(shares[0] and shares[0] > 1)]
    if shares[0] is None:
        return {"peak_share": math.nan, "peak_known": False}
    flag = next(filter(None, reversed(flags)), "")  # what really runs says most
    return {"peak_share": shares[0], "peak_known": True, "over_peak": flag}


@once
def fp8_rows(machine: Machine) -> list[Row]:
    """Times of the arms that spent FLOPs in FP8, one a (run, case, arm), controls left out."""
    found: dict[FigureKey, Row] = {}
    for r in machine.pick(metric=TIMES, status="ok", flops=_in_fp8):
        if not arm_of(r).control:
            found.setdefault(key_of(r), r)
    return list(found.values())


def is_fp8(row: Record) -> bool:
    """Whether an arm spent FLOPs in FP8."""
    return _in_fp8(row["flops"])


def _in_fp8(flops: str) -> bool:
    return any(str(dtype).startswith(FP8_DTYPES) for dtype in parse(flops))


class Gemms(NamedTuple):
    """FP8 GEMMs of a row: those that a profiler saw (None: nothing counted) of those due; `direct`: its operands were float8."""

    seen: int | None
    due: int
    direct: bool

    @property
    def short(self) -> bool:
        """Whether FP8 did not run where it should; 0 of 0 is none, not all."""
        return self.seen is not None and (self.seen < self.due or not self.seen)

    @property
    def on_operands(self) -> bool:
        """Whether its operands alone prove FP8: nothing was counted."""
        return self.seen is None and self.direct


def gemms(row: Record) -> Gemms:
    """What a row says of its GEMMs. A suite that counts gives no time to an arm that falls short."""
    return gemms_of(resolved_of(row))


def gemms_of(about: Mapping[str, Any]) -> Gemms:
    """What a row's `resolved` says of its GEMMs."""
    seen = about.get("fp8_gemms")
    return Gemms(seen, about.get("fp8_gemms_expected", seen), "float8" in str(about.get("a_dtype")))


@once
def fp8_by_arm(machine: Machine) -> defaultdict[tuple[str, str], list[Row]]:
    """The newest of `fp8_rows` for each case and regime, by suite and arm."""
    return grouped(((r["suite"], r["arm"]), r) for r in newest(fp8_rows(machine), has_time))


@once
def compilations(machine: Machine) -> dict[FigureKey, Row]:
    """What each compiled arm cost and gains, by (run, case, arm).

    Fields, where known: `suite`, `axes`, `cold_s` and `warm_s` of the first call, `COMPILE_FACTS`, and of the isolated time
    `gain_s`, what one call takes less than the eager arm of the same precision, with `cold_pays` and `warm_pays`, the
    number of calls after which that is won back (inf: never).
    """
    found: dict[FigureKey, Row] = {}
    for r in machine.pick(metric="compile_s", status="ok"):
        about = found.setdefault(
            key_of(r), {"suite": r["suite"], "axes": r["axes"], "eager": _eager(arm_of(r))}
        )
        resolved = resolved_of(r)
        warm = r["part"] == "warm" or resolved.get("compile_cache") == "warm"
        about["warm_s" if warm else "cold_s"] = r["value"]
        about |= {name: resolved.get(name) for name in COMPILE_FACTS}
    times: dict[FigureKey, tuple[float, Any]] = {}
    for suite in {about["suite"] for about in found.values()}:
        for r in timed_records(machine, suite):
            if r["status"] == "ok" and r["regime"] in ("isolated", ""):
                tokens = resolved_of(r).get("tokens_per_step")
                times[key_of(r)] = (r["value"] * SECONDS[r["unit"]], tokens)
    for key, about in found.items():
        mine, eager = times.get(key), times.get((*key[:2], about["eager"]))
        if mine is None or eager is None or mine[1] != eager[1]:  # steps of different batches are no pair
            continue
        about["gain_s"] = gain = eager[0] - mine[0]
        for which in ("cold", "warm"):
            if f"{which}_s" in about:
                about[f"{which}_pays"] = about[f"{which}_s"] / gain if gain > 0 else math.inf
    return found


def _eager(arm: Arm) -> str:
    """Name of the arm that does the same without the compiler; "" where the arm is not known to use it."""
    casts = "" if arm.casts == "kernels" else arm.casts  # eager casts are kernels anyway
    return str(replace(arm, mode="eager", casts=casts)) if arm.mode == "compile" else ""


# Numerics


@dataclass(frozen=True, slots=True)
class Worst:
    """Worst figures of one arm of one suite over its cases.

    Attributes:
        sqnr: dB of the case that comes nearest to its bound, by metric of `SQNR`.
        bounds: that case's bound in dB, where its suite stores one.
        where: (run id, case id) of that case.
        unjudged: cases of which some SQNR has no bound, nor were codes compared.
        evidence: `resolved.evidence` of its rows; "": for and against.
    """

    suite: str
    arm: str
    fields: Arm
    fp8: bool
    cases: int
    sqnr: dict[str, float]
    bounds: dict[str, float]
    where: dict[str, tuple[str, str]]
    row_min: float
    accumulation: float
    underflow: float
    mismatches: float
    checked_codes: int
    unjudged: int
    evidence: str

    @property
    def passed(self) -> bool:
        """Whether every result was judged, and none found wrong."""
        return bool(self.sqnr or self.checked_codes) and not (
            self.unjudged or self.failing or self.mismatches
        )

    @property
    def judged(self) -> bool:
        """Whether it claims to be right, and is not just recorded."""
        return self.evidence != RECORDED

    @property
    def proves(self) -> bool:
        """Whether what passes there says that a recipe is right."""
        return not self.evidence

    @property
    def worst(self) -> tuple[str, float]:
        """The result (metric) with the smallest SQNR, and that SQNR in dB."""
        return min(self.sqnr.items(), key=lambda item: item[1])

    def below(self, metric: str) -> bool:
        """Whether a figure lies below the bound stored for it; one that is no number does."""
        return not self.sqnr[metric] >= self.bounds.get(metric, -math.inf)

    @property
    def failing(self) -> list[str]:
        """The results (metrics) that lie below their bounds."""
        return [m for m in self.sqnr if self.below(m)]


@once
def numerics_by_arm(machine: Machine) -> list[Worst]:
    """Worst figures of each arm of each suite, with the bounds that its suite stored (`resolved.sqnr_bound_db`)."""
    rows = machine.frame[machine.rows.where(metric=NUMERICS, status="ok", part="")]
    fp8 = {(r["suite"], r["arm"]) for r in fp8_rows(machine)}
    bare = without_bound(machine)
    return [_worst(own, key in fp8, bare) for key, own in rows.groupby(["suite", "arm"], sort=False)]


def _worst(rows: pd.DataFrame, is_fp8: bool, bare: set[FigureKey]) -> Worst:
    (first,), values = rows_of(rows.iloc[:1]), rows.groupby("metric")["value"]
    least, most = values.min().to_dict(), values.max().to_dict()
    codes = int((rows["metric"] == "mismatches").sum())
    # Every case has a bound of its own: that of e4m3 x e5m2 lies 4 dB below that of e4m3 x e4m3. Smallest margin first.
    near: dict[str, pd.Series[Any]] = {}
    bounds: dict[str, float] = {}
    for metric in (m for m in SQNR if m in least):
        own = rows[rows["metric"] == metric]
        each = own["resolved"].map(
            {resolved: _bound(resolved, metric) for resolved in own["resolved"].unique()}
        )
        place = int(
            (own["value"] - each.fillna(0.0)).to_numpy().argmin()
        )  # the first that is no number, where one is
        near[metric] = own.iloc[place]
        if not math.isnan(bound := each.iloc[place]):
            bounds[metric] = float(bound)
    return Worst(
        first["suite"],
        first["arm"],
        arm_of(first),
        is_fp8 or bool(codes),  # a cast does no FLOPs; what it makes is FP8 all the same
        rows["case_id"].nunique(),
        {metric: float(r["value"]) for metric, r in near.items()},
        bounds,
        {metric: (r["run_id"], r["case_id"]) for metric, r in near.items()},
        min((least[m] for m in ROW_SQNR if m in least), default=math.nan),
        least.get("accum_sqnr_db", math.nan),
        most.get("underflow_frac", math.nan),
        most.get("mismatches", 0.0),
        codes,
        len({*rows[FIGURE[:3]].itertuples(index=False, name=None)} & bare),
        _evidence(rows),
    )


def _evidence(rows: pd.DataFrame) -> str:
    """What the rows of an arm in a suite are evidence for, all of them: one that refutes makes the others prove nothing."""
    (first,) = rows_of(rows.iloc[:1])
    older = _STATED_SINCE.get((first["suite"], first["arm"]), _STATED_SINCE.get((first["suite"], ""), ""))
    found = {str(parse(resolved).get("evidence", older)) for resolved in rows["resolved"].unique()}
    return REFUTES if REFUTES in found else RECORDED if found == {RECORDED} else ""


def _bound(resolved: str, metric: str) -> float:
    """The least SQNR that a suite accepts; NaN where it stores none."""
    stored = parse(resolved).get("sqnr_bound_db")
    if not isinstance(stored, dict):
        stored = {"sqnr_db": stored}
    bound = stored.get(metric)
    return math.nan if bound is None else float(bound)


@once
def without_bound(machine: Machine) -> set[FigureKey]:
    """(run, case, arm) of FP8 where an SQNR has no bound to be held against, and codes were not compared."""
    found = machine.pick(metric=tuple(SQNR), status="ok", part="")
    bare = {key_of(r) for r in found if math.isnan(_bound(r["resolved"], r["metric"]))}
    exact = {key_of(r) for r in machine.pick(metric="mismatches", status="ok")}
    high = {key_of(r) for r in machine.pick(metric=TIMES, status="ok") if parse(r["flops"]) and not is_fp8(r)}
    return bare - exact - high


@once
def unchecked(machine: Machine, suite: str) -> list[Row]:
    """Times of FP8 in a suite whose result nothing judged in the same run: no SQNR with a bound, no codes, no first step."""
    with_check = machine.rows.where(suite=suite, metric=(*SQNR, "mismatches"), status="ok")
    found = set(machine.frame.loc[with_check, FIGURE[:3]].itertuples(index=False, name=None))
    checked = found - without_bound(machine)
    own = [r for key, rows in fp8_by_arm(machine).items() if key[0] == suite for r in rows]
    return [r for r in own if key_of(r) not in checked and "first_loss" not in resolved_of(r)]


# First steps


@dataclass(frozen=True, slots=True)
class StoredFirstStep:
    """The first step of one FP8 arm, from the control's weights and on its batch.

    Attributes:
        arm: which.
        loss_gap: |loss - the control's| in nats; NaN where the rows don't say.
        norm_ratio: norm of the gradients over the control's; NaN likewise.
        proof: the line of fp8core.verify; "" of a peer's layers, whose FP8 GEMMs are counted.
        outcome: what it found.
        warnings: what fp8core.verify warned of.
    """

    arm: str
    loss_gap: float
    norm_ratio: float
    proof: str
    outcome: ProofOutcome
    warnings: tuple[str, ...]

    @property
    def fault(self) -> str:
        """Why this is no sound step; "" if it is. The suite's own bounds make failed rows, which never come here."""
        if math.isnan(self.loss_gap):
            return "its first loss, or the control's, is no number"
        return "" if self.outcome in (ProofOutcome.NONE, ProofOutcome.PROVED) else self.proof


@once
def first_steps(machine: Machine) -> list[StoredFirstStep]:
    """One for each (run, case, FP8 arm) of the suite `train` whose check passed."""
    found: dict[FigureKey, StoredFirstStep] = {}
    for row in machine.pick(suite="train", status="ok"):
        resolved: Mapping[str, Any] = resolved_of(row)
        if "first_loss" not in resolved or not resolved.get("fp8_layers") or arm_of(row).control:
            continue
        mine, control = resolved["first_loss"], resolved.get("first_loss_control")
        ratio = resolved.get("first_grad_norm_ratio")
        found[key_of(row)] = StoredFirstStep(
            row["arm"],
            abs(mine - control) if known(mine) and known(control) else math.nan,
            float(ratio) if known(ratio) else math.nan,
            str(resolved.get("verify", "")),
            proof_outcome(resolved),
            tuple(map(str, resolved.get("verify_warnings") or ())),
        )
    return list(found.values())
