"""Shell: one run of a user's shell line, how it failed if it did, and the end of all that it started."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.machine.processes import MARK, interruptible, marked

if TYPE_CHECKING:
    from collections.abc import Iterator

KILLER = "import sys\nfrom harness.machine.processes import kill_marked\nsys.stdin.read()\nkill_marked(sys.argv[1])\n"
# Exit codes of a program's own; beyond: not executable, not found, ended by a signal
ORDINARY = range(1, 126)


class Kind(Enum):
    """Kinds of fault: only one that the program reports itself says that its code is broken."""

    FAILED = auto()  # an exit code of its own, or it wrote no benchmark
    ENDED = auto()  # by a signal, or it could not be started
    NO_FOLDER = auto()


class Fault(NamedTuple):
    """Why a run did not work."""

    reason: str
    kind: Kind = Kind.FAILED


def run_shell(
    line: str, folder: Path, timeout_s: float | None, output: Path, env: dict[str, str]
) -> tuple[float, Fault | None]:
    """Runs a shell line in a group of its own; returns its seconds and its fault, None where it worked.

    Raises:
        subprocess.TimeoutExpired: it was ended as the time was over.
    """
    if not folder.is_dir():
        return 0.0, Fault(f"the commit has no folder {folder.name}", Kind.NO_FOLDER)
    if timeout_s is not None and timeout_s <= 0:
        raise subprocess.TimeoutExpired(line, timeout_s)
    with output.open("wb") as file:
        begun = time.perf_counter()
        process = subprocess.Popen(
            line, shell=True, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(None if timeout_s is None or math.isinf(timeout_s) else timeout_s)
            seconds = time.perf_counter() - begun
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return seconds, None
    kind = Kind.FAILED if code in ORDINARY else Kind.ENDED
    return seconds, Fault(f"exit code {code}; {last_line(output)}", kind)


@contextmanager
def contained() -> Iterator[None]:
    """Ends all processes that are started within when it is left, and also where this process is killed outright.

    A process of its own waits for the end of this one, and ends what carries its mark.
    """
    root = Path(__file__).resolve().parents[2]
    with interruptible(), marked():
        env = {n: v for n, v in os.environ.items() if n != MARK} | {"PYTHONPATH": str(root)}
        killer = subprocess.Popen(
            [sys.executable, "-c", KILLER, os.environ[MARK]],
            stdin=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        try:
            yield
        finally:
            killer.communicate()


def last_line(output: Path) -> str:
    """What a command said last that says something; pytest's own summary line comes after its reason."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("E  ") or "Error" in line]
    return (telling or lines or ["no output"])[-1][:300]
