"""How a GPU session runs what it measures: sweeps in this process, anything else in one of its own, both with an end.

A sweep measures in worker processes of its own and opens no device here, so nothing that a kernel does can hurt the
session; and since this process has imported everything, a part costs no more than forking a worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from harness.cli import internal_error
from harness.cli.sweep import run_sweep
from harness.machine.processes import interruptible
from harness.store.errors import UsageError

Runner = Callable[[Sequence[str], float], tuple[int, str]]
CUT = 124  # exit code of what ran too long, as timeout(1) has it

# The kernel sends SIGTERM to what it becomes when the session has ended, also one that was killed: it leaves no command
# behind. 1 is PR_SET_PDEATHSIG (linux/prctl.h), which outlives exec; a preexec_fn would fork beside threads.
_ENDS_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
)


def run_words(words: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Runs `python -m harness` with these words in this process; exit code, `CUT` when it ran too long, and no output.

    What ends it is the interrupt that ends any sweep: finished rounds are stored.

    Raises:
        KeyboardInterrupt: this process got a signal to end.
    """
    over, lock, cut = False, threading.Lock(), False

    def end() -> None:
        nonlocal cut
        with lock:
            if not over:
                cut = True
                os.kill(os.getpid(), signal.SIGTERM)

    code = CUT
    deadline = threading.Timer(max(timeout_s, 0.0), end)
    deadline.daemon = True
    with interruptible() as interrupts:
        interrupts.heard = False
        try:
            try:
                deadline.start()
                code = run_sweep(words)
            except UsageError as error:
                sys.stderr.write(f"error: {error}\n")
                code = 2
            except Exception as error:  # noqa: BLE001 - the other parts of the session go on
                code = internal_error.report(error)
            finally:
                with lock:
                    over = True
                deadline.cancel()
        except KeyboardInterrupt:
            if not cut:
                raise
        if interrupts.heard and not cut:  # the sweep has recorded how it ended; so must the session
            raise KeyboardInterrupt
    return (CUT if cut else code), ""


def run_command(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Runs a command, shows its output as it comes, and returns exit code and output; `CUT` when it ran too long.

    It ends when this process gets a signal to end or is killed; KeyboardInterrupt is raised again after that.
    """
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", _ENDS_WITH_PARENT, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        # The timer works while the command is silent too; one that hangs in the driver hears no SIGTERM.
        deadline = threading.Timer(timeout_s, process.terminate)
        last = threading.Timer(timeout_s + 20, process.kill)
        deadline.start()
        last.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                lines.append(line)
            code = process.wait()
            too_long = not deadline.is_alive()
        except KeyboardInterrupt:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
        finally:
            deadline.cancel()
            last.cancel()
    return (CUT if too_long else code), "".join(lines)
