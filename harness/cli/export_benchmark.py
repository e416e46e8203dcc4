"""`python -m harness export RUN -o FILE.json`: the times of a run as a pytest-benchmark file.

Dashboards that teams have read that format (github-action-benchmark with `tool: pytest`, Bencher with `python_pytest`,
pytest-benchmark's own `--benchmark-compare`). It holds times only, in seconds. Other rows, skipped and failed ones stay
in the store; the command prints how many it left out. `python -m harness import` reads the file back.
"""

from __future__ import annotations

import json
import statistics
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness import store
from harness.gate.figures import SUITE
from harness.store.case import without_controls
from harness.store.errors import UsageError, one_line, unknown
from harness.store.measurement import METRICS
from harness.store.outside import parse
from harness.store.reading import JSON_COLUMNS
from harness.store.stats import all_are_times
from harness.store.text import axes_of, case_label
from harness.store.words import key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
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


SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
FORMAT = "5.3.1"  # the version of pytest-benchmark whose fields these are


@dataclass(frozen=True, slots=True)
class Words:
    """python -m harness export: the times of a run as pytest-benchmark JSON, for github-action-benchmark and Bencher"""

    run: str = word("RUN", "a run's folder, Parquet file or id")
    output: Path | None = key("FILE.json to write; FILE.csv or FILE.parquet: every metric", short="-o")
    to: str = key("send every metric to tensorboard, wandb or mlflow instead", "")
    results_dir: str = key("where run ids are looked up", "results")


def main(argv: Sequence[str]) -> int:
    """Exports one run; returns 0, or 2 by way of UsageError."""
    if (options := options_of(Words, argv)) is None:
        return 0
    if options.to:
        count = send(store.find_run(options.run, options.results_dir), options.to)
        sys.stdout.write(f"sent {count} numbers to {options.to}\n")
        return 0
    if options.output is None:
        raise UsageError("export needs a file to write: -o FILE.json, .csv or .parquet")
    run = store.find_run(options.run, options.results_dir)
    try:
        if options.output.suffix in (".csv", ".parquet"):
            what = f"{write(run, options.output)} lines"
        else:
            document, left_out = exported(run)
            text = json.dumps(document, indent=1, allow_nan=False) + "\n"
            options.output.write_text(text, encoding="utf-8")
            what = f"{len(document['benchmarks'])} times"
            if left_out:
                sys.stderr.write(f"left out: {', '.join(f'{n} rows {why}' for why, n in left_out.items())}\n")
    except OSError as error:
        raise UsageError(f"cannot write {options.output}: {error.strerror}") from error
    sys.stdout.write(f"exported {what}\nwritten  {options.output}\n")
    return 0


