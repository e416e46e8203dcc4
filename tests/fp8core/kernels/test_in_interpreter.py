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

import pytest

HERE = Path(__file__).parent
KERNEL_TESTS = sorted(p.name for p in HERE.glob("test_*.py") if "device: torch.device" in p.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("file", KERNEL_TESTS)
def test_kernels_pass_in_the_interpreter(file: str, pytestconfig: pytest.Config) -> None:
    """Oracle: each test's own. All must run: none skipped, at least one passed."""
    command = [sys.executable, "-m", "pytest", "-q", str(HERE / file)]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=pytestconfig.rootpath)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", summary), summary
    assert "skipped" not in summary, summary


def test_kernel_tests_were_found() -> None:
    """The search above looks for text; an empty list would pass in silence."""
    assert {"test_encode.py", "test_casts.py", "test_mx.py", "test_fused.py", "test_matmul.py"} <= set(KERNEL_TESTS)
