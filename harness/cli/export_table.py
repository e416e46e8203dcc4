"""A run as one plain table, `export RUN -o FILE.csv|.parquet`, or in a tracker, `export RUN to=tensorboard|wandb|mlflow`: every
metric of every arm, times and curves alike.

In the CSV a sample is a line: `round` is the step of a curve or the round of a time, and `value` the number that the row stands
for. A row without samples, such as a failed one, is one line with its reason. The Parquet file keeps samples as lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from harness import store
from harness.store.errors import UsageError, one_line, unknown
from harness.store.measurement import METRICS
from harness.store.schema import JSON_COLUMNS

if TYPE_CHECKING:
    from pathlib import Path

_LEFT_OUT = (*JSON_COLUMNS, "case_axes", "schema_version", "sample_clock_mhz")  # of a CSV; axes are columns


def write(run: Path, output: Path) -> int:
    """Writes the file; returns how many lines it holds.

    Raises:
        UsageError: the run can't be read.
        OSError: the file can't be written.
    """
    frame = _rows(run)
    if output.suffix == ".parquet":
        frame.to_parquet(output, index=False)
        return len(frame)
    samples = frame["samples"].map(lambda of: [] if of is None else list(of))
    rounds = [
        list(r) if len(r) else list(range(len(s))) for r, s in zip(frame["rounds"], samples, strict=True)
    ]
    lines = frame.drop(columns=[name for name in _LEFT_OUT if name in frame])
    lines = lines.assign(samples=samples, rounds=pd.Series(rounds, frame.index)).explode(
        ["samples", "rounds"]
    )
    lines.rename(columns={"samples": "sample", "rounds": "round"}).to_csv(output, index=False)
    return len(lines)


def send(run: Path, to: str) -> int:
    """Sends every number to a tracker, curves by their steps; returns how many it was given.

    Args:
        run: its folder.
        to: one of `fp8core.cast_records.WRITERS`.

    Raises:
        UsageError: the run can't be read, there is no such tracker, or its library is not installed.
    """
    from fp8core.cast_records import WRITERS, writer_named  # torch

    if to not in WRITERS:
        raise unknown("tracker", to, WRITERS)
    frame, sent = _rows(run), 0
    try:
        writer = writer_named(to)
    except Exception as error:  # what a tracker raises that is not installed, set up or reached
        raise UsageError(one_line(error)) from error
    row: Any
    for row in frame[frame["status"].isin(["ok", "partial"])].itertuples():
        tag = "/".join(filter(None, (row.suite, row.arm, row.metric, row.regime, row.part, row.case_id)))
        curve = METRICS[row.metric].series and len(row.samples) == len(row.rounds)
        for step, value in zip(row.rounds, row.samples, strict=True) if curve else [(0, row.value)]:
            writer.add_scalar(tag, float(value), int(step))
            sent += 1
    writer.close()
    return sent


def _rows(run: Path) -> pd.DataFrame:
    frame, _ = store.read_quietly(run, expand=True)
    if problems := frame.attrs.pop("problems"):
        raise UsageError(f"cannot read {problems[0]}")
    frame.attrs.clear()  # paths, which a table does not need
    if frame.empty:
        raise UsageError(f"no rows in {run}")
    return frame