def exported(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A run as a pytest-benchmark document.

    Returns:
        The document, and how many rows it leaves out, by reason.

    Raises:
        UsageError: the run can't be read, is of several environments or commits, or holds no time.
    """
    frame, _ = store.read_quietly(path)
    if frame.attrs["problems"]:
        raise UsageError(f"cannot read {frame.attrs['problems'][0]}")
    envs = {row: parse(row) for row in frame["env"].dropna().unique()} if len(frame) else {}
    if (
        len({(e.get("git_commit"), e.get("cpu"), e.get("gpu"), e.get("host_hash")) for e in envs.values()})
        > 1
    ):
        raise UsageError(f"{path} holds several commits or machines; a file is of one: name one run")
    frame = without_controls(frame)
    is_time, sound = frame["unit"].isin(list(SECONDS)), frame["status"] == "ok"
    valid = all_are_times(frame["samples"]) & frame["samples"].str.len().gt(0)
    times = frame[is_time & sound & valid]
    if times.empty:
        raise UsageError(f"no time in {path}; a pytest-benchmark file holds nothing else")
    key = ["suite", "case_id", "arm", "metric", "regime", "part"]
    if times.duplicated(key).any():
        raise UsageError(
            f"{path} holds several runs of one case (stages of a gate, say): name one of its folders"
        )
    left_out = {
        "that are no times": int((~is_time).sum()),
        "not ok": int((is_time & ~sound).sum()),
        "without samples, or with one that is not above 0 or not finite": int(
            (is_time & sound & ~valid).sum()
        ),
    }
    benchmarks = [_benchmark(row) for row in times.itertuples(index=False)]
    document = {
        **_about(next(iter(envs.values()))),
        "benchmarks": _told_apart(benchmarks),
        "datetime": str(times["created_at"].max()),
        "version": FORMAT,
    }
    return document, {why: count for why, count in left_out.items() if count}


def _benchmark(row: Any) -> dict[str, Any]:
    axes, timing = axes_of(row.axes), parse(row.timing)
    extra = {"suite": row.suite, "case_id": row.case_id, "arm": row.arm, "metric": row.metric}
    group: str | None = f"{row.suite}/{case_label(axes)}"
    name = "/".join(filter(None, (row.arm, row.metric, row.regime, row.part)))
    fullname = f"{group}::{name}"
    if row.suite == SUITE:  # imported: it keeps its name, and so stays the same case
        fullname, group = str(axes["test"]), str(axes.get("group") or "") or None
        name, extra = fullname.rpartition("::")[2], dict(parse(row.resolved).get("extra_info") or {})
    seconds = [SECONDS[row.unit] * float(x) for x in row.samples]
    stats = summary(seconds) | {"iterations": int(timing.get("iterations") or 1)}
    if timing.get("raw", True):
        stats["data"] = seconds
    options = {
        "disable_gc": False, "timer": str(timing.get("method") or ""), "min_rounds": 1, "max_time": 0.0, "min_time": 0.0,
        "warmup": True,
    }  # fmt: skip
    return {
        "group": group, "name": name, "fullname": fullname, "params": None, "param": None, "extra_info": extra,
        "options": options, "stats": stats,
    }  # fmt: skip


def _told_apart(benchmarks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives cases that share a label their ids: a dashboard knows a benchmark by its name alone."""
    seen = Counter(b["fullname"] for b in benchmarks)
    for one in benchmarks:
        if seen[one["fullname"]] > 1:
            one["fullname"] += f" {one['extra_info'].get('case_id', '')}"
    return benchmarks


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """The fields of pytest-benchmark 5.3, as its documentation defines them."""
    data, n = sorted(seconds), len(seconds)
    mean = statistics.mean(data)
    stddev = statistics.stdev(data) if n > 1 else 0.0
    q1, q3 = _quartiles(data)
    low, high = q1 - 1.5 * (q3 - q1), q3 + 1.5 * (q3 - q1)
    by_stddev = sum(not mean - stddev <= x <= mean + stddev for x in data)
    by_iqr = sum(not low <= x <= high for x in data)
    return {
        "min": data[0], "max": data[-1], "mean": mean, "stddev": stddev, "rounds": n, "median": statistics.median(data),
        "iqr": q3 - q1, "q1": q1, "q3": q3, "iqr_outliers": by_iqr, "stddev_outliers": by_stddev,
        "outliers": f"{by_stddev};{by_iqr}", "ld15iqr": data[bisect_left(data, low)],
        "hd15iqr": data[bisect_right(data, high) - 1], "ops": n / sum(data), "total": sum(data),
    }  # fmt: skip


def _quartiles(data: Sequence[float]) -> tuple[float, float]:
    """Medians of the halves where the count is even, else the weighted middle of both ways to halve (method 3)."""
    n = len(data)
    if n == 1:
        return data[0], data[0]
    if n % 2 == 0:
        return statistics.median(data[: n // 2]), statistics.median(data[n // 2 :])
    k, q = divmod(n, 4)
    if q == 1:
        return 0.25 * data[k - 1] + 0.75 * data[k], 0.75 * data[3 * k] + 0.25 * data[3 * k + 1]
    return 0.75 * data[k] + 0.25 * data[k + 1], 0.25 * data[3 * k + 1] + 0.75 * data[3 * k + 2]


def _about(env: Mapping[str, Any]) -> dict[str, Any]:
    system, _, release = str(env.get("os") or "").replace("-", " ", 1).partition(" ")
    chip = str(env.get("gpu") or env.get("cpu") or "unknown")
    return {
        "machine_info": {
            "node": env.get("host_hash") or "", "processor": chip, "machine": str(env.get("device") or ""),
            "python_version": env.get("python"), "system": system, "release": release,
            "cpu": {"brand_raw": env.get("cpu"), "count": env.get("cpu_threads")},
            "torch": env.get("torch"),
        },
        "commit_info": {
            "id": env.get("git_commit"), "dirty": bool(env.get("git_dirty")), "project": "", "branch": "",
            "time": None, "author_time": None,
        },
    }  # fmt: skip
