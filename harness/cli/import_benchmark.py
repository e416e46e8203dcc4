"""`python -m harness import FILE.json`: a file of pytest-benchmark, asv or nvbench becomes a run of the store, and so gets the gate.

Written by `pytest --benchmark-json=FILE.json --benchmark-save-data`: with the data, raw times are stored; without, the
file holds only summaries, and the median becomes the one sample of a row, which no gate will judge. Summaries are not
copied: they are derived anew, since `hd15iqr` of pytest-benchmark 5.3 is the first datum beyond the upper fence where
its documentation promises the last one within.

A file is one process and so one round, by which the gate decides nothing. Files of several processes are its rounds, and
it takes them as they are: `gate --baseline a*.json --candidate b*.json`.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate.benchmark_files import read_file, write_run
from harness.gate.figures import SUITE
from harness.store.errors import UsageError
from harness.store.words import key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Sequence

SAVE_DATA = "pytest --benchmark-save-data and asv --record-samples write them"


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """python -m harness import: a JSON file of pytest-benchmark, asv or nvbench into the store, as one run"""

    file: Path = word("FILE.json")
    results_dir: Path = key("where the run goes", Path("results"))


def main(argv: Sequence[str]) -> int:
    """Imports one file; returns 0, or 2 by way of UsageError."""
    if (options := options_of(ImportOptions, argv)) is None:
        return 0
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
        UsageError: the file can't be read, is of a program that is not read, holds no test, or a time that is none; nothing
            was written.
    """
    found = read_file(path)
    # The same file always becomes the same run: importing it twice is refused, not counted twice.
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    stamp = "".join(c for c in str(found.document.get("datetime", ""))[:19] if c.isalnum()) or "undated"
    run_id = f"{stamp}-{str(found.env['git_commit'] or 'nogit')[:7]}-{digest}"
    folder = results_dir / SUITE / run_id
    if folder.exists():
        raise UsageError(f"{path} was imported before: {folder}")
    write_run(found, path, folder, run_id)
    return folder, len(found.rows), sum(len(row.samples) == 1 for row in found.rows)
