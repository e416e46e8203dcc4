"""The last lines of a sweep of sweeps: what is asked first of a GPU, each read from stored rows. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.judge import verdict
from harness.judge.smoke import failed_kernels, failed_recipes
from harness.machine import mfu
from harness.machine.hardware import of_env
from harness.report.table import known
from harness.store.case import without_controls
from harness.store.compare import DISTURBED, against, paired_ratios, rows_of
from harness.store.outside import parse
from harness.store.text import case_label

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd


def lines(frame: pd.DataFrame) -> Iterator[str]:
    """What failed, then steps with their speedup and MFU, casts as a share of a copy, and the verdicts on the loss."""
    for name, why in (failed_kernels(frame) | failed_recipes(frame)).items():
        yield f"smoke: FAILED: {name}: {why[:160]}"
    failed = frame[frame["status"] == "failed"]
    if len(failed):
        yield f"failed: {len(failed)} rows, first {failed.iloc[0]['arm']}: {failed.iloc[0]['reason'][:120]}"
    timed = frame[(frame["metric"] == "time_ms") & (frame["regime"] != "sustained")]
    timed = without_controls(timed[timed["status"].isin(["ok", "partial"])])
    rows = {(r["run_id"], r["case_id"], r["arm"]): r for r in rows_of(timed)}
    for r in _compared(paired_ratios(timed[timed["suite"] == "train"], partial=True)):
        used, base = (_mfu(rows[r["run_id"], r["case_id"], arm]) for arm in (r["arm"], r["baseline"]))
        yield f"step of {_ratio(r, r['speedup'])} of {r['baseline']}, {r['value']:.4g} {r['unit']}; mixed MFU {used}, {base}"
    casts = timed[timed["suite"] == "cast"]
    for arm in dict.fromkeys(casts.loc[casts["arm"] != "copy", "arm"]):
        for r in _compared(against(casts, arm, "copy", partial=True)):
            moved = [rows[r["run_id"], r["case_id"], name]["bytes_moved"] for name in (arm, "copy")]
            yield f"cast {_ratio(r, r['speedup'] * moved[0] / moved[1])} of the bandwidth of a copy"
    yield from verdict.lines(verdict.judge(frame))


def _compared(ratios: pd.DataFrame) -> list[dict[str, Any]]:
    return rows_of(ratios[ratios["speedup"].notna()])


def _ratio(row: Mapping[str, Any], ratio: float) -> str:
    notes = [f" [cut off after {row['rounds']} rounds]"] * bool(row["cut_off"])
    notes += [f" [{row['condition']}]"] * (row["condition"] in DISTURBED)
    return f"{case_label(parse(row['axes']))}: {row['arm']} {ratio:.3f}x{''.join(notes)}"


def _mfu(row: Mapping[str, Any]) -> str:
    """Mixed MFU of a step, causal attention counted as it runs; "unknown" without a peak."""
    found = mfu.of_row({**row, "status": "ok"}, of_env(parse(row["env"])))
    used = next((u for u in reversed(found) if u.formula in mfu.EXECUTED), None)
    if used is None or not known(used.mfu_mixed) or used.doubts:
        return "unknown" + (f" ({', '.join(used.doubts).replace('_', ' ')})" if used and used.doubts else "")
    return f"{used.mfu_mixed:.1%}"
