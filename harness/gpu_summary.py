"""The end of `python -m harness gpu`: what a session measured, in at most twenty lines, for a log that keeps only its end.

Each line is read from stored rows; what was not measured is left out, and what failed is counted. No torch.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from harness.ceilings import ceilings
from harness.compare import paired_ratios, rows_of, summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

LINES = 20


def lines(frame: pd.DataFrame, tests: str) -> list[str]:
    """The summary.

    Args:
        frame: rows of all runs of one machine.
        tests: what pytest printed; "" where it did not run.

    Returns:
        At most `LINES` lines; the last one counts what was left out.
    """
    said = [
        *of_tests(tests),
        *_failed(frame),
        *_ceilings(frame),
        *_numerics(frame),
        *_steps(frame),
        *_kernels(frame),
    ]
    if len(said) <= LINES:
        return said
    return [*said[: LINES - 1], f"and {len(said) - LINES + 1} more in the report"]


def of_tests(output: str) -> list[str]:
    """The line with which pytest ends; none where it did not run."""
    ends = re.findall(
        r"^=* ?(.*\b(?:passed|failed|skipped|error)\b.* in [\d.]+s.*?) ?=*$", output, re.MULTILINE
    )
    return [f"tests: {ends[-1]}"] if ends else []


def _ceilings(frame: pd.DataFrame) -> Iterator[str]:
    found = ceilings(frame)
    if found is None:
        return
    parts = [f"{rate} matmul {tflops:.4g} TFLOP/s" for rate, tflops in sorted(found.achieved.items())]
    for kind, curve in found.moves.items():
        parts.append(f"{kind} {max(rate for _, rate in curve) / 1e12:.2f} TB/s")
    if found.launch_s is not None:
        parts.append(f"launch {found.launch_s * 1e6:.1f} us")
    yield "ceilings: " + ", ".join(parts)


def _numerics(frame: pd.DataFrame) -> Iterator[str]:
    codes = frame[(frame["suite"] == "codes") & (frame["metric"] == "mismatches") & (frame["status"] == "ok")]
    if len(codes):
        wrong = codes.groupby("arm")["value"].sum()
        yield "codes that differ from the format's: " + ", ".join(
            f"{arm} {wrong[arm]:.0f}" for arm in sorted(wrong.index)
        )
    sums = frame[(frame["suite"] == "accumulation") & (frame["status"] == "ok")]
    by_metric = sums[sums["metric"].str.endswith("sqnr_db")].groupby(["arm", "metric"])["value"].min()
    arms = sorted({arm for arm, _ in by_metric.index})
    for arm in arms:
        figures = by_metric[arm].sort_values(ascending=False)
        yield f"sums of {arm}: " + ", ".join(
            f"{figure:.0f} dB {name.removesuffix('_sqnr_db')}" for name, figure in figures.items()
        )


def _steps(frame: pd.DataFrame) -> Iterator[str]:
    """Every arm of every training step: the rows that a reader misses most."""
    of_steps = frame[(frame["suite"] == "train") & (frame["metric"] == "time_ms")]
    models = {(r["run_id"], r["case_id"]): str(r["axes"]) for r in rows_of(of_steps)}
    for r in rows_of(paired_ratios(of_steps)):
        if not math.isnan(r["speedup"]):
            model = re.search(r'"model": ?"([^"]+)"', models[r["run_id"], r["case_id"]])
            yield (
                f"step of {model[1] if model else r['case_id']}, {r['arm']} against {r['baseline']}: "
                f"{r['speedup']:.3f}x ({r['low']:.3f} to {r['high']:.3f}), {r['value']:.1f} {r['unit']}"
            )


def _kernels(frame: pd.DataFrame) -> Iterator[str]:
    """Geometric means of the other suites, arm by arm."""
    timed = frame[frame["suite"].isin(["cast", "gemm", "linear"]) & (frame["metric"] == "time_ms")]
    for r in rows_of(summary(paired_ratios(timed))) if len(timed) else ():
        if r["pairs"]:
            yield (
                f"{r['suite']} {r['arm']} against {r['baseline']}, {r['regime']}: {r['geometric_mean']:.3f}x over "
                f"{r['pairs']} cases"
            )


def _failed(frame: pd.DataFrame) -> Iterator[str]:
    failed = frame[frame["status"] == "failed"]
    if len(failed):
        yield f"failed: {len(failed)} rows, first {failed.iloc[0]['arm']}: {failed.iloc[0]['reason'][:120]}"
