"""Benchmark files: JSON of pytest-benchmark, asv and nvbench as rows of the store, and several files of one side as its rounds.

A test runs in one process, and what one process measures is no independent evidence of the next: a file is one round,
whether it is named to the gate beside others or imported.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import store
from harness.gate import other_files
from harness.gate.figures import SUITE
from harness.gate.sides import load_side
from harness.machine.environment import env_id
from harness.store.case import Arm, Case
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.store.outside import from_json, read_text
from harness.store.private import hashed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Literal

    from harness.gate.sides import Side

MILLISECONDS = {
    "s": 1e3,
    "seconds": 1e3,
    "ms": 1.0,
    "us": 1e-3,
    "ns": 1e-6,
}  # of the units of time that a file may state
# What makes of a program's document the one that pytest-benchmark would have written
_READERS: Mapping[str, Callable[[Any, Path], dict[str, Any]]] = {
    "nvbench": other_files.nvbench,
    "asv": other_files.asv,
}
# Files of other programs by the keys that theirs have, those of two programs first: google-benchmark 1.9, pyperf 2, hyperfine 1
_KEYS = {
    "nvbench": {"devices", "benchmarks"},
    "asv": {"commit_hash", "env_name", "results"},
    "google-benchmark": {"context", "benchmarks"},
    "pyperf": {"benchmarks", "metadata", "version"},
    "hyperfine": {"results"},
}
ARM = "test"
STATED = ("unit", "higher_is_better")


class Benchmarks(NamedTuple):
    """What a file holds: a row a test, where they were measured as far as it knows, and all of it."""

    rows: list[Measurement]
    env: dict[str, Any]
    document: Mapping[str, Any]


def side_of_files(paths: Sequence[Path], role: Literal["baseline", "candidate"]) -> Side:
    """One side of the gate from files of as many processes, each a run of its own as if it were imported, and so a round.

    Raises:
        UsageError: a file can't be read or is of a program that is not read, or one is named twice.
        GateError: the files are of several machines (exit 3).
    """
    seen: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            found = read_file(path)
            run = f"file sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
            if run in seen:
                raise UsageError(f"{path} and {seen[run]} are the same file, which is one round and not two")
            seen[run] = path
            found.env["host_hash"] = None  # no row is kept, and no results folder has a salt for a host
            write_run(found, path, Path(folder) / str(len(seen)), run)
        side = load_side(folder, role, "")
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return replace(side, name=f"{paths[0]}{more}")


def write_run(found: Benchmarks, path: Path, folder: Path, run_id: str) -> None:
    """Writes what a file holds as one run."""
    try:  # when the tests ran, as the file says it in its own zone
        ran_at = datetime.fromisoformat(str(found.document.get("datetime")))
        made_at = ran_at.isoformat(timespec="milliseconds")
    except ValueError:
        made_at = ""
    about = {
        "made_by": "import",
        "command": f"python -m harness import {path.name}",
        "version": found.document.get("version"),
    }
    writer = store.RunWriter(
        folder, run_id=run_id, sweep=SUITE, env_id=env_id(found.env), env=found.env, about=about, made_at=made_at
    )  # fmt: skip
    writer.append(found.rows)
    writer.close("finished")


def read_file(path: Path) -> Benchmarks:
    """What a file holds.

    Raises:
        UsageError: it can't be read, is of a program that is not read, holds no test, or is not as its program writes it.
    """
    try:
        document = from_json(read_text(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    known = document.keys() if isinstance(document, dict) else set()
    maker = next((maker for maker, keys in _KEYS.items() if keys <= known), SUITE)
    if maker != SUITE and maker not in _READERS:
        raise UsageError(
            f"{path} is no pytest-benchmark file but one of {maker}, which is not read here; write its figures in that "
            "form, or gate --command times the program itself"
        )
    return of_document(document, path, maker)


def of_document(document: Any, path: Path, maker: str = SUITE) -> Benchmarks:
    """What a document holds, in the form of pytest-benchmark or of a program of `_READERS`; see `read_file`."""
    try:
        document = _READERS[maker](document, path) if maker in _READERS else document
        rows = [_row(test, maker) for test in document["benchmarks"]]
        found = Benchmarks(rows, _environment(document, maker), document)
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} is not as {maker} writes it: {type(error).__name__}: {error!s:.150}"
        ) from error
    if not found.rows:
        raise UsageError(f"{path} contains no benchmark that ran; did its program run any?")
    return found


def _row(test: Any, maker: str) -> Measurement:
    """One test's figures, a single round, as times in ms: those of which higher is better as time a unit, and others as if seconds.

    `unit` and `higher_is_better` may stand in the entry or in its extra_info; without them a figure is in seconds.
    """
    name, stats, extra = test["fullname"], test["stats"], dict(test.get("extra_info") or {})
    data = [1.0 * x for x in stats.get("data") or [stats["median"]]]
    about = {key: extra.pop(key) for key in STATED if key in extra}
    about |= {key: test[key] for key in STATED if key in test}
    unit, higher = about.get("unit"), about.get("higher_is_better", False)
    if not (isinstance(name, str) and isinstance(unit, str | None) and isinstance(higher, bool)):
        raise TypeError(
            f"{name!r} has unit {unit!r} and higher_is_better {higher!r}; expected texts, and true or false"
        )
    if not all(math.isfinite(s) and s > 0 for s in data):
        raise ValueError(
            f"{name} holds a time that is not a positive number: {min(data):g} s among {len(data)}"
        )
    direction = {"better": "higher" if higher else "lower", **({"unit": unit} if unit else {})}
    if not higher and unit in MILLISECONDS:
        data, direction["unit"] = [s * MILLISECONDS[unit] for s in data], "s"
    else:
        data = [1e3 / s if higher else 1e3 * s for s in data]
    case = Case.of(SUITE, {"test": name, "group": str(test.get("group") or "")})
    return Measurement(
        suite=SUITE,
        case_id=case.case_id,
        arm=ARM,
        arm_fields=Arm(variant=ARM),
        axes=case.axes_json,
        metric="time_ms",
        status="ok",
        regime="isolated",
        resolved={
            "timed": f"one call, by {maker}",
            "iterations": stats.get("iterations"),
            **(direction if about else {}),
            **({"extra_info": extra} if extra else {}),
        },
        samples=tuple(data),
        rounds=(0,) * len(data),
        timing={"method": maker, "raw": bool(stats.get("data")), "iterations": stats.get("iterations")},
    )


def _environment(document: Mapping[str, Any], maker: str) -> dict[str, Any]:
    """The fingerprint as far as the file knows it; names of machines are hashed, as everywhere."""
    machine, commit = (document.get(name) or {} for name in ("machine_info", "commit_info"))
    cpu, node = machine.get("cpu") or {}, machine.get("node")
    return {
        "device": "cuda" if machine.get("gpu") else "cpu",
        "gpu": machine.get("gpu"),
        "cpu": cpu.get("brand_raw") or machine.get("processor") or machine.get("machine"),
        "cpu_threads": cpu.get("count"),
        "python": machine.get("python_version"),
        "os": " ".join(str(machine[key]) for key in ("system", "release") if machine.get(key)) or None,
        "host_hash": hashed(str(node)) if node else None,
        "git_commit": commit.get("id"),
        "git_dirty": commit.get("dirty"),
        "imported_from": maker,
    }
