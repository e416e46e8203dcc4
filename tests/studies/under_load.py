"""Tests that wait for time instead of conditions: `python tests/studies/under_load.py [--loops N] [--times N] [TEST ...]`.

Runs tests beside N endless loops and prints which of them failed in how many runs. Loops and tests share one core
(`--core`), so load N there leaves the rest of the machine to others. Without names: the tests that start processes, wait for
them, or read a clock.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAITS = re.compile(
    r"subprocess\.Popen|psutil\.wait_procs|time\.monotonic\(|threading\.Timer|signal\.raise_signal"
)
LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with this program, however that ends
LEFT_OUT = ("benchmarks", "clients", "studies")
MARKS = "not slow and not benchmark_bar and not clients and not gpu"


def waiting() -> list[str]:
    """Test files that start processes or wait."""
    return [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.relative_to(ROOT / "tests").parts[0] not in LEFT_OUT and WAITS.search(path.read_text())
    ]


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def failures(words: Sequence[str]) -> tuple[list[str], str]:
    """The tests of one run that failed, and its last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", MARKS, "--tb=short", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if failed or done.returncode:
        print(done.stdout[-20_000:], done.stderr[-2_000:], sep="\n", flush=True)
    return failed, done.stdout.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", help="test files or names of tests, as pytest takes them")
    parser.add_argument("--loops", type=int, default=10)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument(
        "--core", type=int, default=max(os.sched_getaffinity(0)), help="that all of it runs on"
    )
    parser.add_argument("--list", action="store_true", help="print the files that would run, and run nothing")
    options = parser.parse_args()
    tests = options.tests or waiting()
    if options.list:
        print("\n".join(tests))
        return 0
    os.sched_setaffinity(0, {options.core})  # what is started from here on inherits it
    counts: Counter[str] = Counter()
    with busy(options.loops):
        for turn in range(1, options.times + 1):
            begun = time.monotonic()
            failed, last = failures(tests)
            counts.update(failed)
            print(f"run {turn} of {options.times}, {time.monotonic() - begun:.0f} s: {last}", flush=True)
    for name, count in counts.most_common():
        print(f"{count} of {options.times} failed: {name}")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
