"""Which unit test of tests/fp8core catches each planted fault: writes unit_verdicts.json and a column of that study's page.

    python tests/faults/unit_verdicts.py [FAULT ...]

A fault is planted before the tests are imported, in a process of its own; the tests run, fastest files first, until
one fails. Tests of `verify` are left out: the page has a column for it. "" in the file: all passed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERDICTS = HERE / "unit_verdicts.json"
PAGE = ROOT / "reports" / "published" / "studies" / "verify-faults.md"
NOT_RUN = "unmeasured"
# Of one process, without compilers and `verify`; ordered by how fast they find most faults
FILES = (
    "cast", "scaling", "tensor", "operands", "linear", "history", "microbatch", "gemm", "accumulate", "blocks",
    "grouped", "moe", "convert", "bad_input", "shared_input", "three_dimensions", "torchao",
)  # fmt: skip


class _FirstFailure:
    """Notes the first test that fails."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid.replace("\\", "/").rpartition("/")[2]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid.rpartition('/')[2]} (import)"


def first_failure(fault: str, tests: tuple[str, ...]) -> str:
    """The first of the tests (paths or node ids below tests/fp8core) that fails with the fault; "" if none does.

    Runs in the process that calls, which it leaves unusable; `fault` "" plants none.
    """
    from layer_faults import ALL_FAULTS

    watcher = _FirstFailure()
    planted = ALL_FAULTS[fault].planted() if fault else contextlib.nullcontext()
    arguments = [f"tests/fp8core/{test}" for test in tests]
    with planted:
        status = pytest.main(
            ["-x", "-q", "-m", "not slow and not gpu", "-k", "not compile", *arguments], plugins=[watcher]
        )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not watcher.name:
        raise RuntimeError(f"pytest ended with {status!r} on fault {fault!r}")
    return watcher.name


def in_a_process(fault: str, tests: tuple[str, ...]) -> str:
    """The same in a process of its own, whose output is dropped.

    Raises:
        RuntimeError: it gave no answer.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "fp8core", "pytest", "layer_faults", "torchao.float8"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(fault, tests, sender))
    process.start()
    sender.close()
    try:
        answer: str = receiver.recv()
    except EOFError:
        raise RuntimeError(f"the unit tests with fault {fault!r} gave no answer") from None
    finally:
        process.join()
    return answer


def _answer(fault: str, tests: tuple[str, ...], sender: Any) -> None:
    os.chdir(ROOT)
    for folder in (HERE, ROOT / "tests" / "fp8core", ROOT):
        sys.path.insert(0, str(folder))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    sender.send(first_failure(fault, tests))


def cell(name: str, verdicts: dict[str, str]) -> str:
    """The column's text for a fault."""
    if name not in verdicts:
        return NOT_RUN
    return f"`{verdicts[name].partition('[')[0]}`" if verdicts[name] else "none"


def page_with_column(page: str, verdicts: dict[str, str], names: Collection[str]) -> str:
    """The page with the column "unit test" of its table of planted faults written anew."""
    lines = []
    for line in page.splitlines():
        cells = line.strip("|").split("|") if line.startswith("| ") else [""]
        if cells[0].strip() in names:
            cells[3] = f" {cell(cells[0].strip(), verdicts)} "
            line = f"|{'|'.join(cells)}|"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "tests" / "fp8core")]
    from layer_faults import ALL_FAULTS

    verdicts = json.loads(VERDICTS.read_text()) if VERDICTS.exists() else {}
    for name in names or list(ALL_FAULTS):
        verdicts[name] = in_a_process(name, tuple(f"test_{file}.py" for file in FILES))
        print(f"{name}: {verdicts[name] or 'no unit test'}", flush=True)
        ordered = {name: verdicts[name] for name in ALL_FAULTS if name in verdicts}
        VERDICTS.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page_with_column(PAGE.read_text(), verdicts, ALL_FAULTS))


if __name__ == "__main__":
    main(sys.argv[1:])
