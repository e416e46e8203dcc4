"""A process that holds the lock of a run's folder until it is killed or its standard input ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.engine import run_folder

HOLDER = """
import sys, time
from pathlib import Path
from harness.engine import run_folder
with run_folder.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def hold(folder: str) -> subprocess.Popen[bytes]:
    root = str(Path(run_folder.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder], env=os.environ | {"PYTHONPATH": root}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process
