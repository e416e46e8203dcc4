"""Benchmark files: pytest-benchmark JSON as rows of the store, and several files of one side as its rounds.

A test runs in one process, and what one process measures is no independent evidence of the next: a file is one round,
whether it is named to the gate beside others or imported.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import store
from harness.gate.sides import load_side, notes_on_files
from harness.machine.environment import env_id
from harness.store.arm import Arm
from harness.store.case import Case
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.store.outside import from_json, read_text
from harness.store.private import hashed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from harness.gate.sides import Side

SUITE = "pytest-benchmark"
# Files of others by the keys that theirs have: google-benchmark 1.9, nvbench's JSON, asv's results, pyperf 2, hyperfine 1.
_OTHERS = {
    "google-benchmark": {"context", "benchmarks"},
    "nvbench": {"devices", "benchmarks"},
    "asv": {"commit_hash", "env_name", "results"},
    "pyperf": {"benchmarks", "metadata", "version"},
    "hyperfine": {"results"},
}
ARM = "test"


def side_of_files(paths: Sequence[Path], role: Literal["baseline", "candidate"]) -> Side:
    """One side of the gate from files of as many processes, each a round.

    Raises:
        UsageError: a file can't be read or is not of pytest-benchmark, one is named twice, or the files are of several
            machines.
    """
    seen: dict[str, Path] = {}
    tests: dict[str, list[tuple[int, Measurement]]] = {}
    envs = []
    for number, path in enumerate(paths):
        document = read_document(path)
        first = seen.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
        if len(seen) == number:
            raise UsageError(f"{path} and {first} are the same file, which is one round and not two")
        envs.append(environment_of(document))
        if env_id(envs[-1]) != env_id(envs[0]):
            raise UsageError(
                f"{path} was measured elsewhere than {paths[0]}; name the files of one machine a side"
            )
        for row in (row_of(test, path) for test in document["benchmarks"]):
            tests.setdefault(row.case_id, []).append((number, row))
    rows = [
        replace(
            parts[0][1],
            samples=tuple(x for _, row in parts for x in row.samples),
            rounds=tuple(number for number, row in parts for _ in row.samples),
        )
        for parts in tests.values()
    ]
    env = envs[0] | {"host_hash": None}  # no row is kept, and no results folder has a salt for it
    with tempfile.TemporaryDirectory() as folder:
        writer = store.RunWriter(
            Path(folder), run_id=role, sweep=SUITE, env_id=env_id(env), env=env, about={}
        )
        writer.append(rows)
        writer.close("finished")
        side = load_side(folder, role, "")
    notes = (*side.notes, *notes_on_files(role, len(paths), len(tests)))
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    return replace(
        side, name=name, notes=notes, runs=tuple(f"file sha256 {digest[:12]}" for digest in sorted(seen))
    )


def read_document(path: Path) -> dict[str, Any]:
    """A file's content.

    Raises:
        UsageError: it can't be read, is not of pytest-benchmark, holds no test, or holds a value of another type.
    """
    try:
        document = from_json(read_text(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    said = f"{path} is no pytest-benchmark file"
    for maker, keys in _OTHERS.items():
        if isinstance(document, dict) and keys <= document.keys():
            raise UsageError(
                f"{said} but one of {maker}, which is not read here; gate --command times the program itself"
            )
    if not isinstance(document, dict) or not isinstance(document.get("benchmarks"), list):
        raise UsageError(f"{said} (no list `benchmarks`); write one with pytest --benchmark-json=FILE")
    if not document["benchmarks"]:
        raise UsageError(f"{path} contains no benchmark; did pytest run any test with the benchmark fixture?")
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
    """One test's times, a single round.

    Raises:
        UsageError: it lacks a name or times, or holds a time that is none.
    """
    _require(test, dict, "a benchmark", path)
    name = _require(test.get("fullname"), str, "'fullname' of a benchmark", path)
    stats = _require(test.get("stats"), dict, f"'stats' of {name}", path)
    extra = _require(test.get("extra_info") or {}, dict, f"extra_info of {name}", path)
    if not stats.get("data") and "median" not in stats:
        raise UsageError(f"{path}: a benchmark without 'median' and without 'data': {name}")
    data = _require(stats.get("data") or [stats["median"]], list, f"stats.data of {name}", path)
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in data):
        raise UsageError(f"{path}: {name} has the times {data!r:.60}; expected seconds")
    if not all(math.isfinite(s) and s > 0 for s in data):
        raise UsageError(
            f"{path}: {name} holds a time that is not a positive number: {min(data):g} s among {len(data)}"
        )
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
            "timed": "one call of the test's function, by pytest-benchmark",
            **({"extra_info": extra} if extra else {}),
        },
        samples=tuple(1e3 * s for s in data),
        rounds=(0,) * len(data),
        timing={
            "method": "pytest-benchmark",
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
        "device": "cpu",
        "cpu": cpu.get("brand_raw") or machine.get("processor") or machine.get("machine"),
        "cpu_threads": cpu.get("count"),
        "python": machine.get("python_version"),
        "os": f"{machine.get('system')} {machine.get('release')}",
        "host_hash": hashed(str(node)) if node else None,
        "git_commit": commit.get("id"),
        "git_dirty": commit.get("dirty"),
        "imported_from": SUITE,
    }
