"""A suite whose cases do what ends or confuses a process; importable by workers, as a suite must be."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toy import ToySuite, nothing

from harness.case import Case
from harness.workload import Numerics, Workload

kept: list[bytes] = []


def segfault(case: Case) -> None:
    ctypes.string_at(0)


def exits(case: Case) -> None:
    print("last words", file=sys.stderr)
    sys.exit(3)


def hang(case: Case) -> None:
    Path("hanging").touch()
    time.sleep(600)


def hog(case: Case) -> None:
    """Asks for memory piece by piece, and touches it, until there is no more."""
    pieces = []
    while True:
        pieces.append(bytearray(2**26))


def babble(case: Case) -> None:
    """More than a pipe holds, on both streams, none of it text that a terminal should see."""
    for descriptor in (1, 2):
        os.write(descriptor, b"\x80\x04\x95\xff\x1b[2J\n" * 20_000)
    print("\x1b[31mred", flush=True)


def close_everything(case: Case) -> None:
    os.closerange(3, 1000)


def leak(case: Case) -> None:
    kept.append(b"x" * 2**27)


def die_once(case: Case) -> None:
    been = Path(f"been-{case.case_id}")
    if not been.exists():
        been.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def die(case: Case) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ACTS: Mapping[str, Callable[[Case], None]] = {
    act.__name__: act for act in (segfault, exits, hang, hog, babble, close_everything, leak, die_once, die)
}


@dataclass
class Unruly(ToySuite):
    """Arm `other` of case n does `acts[n]` while it is built."""

    acts: Mapping[int, str] = field(default_factory=dict)

    def build(self, case: Case, arm: str, device: str) -> Workload:
        act = self.acts.get(case.integer("n"))
        if act is not None and arm == "other":
            ACTS[act](case)
        return Workload(
            run=nothing, check=lambda: Numerics({"sqnr_db": 28.5}), resolved={"process": os.getpid()}
        )
