"""Tasks: what a sweep is made of: a case whose arms are timed, or one run of a trial suite.

A run depends on nothing but its case and arm, so on a CPU its result is the same bit for bit wherever and beside
whatever it runs; on a GPU as far as its kernels are deterministic (`harness.training.loop`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from harness.engine.plan import PlannedCase
    from harness.store.case import Case


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do.

    Attributes:
        planned: the case.
        arm: of a trial suite, the arm whose run this is; "" where the case is timed, all arms at once.
        workspace: where a run may keep checkpoints; None where the case is timed.
        sustained: time the case under sustained load as well.
    """

    planned: PlannedCase
    arm: str = ""
    workspace: Path | None = None
    sustained: bool = False

    @property
    def case(self) -> Case:
        """The case, without what was planned for it."""
        return self.planned.case

    def __str__(self) -> str:
        return f"{self.case} {self.arm}".rstrip()
