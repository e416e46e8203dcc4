"""CPU seconds of each test, its processes included: `pytest -p cpu_seconds --cpu-seconds FILE ...`, in one process.

Wall time on a busy machine says more of the machine than of the test. A fixture counts for the first test that asks for it,
a process that outlives its test for the one that waits for it.
`python tests/studies/cpu_seconds.py FILE [OTHER]` prints the files and tests that take most; of two, the difference too.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", metavar="FILE", help="append the CPU seconds of each test to FILE")


def spent_s() -> float:
    """CPU seconds of this process and of all that it has started: those that run, and those that were waited for."""
    me, total = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:  # it has ended
            continue
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    file = item.config.getoption("--cpu-seconds")
    begun = spent_s() if file else 0.0
    result = yield
    if file:
        with Path(file).open("a") as rows:
            rows.write(json.dumps([item.nodeid, round(spent_s() - begun, 3)]) + "\n")
    return result


def read(file: Path) -> dict[str, float]:
    """Seconds by test; of one that stands there twice, the last."""
    return dict(json.loads(line) for line in file.read_text().splitlines())


def by_file(tests: Mapping[str, float]) -> dict[str, float]:
    """Seconds by file."""
    files: dict[str, float] = defaultdict(float)
    for name, seconds in tests.items():
        files[name.partition("::")[0]] += seconds
    return files


def listing(before: Mapping[str, float], after: Mapping[str, float], most: int) -> list[str]:
    """One line each of what takes most, with its total."""
    lines = []
    for what, one, other in (("files", by_file(before), by_file(after)), ("tests", before, after)):
        lines.append(
            f"{what}: {sum(one.values()):.1f} s" + (f" -> {sum(other.values()):.1f} s" if other else "")
        )
        names = sorted(one.keys() | other.keys(), key=lambda n: -max(one.get(n, 0.0), other.get(n, 0.0)))
        for name in names[:most]:
            then = f" -> {other.get(name, 0.0):7.1f}" if other else ""
            lines.append(f"{one.get(name, 0.0):8.1f}{then} {name}")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=25)
    options = parser.parse_args()
    one, *others = map(read, options.files)
    print("\n".join(listing(one, others[0] if others else {}, options.most)))
