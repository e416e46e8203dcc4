"""Runs: what a report is made of, read from the store and grouped by machine.

A *machine* is one environment (`env_id`): the same device, power limit, driver and versions. Rows of different
environments stand in different sections and are never set against each other.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pandas as pd

from harness import diagnosis, store
from harness.compare import TIMES, paired_ratios, with_rates
from harness.errors import UsageError
from harness.hardware import Device, lookup
from harness.report import text
from harness.verdict import judge
from harness.verdict.rows import setups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.diagnosis import Finding
    from harness.verdict import ArmVerdict
    from harness.verdict.rows import Setup


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file behind the report: name, link from the report, size in bytes and checksum."""

    name: str
    href: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Run:
    """One run folder: what `run.json` says about it, its data files and which machine it ran on."""

    run_id: str
    sweep: str
    about: dict[str, Any]
    files: tuple[DataFile, ...]

    @property
    def state(self) -> str:
        """finished, interrupted, failed, running, or unknown where run.json is missing."""
        return str(self.about.get("state", "unknown"))

    @property
    def command(self) -> str:
        """The command that made the run."""
        return str(self.about.get("command", ""))

    @property
    def question(self) -> str:
        """The question that the sweep answers."""
        return str(self.about.get("question", ""))

    @property
    def started(self) -> str:
        """When the run began, "2026-01-02 03:04:05"; empty where it is not known."""
        return str(self.about.get("started_at", ""))[:19].replace("T", " ")

    @property
    def state_note(self) -> str:
        """What a reader must know about a run that did not finish; empty for one that did."""
        return {
            "finished": "",
            "interrupted": "was interrupted: what it had finished until then is here, the rest is missing",
            "failed": "ended early because its rows could not be written; the earlier ones are here",
            "running": "has not ended: it is still running or was killed; what it had stored so far is here",
        }.get(self.state, "has no readable run.json, so its command and how it ended are unknown")


@dataclass(frozen=True)
class Machine:
    """All rows of one environment."""

    env_id: str
    env: dict[str, Any]
    runs: tuple[Run, ...]
    frame: pd.DataFrame  # rows of the store, with `tflops` and `gb_per_s` added

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """Paired ratios of all runs of this machine."""
        return paired_ratios(self.frame)

    @cached_property
    def trainings(self) -> list[Setup]:
        """The training runs of the suite `divergence`, by set-up."""
        return setups(self.frame)

    @cached_property
    def verdicts(self) -> list[ArmVerdict]:
        """The loss verdict on each arm of each of these set-ups."""
        return judge(self.frame)

    @cached_property
    def findings(self) -> list[Finding]:
        """What is probably wrong in these rows."""
        return diagnosis.findings(self.frame, self.verdicts)

    @cached_property
    def device(self) -> Device | None:
        """The entry of the table of peaks; None (N/A) for a CPU and for what is not in it."""
        name, memory = self.env.get("gpu"), self.env.get("gpu_memory_gib")
        return lookup(name, memory, self.env.get("power_limit_w")) if name and memory else None

    def constant_axes(self, suite: str) -> set[str]:
        """Axes that say nothing about a case of this suite, having one value in all of them."""
        return text.constant_axes(self.frame["axes"][self.frame["suite"] == suite])

    @property
    def is_gpu(self) -> bool:
        """Whether the rows were measured on a GPU."""
        return self.env.get("device") not in (None, "", "cpu")

    @property
    def name(self) -> str:
        """The device in words."""
        if self.is_gpu:
            return str(self.env.get("gpu") or self.env.get("device"))
        return f"CPU: {self.env.get('cpu') or 'model unknown'}"

    @property
    def dates(self) -> str:
        """The day on which the rows were measured (UTC), or the first and last of them."""
        days = sorted({str(t)[:10] for t in self.frame["created_at"] if t})
        if not days:
            return "date unknown"
        return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


