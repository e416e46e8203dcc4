"""`python -m harness export RUN -o FILE`: every metric of a run as CSV or Parquet, or to a tracker."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness import store
from harness.store.errors import UsageError, one_line, unknown
from harness.store.measurement import METRICS
from harness.store.schema import JSON_COLUMNS
from harness.store.words import key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Sequence
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


def send(run: Path, to: str, folder: Path | None = None) -> tuple[int, str]:
    """Sends every number to a tracker, curves by their steps; returns how many it was given, and where they lie.

    Args:
        run: its folder.
        to: one of `fp8core.proof.cast_records.WRITERS`.
        folder: of TensorBoard's events; None: the tracker's own choice.

    Raises:
        UsageError: the run can't be read, there is no such tracker, its library is not installed, or it has no folders.
    """
    from fp8core.proof.cast_records import WRITERS, writer_named  # torch

    if to not in WRITERS:
        raise unknown("tracker", to, WRITERS)
    if folder is not None and to != "tensorboard":
        raise UsageError(f"-o {folder}: {to} has no folder; leave -o out, or take to=tensorboard")
    frame, sent = _rows(run), 0
    try:
        writer = writer_named(to, None if folder is None else str(folder))
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
    return sent, str(getattr(writer, "log_dir", ""))


def _rows(run: Path) -> pd.DataFrame:
    frame = store.open_run(run, expand=True)
    if problems := frame.attrs.pop("problems"):
        raise UsageError(f"cannot read {problems[0]}")
    frame.attrs.clear()  # paths, which a table does not need
    if frame.empty:
        raise UsageError(f"no rows in {run}")
    return frame


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """python -m harness export: every metric of a run, curves too, as CSV or Parquet, or to a tracker"""

    run: str = word("RUN", "a run's folder, Parquet file or id")
    output: Path | None = key(
        "FILE.csv or FILE.parquet to write, or the folder of to=tensorboard", short="-o"
    )
    to: str = key("send every metric to tensorboard, wandb or mlflow instead", "")
    results_dir: str = key("where run ids are looked up", "results")


def main(argv: Sequence[str]) -> int:
    """Exports one run; returns 0, or 2 by way of UsageError."""
    if (options := options_of(ExportOptions, argv)) is None:
        return 0
    if options.to:
        run = store.find_run(options.run, options.results_dir)
        count, where = send(run, options.to, options.output)
        sys.stdout.write(
            f"sent {count} numbers to {options.to}\n{where and f'written  {where}'}".rstrip() + "\n"
        )
        return 0
    if options.output is None or options.output.suffix not in (".csv", ".parquet"):
        given = "no -o" if options.output is None else f"-o {options.output}"
        raise UsageError(
            f"{given}: expected -o FILE.csv or -o FILE.parquet; or to=tensorboard, wandb or mlflow"
        )
    run = store.find_run(options.run, options.results_dir)
    try:
        lines = write(run, options.output)
    except OSError as error:
        raise UsageError(f"cannot write {options.output}: {error.strerror}") from error
    sys.stdout.write(f"exported {lines} lines\nwritten  {options.output}\n")
    return 0
