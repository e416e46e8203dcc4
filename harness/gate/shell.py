"""Shell: one run of a user's shell line, how it failed if it did, and the end of all that it started.

A pipe fails where any of its programs fails (`pipefail`): the benchmark of `bench | cat` may have crashed. Work that a
line leaves behind in the background would not be in its time, so such a run is no measurement.
"""

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

import psutil

from harness.machine.processes import MARK, interruptible, marked

if TYPE_CHECKING:
    from collections.abc import Iterator

KILLER = "import sys\nfrom harness.machine.processes import kill_marked\nsys.stdin.read()\nkill_marked(sys.argv[1])\n"
VARIABLE, OPENED = "HARNESS_GATE_RECORD", "HARNESS_GATE_OPENED"  # of the recorder
SHELL = ("bash", "-o", "pipefail", "-c")
ENDING_S = 1.0  # for helpers, as multiprocessing's tracker, to see that their parent has ended
# Exit codes of a program's own; beyond: not executable, not found, ended by a signal
ORDINARY = range(1, 126)


class Kind(Enum):
    """Kinds of fault: only one that the program reports itself says that its code is broken."""

    FAILED = auto()  # an exit code of its own, or it wrote no benchmark
    ENDED = auto()  # by a signal, or it could not be started, or what it started had not ended


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
        return 0.0, Fault(f"the commit has no folder {folder.name}")
    if timeout_s is not None and timeout_s <= 0:
        raise subprocess.TimeoutExpired(line, timeout_s)
    waited, left = 0.0, ""
    with output.open("wb") as file:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [*SHELL, line], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(None if timeout_s is None or math.isinf(timeout_s) else timeout_s)
            seconds = time.perf_counter() - begun
            if VARIABLE in env:
                waited, left = _left_behind(env[VARIABLE])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if left:
        return seconds, Fault(f"{left} still ran when the line had ended: wait for it there", Kind.ENDED)
    if code == 0:
        return seconds + waited, None
    kind = Kind.FAILED if code in ORDINARY else Kind.ENDED
    return seconds, Fault(f"exit code {code}; {last_line(output)}", kind)


def _left_behind(mark: str) -> tuple[float, str]:
    """Seconds until all of a run has ended, at most `ENDING_S`, and what has not by then; "" for nothing.

    Args:
        mark: the folder that the run's processes record into, by which they are known.
    """
    begun, waited = time.monotonic(), 0.0
    while True:
        processes = psutil.process_iter(["pid", "name", "environ"])
        left = [p.info for p in processes if (p.info["environ"] or {}).get(VARIABLE) == mark]
        if not left or waited > ENDING_S:
            return waited, f"process {left[0]['pid']} ({left[0]['name']})" if left else ""
        time.sleep(0.01)
        waited = time.monotonic() - begun


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
