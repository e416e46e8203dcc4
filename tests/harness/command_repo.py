"""Builds a small repository of its own with a package and a benchmark program whose times are known."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from harness.__main__ import main

PROGRAM = '''
"""Writes pytest-benchmark JSON of known times: what the package says, and a hundredth of a percent of noise."""
import json
import random
import sys

import pkg

machine = {"system": "Linux", "python_version": "3.11", "cpu": {"brand_raw": "a CPU", "count": 2}}
tests = [
    {"fullname": name, "group": None, "extra_info": {}, "stats": {"median": seconds * random.uniform(1, 1.0001), "iterations": 1}}
    for name, seconds in pkg.times().items()
]
if tests:
    with open(sys.argv[1], "w") as file:
        json.dump({"machine_info": machine, "commit_info": {}, "benchmarks": tests, "version": "5"}, file)
sys.exit(getattr(pkg, "CODE", 0))
'''
PACKAGE = "def times():\n    return {{{entries}}}\n"
FAKE = f"PYTHONPATH=src:$PYTHONPATH {sys.executable} -P bench/program.py {{out}}"
FEW = ("--pairs", "5", "--confirm-pairs", "8")


def git(root: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    return subprocess.run(
        ["git", "-C", str(root), *identity, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def package(**seconds: float) -> str:
    """Source of the package in which benchmark NAME takes so many seconds."""
    return PACKAGE.format(entries=", ".join(f"'bench.py::{n}': {s!r}" for n, s in seconds.items()))


def make_repository(root: Path, files: dict[str, str]) -> Path:
    """A repository with one commit, named main."""
    root.mkdir(parents=True)
    git(root, "init", "-q", "-b", "main")
    commit(root, files)
    git(root, "checkout", "-q", "-b", "change")
    return root


def commit(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "change")


def fake_repository(root: Path) -> Path:
    files = {
        "bench/program.py": PROGRAM,
        "src/pkg/__init__.py": package(a=0.01, b=0.02),
        ".gitignore": "results\n",
    }
    return make_repository(root, files)


def verdicts(document: dict[str, Any]) -> dict[str, str]:
    """Verdict by benchmark."""
    return {
        finding["case"].removeprefix("bench.py::"): finding["verdict"] for finding in document["findings"]
    }


def gate(root: Path, *words: str, **env: str) -> tuple[int, str, dict[str, Any]]:
    """`python -m harness gate --against main` in a repository, in this process: exit code, output, JSON."""
    here = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(here), env.pop("PYTHONPATH", ""))))
    said, file = io.StringIO(), root / "results.json"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        patch.chdir(root)
        for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
            patch.delenv(
                name
            )  # a worker of pytest-xdist says that it is one: pytest-benchmark then writes no file
        for name, value in {**env, "PYTHONPATH": path}.items():
            patch.setenv(name, value)
        patch.setattr(tempfile, "tempdir", None)  # else the folder of before is remembered
        code = main(["gate", "--against", "main", "--json", file.name, *words])
    document = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    return code, said.getvalue(), document


# pytest-benchmark itself. Work and timer count processor time, which a neighbour on the machine does not take.
SUITE = """
import pytest
from pkg import work

@pytest.mark.parametrize("size", [20, 40])
def test_work(benchmark, size):
    benchmark.pedantic(work, args=(size,), rounds=15, iterations=1)
"""
SPIN = """
import time

def work(size):
    begun = time.process_time()
    while time.process_time() - begun < {factor} * size * 1e-4:
        pass
"""
# The same amount of arithmetic each time, for the wall clock: what most suites measure.
WORK = """
def work(size):
    total = 0
    for i in range(int({factor} * size * 1000)):
        total += i * i
    return total
"""
TIMER = "--benchmark-timer=time.process_time"
PYTEST = (
    f"PYTHONPATH=.:$PYTHONPATH PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -q -p pytest_benchmark.plugin "
    f"-p no:cacheprovider bench --benchmark-json={{out}} {TIMER}"
)


def spinning(folder: Path, package: str = SPIN) -> Path:
    """A repository with a suite of pytest-benchmark whose two tests spin for 2 and 4 ms, or do what a package does."""
    files = {"bench/test_bench.py": SUITE, "pkg.py": package.format(factor=1.0), "pytest.ini": "[pytest]\n"}
    return make_repository(folder, {**files, ".gitignore": "results\n"})
