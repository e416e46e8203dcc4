"""`python -m harness import FILE.json`: a pytest-benchmark file becomes a run of the store, and so gets the gate.

Written by `pytest --benchmark-json=FILE.json --benchmark-save-data`: with the data, raw times are stored; without, the
file holds only summaries, and the median becomes the one sample of a row, which no gate will judge. Summaries are not
copied: they are derived anew, since `hd15iqr` of pytest-benchmark 5.3 is the first datum beyond the upper fence where
its documentation promises the last one within.

A test runs in one process, and what follows one another closely is no independent evidence: the times are cut, in the
order taken, into at most `ROUNDS` blocks of equal length, which are the rounds.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import store
from harness.gate import Parser
from harness.machine.environment import env_id
from harness.store.arm import Arm
from harness.store.case import Case
from harness.store.errors import UsageError
from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

SUITE = "pytest-benchmark"
ARM = "test"
ROUNDS = 20  # enough for a sign-flip test of p = 1e-6, few enough that neighbours share a block
SAVE_DATA = "rerun pytest with --benchmark-save-data"


def main(argv: Sequence[str]) -> int:
    """Imports one file; returns 0, or 2 by way of UsageError."""
    parser = Parser(
        prog="python -m harness import",
        description="A pytest-benchmark JSON file into the store, as one run.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.json")
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    options = parser.parse_args(list(argv))
    folder, count, bare = import_file(options.file, options.results_dir)
    if bare:
        sys.stderr.write(f"warning: {bare} of {count} tests hold no raw times; {SAVE_DATA}\n")
    sys.stdout.write(f"imported {count} tests\nresults  {folder}\n")
    return 0


def import_file(path: Path, results_dir: Path) -> tuple[Path, int, int]:
    """Writes a file's tests as a run.

    Returns:
        The run's folder, how many tests it holds, and how many of them came without raw times.

    Raises:
        UsageError: the file can't be read, is not of pytest-benchmark, holds no test, or a time that is none; nothing
            was written.
    """
    document = _read(path)
    tests = document["benchmarks"]
    rows = [_row(test, path) for test in tests]
    env = _env(document)
    # The same file always becomes the same run: importing it twice is refused, not counted twice.
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    stamp = "".join(c for c in str(document.get("datetime", ""))[:19] if c.isalnum()) or "undated"
    run_id = f"{stamp}-{str(env['git_commit'] or 'nogit')[:7]}-{digest}"
    folder = results_dir / SUITE / run_id
    if folder.exists():
        raise UsageError(f"{path} was imported before: {folder}")
    writer = store.RunWriter(
        folder,
        run_id=run_id,
        sweep=SUITE,
        env_id=env_id(env),
        env=env,
        about={"command": f"python -m harness import {path.name}", "version": document.get("version")},
    )
    writer.append(rows)
    writer.close("finished")
    return folder, len(rows), sum(len(row.samples) == 1 for row in rows)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or not isinstance(document.get("benchmarks"), list):
        raise UsageError(
            f"{path} is no pytest-benchmark file (no list `benchmarks`); write one with pytest --benchmark-json=FILE"
        )
    if not document["benchmarks"]:
        raise UsageError(f"{path} contains no benchmark; did pytest run any test with the benchmark fixture?")
    return document


def _row(test: Any, path: Path) -> Measurement:
    try:
        name, stats = str(test["fullname"]), dict(test["stats"])
        seconds = [float(x) for x in stats.get("data") or [stats["median"]]]
    except (TypeError, KeyError, ValueError) as error:
        raise UsageError(
            f"{path}: a benchmark without {error}; expected fullname and stats of pytest-benchmark"
        ) from error
    if not all(math.isfinite(s) and s > 0 for s in seconds):
        raise UsageError(
            f"{path}: {name} holds a time that is not a positive number: {min(seconds):g} s among {len(seconds)}"
        )
    raw = bool(stats.get("data"))
    case = Case.of(SUITE, {"test": name, "group": str(test.get("group") or "")})
    count = len(seconds)
    blocks = min(ROUNDS, count)
    return Measurement(
        suite=SUITE,
        case_id=case.case_id,
        arm=ARM,
        arm_fields=Arm(variant=ARM),
        axes=case.axes_json,
        metric="time_ms",
        status="ok",
        regime="isolated",
        resolved={"timed": "one call of the test's function, by pytest-benchmark", **_extra(test)},
        samples=tuple(1e3 * s for s in seconds),
        rounds=tuple(index * blocks // count for index in range(count)),
        timing={"method": "pytest-benchmark", "raw": raw, "iterations": stats.get("iterations")},
    )


def _extra(test: Any) -> dict[str, Any]:
    extra = test.get("extra_info")
    return {"extra_info": extra} if extra else {}


def _env(document: dict[str, Any]) -> dict[str, Any]:
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
        "host_hash": hashlib.sha256(str(node).encode()).hexdigest()[:12] if node else None,
        "git_commit": commit.get("id"),
        "git_dirty": commit.get("dirty"),
        "imported_from": SUITE,
    }