@dataclass(frozen=True)
class Material:
    """Everything that one report is made of."""

    machines: tuple[Machine, ...]
    problems: tuple[str, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, each once."""
        return tuple({id(run): run for machine in self.machines for run in machine.runs}.values())


def load(paths: Sequence[Path], out_folder: Path) -> Material:
    """Reads run folders into machines.

    Args:
        paths: run folders, folders above them, or single Parquet files.
        out_folder: where the report will lie; links to the data are relative to it.

    Raises:
        UsageError: a path is missing, is not a run, or there is not one readable row.
    """
    for _ in range(3):
        folders: dict[Path, list[Path]] = {}
        for path in paths:
            for file in _parquet_files(path):
                folders.setdefault(file.parent, []).append(file)
        problems: list[str] = []
        parts: list[tuple[Run, pd.DataFrame]] = []
        for folder, files in folders.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                frame = store.read(list(dict.fromkeys(files)))
            problems += [str(w.message) for w in caught]
            if len(frame):
                parts.append((_run(folder, frame, out_folder), _sound(frame)))
        if all(file.exists() for files in folders.values() for file in files):
            break  # else a run has closed meanwhile and moved its rows to another file
    if not parts:
        named = ", ".join(str(p) for p in paths)
        raise UsageError(
            f"no rows in {named}" + (f" ({problems[0]})" if problems else ": measure first, sweep=NAME")
        )
    return Material(_machines(parts), tuple(problems))


def _sound(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows as a report can use them: text where text is due, and no time that cannot be one.

    A row whose samples are not finite and positive becomes a failed one that says so; it stays visible.
    """
    frame = frame.copy()
    for column, empty in (
        ("env", "{}"),
        ("axes", "{}"),
        ("resolved", "{}"),
        ("timing", "{}"),
        ("flops", "{}"),
    ):
        frame[column] = frame[column].map(lambda text, empty=empty: text if _is_object(text) else empty)
    for column in (
        "run_id",
        "sweep",
        "suite",
        "case_id",
        "arm",
        "baseline",
        "regime",
        "reason",
        "env_id",
        "part",
    ):
        frame[column] = frame[column].fillna("")
    timed = frame["metric"].isin(TIMES) & (frame["status"] == "ok")
    impossible = timed & ~frame["samples"].map(_are_times)
    frame.loc[impossible, "reason"] = "a stored sample is no time: not finite, or not above 0"
    frame.loc[impossible, "status"] = "failed"
    frame.loc[impossible, "value"] = math.nan
    return frame


def _is_object(text: object) -> bool:
    try:
        return isinstance(text, str) and isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _are_times(samples: Sequence[float] | None) -> bool:
    return samples is not None and len(samples) > 0 and all(math.isfinite(s) and s > 0 for s in samples)


def _parquet_files(path: Path) -> list[Path]:
    if not path.exists():
        raise UsageError(f"no such run: {path}; a run is a folder results/<sweep>/<run_id>")
    if path.is_dir():
        found = sorted(path.rglob("*.parquet"))
        if not found:
            raise UsageError(f"{path} is not a run: it holds no *.parquet file")
        return found
    if path.suffix != ".parquet":
        raise UsageError(f"{path} is not a run: expected a folder or a *.parquet file")
    return [path]


def _run(folder: Path, frame: pd.DataFrame, out_folder: Path) -> Run:
    files = tuple(
        DataFile(
            path.name,
            quote(Path(os.path.relpath(path, out_folder)).as_posix()),
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in map(Path, frame.attrs["files"])
    )
    return Run(str(frame["run_id"].iloc[0]), str(frame["sweep"].iloc[0]), store.read_about(folder), files)


def _machines(parts: list[tuple[Run, pd.DataFrame]]) -> tuple[Machine, ...]:
    machines = []
    for env_id in dict.fromkeys(e for _, frame in parts for e in frame["env_id"]):
        own = [
            (run, frame[frame["env_id"] == env_id])
            for run, frame in parts
            if (frame["env_id"] == env_id).any()
        ]
        whole = pd.concat([frame for _, frame in own], ignore_index=True)
        env = json.loads(whole["env"].iloc[0] or "{}")
        machines.append(Machine(str(env_id), env, tuple(run for run, _ in own), with_rates(whole)))
    # GPUs first: they are what the question is about.
    return tuple(sorted(machines, key=lambda m: (not m.is_gpu, m.name, m.env_id)))
