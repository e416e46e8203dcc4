"""Benchmark files: JSON of pytest-benchmark as rows of the store, and several files of one side as its rounds.

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
from typing import TYPE_CHECKING, Any

from harness import store
from harness.gate.figures import SUITE
from harness.gate.sides import load_side
from harness.machine.environment import env_id
from harness.store.case import Arm, Case
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.store.outside import from_json, read_text
from harness.store.private import hashed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    from harness.gate.sides import Side

MILLISECONDS = {
    "s": 1e3,
    "seconds": 1e3,
    "ms": 1.0,
    "us": 1e-3,
    "ns": 1e-6,
}  # of the units of time that a file may state
# Files of others by the keys that theirs have: google-benchmark 1.9, pyperf 2, hyperfine 1, nvbench's JSON, asv's results
_OTHERS = {
    "google-benchmark": {"context", "benchmarks"},
    "pyperf": {"benchmarks", "metadata", "version"},
    "nvbench": {"benchmarks", "devices"},
    "asv": {"commit_hash", "results"},
    "hyperfine": {"results"},
}
ARM = "test"
STATED = ("unit", "higher_is_better")


def side_of_files(paths: Sequence[Path], role: Literal["baseline", "candidate"]) -> Side:
    """One side of the gate from files of as many processes, each a run of its own as if it were imported, and so a round.

    Raises:
        UsageError: a file can't be read or is of another program, or one is named twice.
        GateError: the files are of several machines (exit 3).
    """
    seen: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            document = read_document(path)
            run = f"file sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
            if run in seen:
                raise UsageError(f"{path} and {seen[run]} are the same file, which is one round and not two")
            seen[run] = path
            # No row is kept, and no results folder has a salt for a host
            env = environment_of(document) | {"host_hash": None}
            write_run(document, path, Path(folder) / str(len(seen)), run, env)
        side = load_side(folder, role, "")
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return replace(side, name=f"{paths[0]}{more}")


def write_run(
    document: Mapping[str, Any], path: Path, folder: Path, run_id: str, env: Mapping[str, Any]
) -> list[Measurement]:
    """Writes what a file holds as one run; returns its rows.

    Raises:
        UsageError: see `row_of`; nothing was written.
    """
    rows = [row_of(test, path) for test in document["benchmarks"]]
    try:  # when the tests ran, as the file says it in its own zone
        made_at = datetime.fromisoformat(str(document.get("datetime"))).isoformat(timespec="milliseconds")
    except ValueError:
        made_at = ""
    about = {
        "made_by": "import",
        "command": f"python -m harness import {path.name}",
        "version": document.get("version"),
    }
    writer = store.RunWriter(
        folder, run_id=run_id, sweep=SUITE, env_id=env_id(env), env=env, about=about, made_at=made_at
    )
    rows = writer.append(rows)
    writer.close("finished")
    return rows


def read_document(path: Path) -> dict[str, Any]:
    """A file's content.

    Raises:
        UsageError: it can't be read, is of another program, holds no test, or holds a value of another type.
    """
    try:
        document = from_json(read_text(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    said = f"{path} is no pytest-benchmark file"
    for maker, keys in _OTHERS.items():
        if isinstance(document, dict) and keys <= document.keys():
            raise UsageError(
                f"{said} but one of {maker}, which is not read here; write its figures in that form, or gate --command times the program itself"
            )
    if not isinstance(document, dict) or not isinstance(document.get("benchmarks"), list):
        raise UsageError(f"{said} (no list `benchmarks`); write one with pytest --benchmark-json=FILE")
    if not document["benchmarks"]:
        raise UsageError(f"{path} contains no benchmark that ran; did its program run any?")
    for name in ("machine_info", "commit_info"):
        _require(document.get(name) or {}, dict, name, path)
    _require((document.get("machine_info") or {}).get("cpu") or {}, dict, "machine_info.cpu", path)
    return document


def _require(value: Any, kind: type, what: str, path: Path) -> Any:
    if not isinstance(value, kind):
        named = "an object" if kind is dict else "a text" if kind is str else "a list"
        raise UsageError(f"{path}: {what} is {value!r:.60}; expected {named} as pytest-benchmark writes it")
    return value


def row_of(test: Any, path: Path) -> Measurement:
    """One test's figures, a single round, as times in ms: those of which higher is better as time a unit, and others as if seconds.

    `unit` and `higher_is_better` may stand in the entry or in its extra_info; without them a figure is in seconds.

    Raises:
        UsageError: it lacks a name or times, or holds a time that is none.
    """
    _require(test, dict, "a benchmark", path)
    name = _require(test.get("fullname"), str, "'fullname' of a benchmark", path)
    stats = _require(test.get("stats"), dict, f"'stats' of {name}", path)
    extra = dict(_require(test.get("extra_info") or {}, dict, f"extra_info of {name}", path))
    if not stats.get("data") and "median" not in stats:
        raise UsageError(f"{path}: a benchmark without 'median' and without 'data': {name}")
    data = _require(stats.get("data") or [stats["median"]], list, f"stats.data of {name}", path)
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in data):
        raise UsageError(f"{path}: {name} has the times {data!r:.60}; expected seconds")
    if not all(math.isfinite(s) and s > 0 for s in data):
        raise UsageError(
            f"{path}: {name} holds a time that is not a positive number: {min(data):g} s among {len(data)}"
        )
    about = {key: extra.pop(key) for key in STATED if key in extra}
    about |= {key: test[key] for key in STATED if key in test}
    unit, higher = about.get("unit"), about.get("higher_is_better", False)
    if not (unit is None or isinstance(unit, str)) or not isinstance(higher, bool):
        raise UsageError(
            f"{path}: {name} has unit {unit!r} and higher_is_better {higher!r}; expected a text, and true or false"
        )
    said = {"better": "higher" if higher else "lower", **({"unit": unit} if unit else {})}
    if not higher and unit in MILLISECONDS:
        data, said["unit"] = [s * MILLISECONDS[unit] for s in data], "s"
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
            "timed": f"one call, by {SUITE}",
            "iterations": stats.get("iterations"),
            **(said if about else {}),
            **({"extra_info": extra} if extra else {}),
        },
        samples=tuple(data),
        rounds=(0,) * len(data),
        timing={
            "method": SUITE,
            "raw": bool(stats.get("data")),
            "iterations": stats.get("iterations"),
        },
    )


def environment_of(document: dict[str, Any]) -> dict[str, Any]:
    """The fingerprint as far as the file knows it; names of machines are hashed, as everywhere."""
    machine = document.get("machine_info") or {}
    cpu = machine.get("cpu") or {}
    commit = document.get("commit_info") or {}
    node = machine.get("node")
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
        "imported_from": SUITE,
    }
