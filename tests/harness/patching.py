"""A suite whose arm `peer` replaces `torch.nn.functional.linear`, as a library may when it is imported; importable by workers."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from toy import ToySuite

from harness.timing.workload import ArmInfo, Numerics, Workload

if TYPE_CHECKING:
    from harness.store.case import Case

LINEAR = functional.linear
replaced = [0]  # calls of the function that took its place


def detour(*args: torch.Tensor) -> torch.Tensor:
    replaced[0] += 1
    return LINEAR(*args)


@dataclass
class Patching(ToySuite):
    """Each arm counts its calls of `linear`, and how many of them met the peer's; `fate` befalls the peer when it is timed."""

    fate: str = ""  # "die", "hang" or "raise"
    patches: bool = True
    is_resident: bool = False
    ARMS: Mapping[str, ArmInfo] = field(
        default_factory=lambda: {
            "base": ArmInfo("the baseline"),
            "peer": ArmInfo("replaces a function of torch", baseline="base"),
            "last": ArmInfo("comes after it", baseline="base"),
        }
    )

    def build(self, case: Case, arm: str, device: str) -> Workload:
        if arm == "peer" and self.patches:
            functional.linear = detour
        x = torch.ones(2, 2)
        seen = {
            "calls": 0,
            "replaced": 0,
            "entered": 0,
            "process": os.getpid(),
            "frozen": gc.get_freeze_count(),
        }

        def run() -> None:
            before = replaced[0]
            functional.linear(x, x)
            seen["calls"] += 1
            seen["replaced"] += replaced[0] - before
            if arm == "peer" and self.fate and seen["calls"] > 1:
                self.befall()

        class Held:
            def __enter__(self) -> None:
                seen["entered"] += 1

            def __exit__(self, *_: object) -> None:
                pass

        return Workload(
            run=run,
            check=lambda: Numerics({"sqnr_db": 28.5}),
            resolved={"seen": seen},
            resident=Held if self.is_resident else None,
        )

    def befall(self) -> None:
        if self.fate == "raise":
            raise ValueError("a kernel refused")
        if self.fate == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        Path(f"hangs-{os.getpid()}").touch()
        while (
            True
        ):  # as a library that waits in C and keeps the interpreter's lock: no thread of this process runs
            ctypes.PyDLL(None).sleep(5)
            time.sleep(0)
