"""Records: the times of a machine, each joined with what it gained, how exact it is and what share of a ceiling it is."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.report.runs import once
from harness.report.table import known
from harness.store.arm import arm_of
from harness.store.compare import SECONDS, TIMES, rows_of
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.machine.hardware import Device
    from harness.report.runs import Machine
    from harness.report.table import Record

GAINS = ("speedup", "low", "high", "floor", "verdict")


@once
def arm_records(machine: Machine, suite: str) -> list[dict[str, Any]]:
    """Time rows of a suite, of all runs, joined with their ratio and figures; A/A controls left out.

    Beside the columns of the store, where they are known: `GAINS` of the paired ratio, every other metric of the arm by
    its name, `copy_share` of the measured copy bandwidth, `peak_share` and `over_peak` of the published peak.
    """
    ratios = {
        (r["run_id"], r["case_id"], r["arm"], r["regime"], r["metric"]): r
        for r in rows_of(machine.every_ratio[machine.every_ratio["suite"] == suite])
    }
    own = [r for r in machine.rows if r["suite"] == suite]
    figures: dict[tuple[str, str, str], dict[str, float]] = {}
    for r in own:
        if r["status"] == "ok" and r["metric"] not in TIMES and not r["part"]:
            figures.setdefault((r["run_id"], r["case_id"], r["arm"]), {})[r["metric"]] = r["value"]
    reached = machine.ceilings if suite != "ceilings" else None
    records = []
    for row in own:
        if row["metric"] not in TIMES or arm_of(row).control:
            continue
        key = (row["run_id"], row["case_id"], row["arm"])
        pair = ratios.get((*key, row["regime"] or "", row["metric"]), {})
        record = {**row, **{name: pair.get(name) for name in GAINS}, **figures.get(key, {})}
        if reached is not None and known(row["gb_per_s"]) and (copy := reached.bandwidth(row["bytes_moved"])):
            record["copy_share"] = 1e9 * row["gb_per_s"] / copy
        if machine.is_gpu and (known(row["tflops"]) or known(row["gb_per_s"])):
            record |= _against_peak(machine.device, row)
        records.append(record)
    return records


def newest(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Record of the newest run for each case, arm and regime; prefer records with a time."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for r in records:
        key = (r["suite"], r["case_id"], r["arm"], r["regime"], r["metric"])
        if key not in found or r["status"] == "ok" or found[key]["status"] != "ok":
            found[key] = r
    return list(found.values())


def repeated(records: Sequence[Record]) -> bool:
    """Whether several runs measured the same case and arm, so that a table must name its runs."""
    seen = Counter((r["suite"], r["case_id"], r["arm"], r["regime"], r["metric"], r["part"]) for r in records)
    return any(count > 1 for count in seen.values())


def _against_peak(device: Device | None, row: Record) -> dict[str, Any]:
    """Share of the published dense peak: of each GEMM's own dtype (sum of F_d / P_d over the time), else of bandwidth.

    `over_peak` says that the rate is impossible for the dtype at the clock that was measured.
    """
    seconds = row["value"] * SECONDS[row["unit"]]
    work = _work(row["flops"] or "{}")
    if device is None:
        return {"peak_share": math.nan, "peak_known": False}
    if not work:
        return {"peak_share": row["gb_per_s"] / (1e3 * device.bandwidth_tb_s), "peak_known": True}
    peaks = {dtype: device.peak_tflops(dtype) for dtype in work}
    if None in peaks.values():
        return {"peak_share": math.nan, "peak_known": False}
    share = sum(f / (1e12 * (peaks[d] or math.nan)) for d, f in work.items()) / seconds
    clocks = [c for c in row["sample_clock_mhz"] if math.isfinite(c)]
    over = bool(device.exceeds_peak(work, seconds, statistics.median(clocks) if clocks else None))
    return {"peak_share": share, "peak_known": True, "over_peak": over}


@lru_cache(maxsize=4096)  # the rows of a case repeat it
def _work(flops: str) -> Mapping[str, float]:
    """FLOPs by dtype, of those that occur."""
    return MappingProxyType({str(d): float(f) for d, f in parse(flops).items() if f})
