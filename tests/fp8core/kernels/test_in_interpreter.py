"""Runs the kernel tests of this folder where no GPU is needed: in Triton's interpreter, in a process of its own.

Triton decides at import, by TRITON_INTERPRET, whether a kernel is compiled or interpreted, so one process cannot
have both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from interpreted import CANNOT_LOOP, interpreter_cannot_loop

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="this process is the interpreter's already"
    ),
    pytest.mark.skipif(interpreter_cannot_loop(), reason=CANNOT_LOOP),
]
HERE = Path(__file__).parent
KERNEL_TESTS = (
    "test_encode.py",
    "test_casts.py",
    "test_fused.py",
    "test_matmul.py",
    "test_traffic.py",
)


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """One process for each selected file, all at once; none survives the tests."""
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    started: dict[str, subprocess.Popen[str]] = {}
    for item in request.session.items:
        file = (
            getattr(item, "callspec", None) and item.path == Path(__file__) and item.callspec.params["file"]
        )
        if file:
            command = [sys.executable, "-m", "pytest", "-q", str(HERE / file)]
            started[file] = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=env,
                cwd=request.config.rootpath,
            )
    yield started
    for process in started.values():
        process.kill()  # does nothing to one that has ended
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("file", KERNEL_TESTS)
def test_kernels_pass_in_the_interpreter(file: str, processes: dict[str, subprocess.Popen[str]]) -> None:
    """Oracle: each test's own. All must run: at least one passed, none skipped."""
    output, _ = processes[file].communicate()
    assert processes[file].returncode == 0, output
    summary = output.strip().splitlines()[-1]
    assert re.search(r"\d+ passed", summary), output
    assert "skipped" not in summary, output


def test_no_kernel_test_is_forgotten() -> None:
    """Oracle: the text of the files: whoever takes the fixture `device` is in the list, and this file is not."""
    takes_device = {
        p.name
        for p in HERE.glob("test_*.py")
        if p != Path(__file__) and "device: torch.device" in p.read_text()
    }
    assert takes_device - {"test_aot.py"} == set(KERNEL_TESTS)
