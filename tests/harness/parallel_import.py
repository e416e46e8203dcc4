"""Modules of a suite do such things at their import; importable by workers. Which of them is chosen by a variable."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from toy import ToySuite

from harness.timing.workload import Numerics, Workload

if TYPE_CHECKING:
    from harness.store.case import Case

POOL = ThreadPoolExecutor(1)
if os.environ.get("AT_IMPORT") == "operation":
    TABLE = torch.ones(512, 512)  # more than 32,768 elements: on several threads
if os.environ.get("AT_IMPORT") == "pool":
    POOL.submit(int).result()


def computed(tell: object) -> list[float]:
    """What needs the threads that the import may have started."""
    return [torch.ones(512, 512).sum().item(), POOL.submit(sum, [1, 2]).result()]


# A suite of another package is a module
TOY = ToySuite()
AXES, ARMS, points, unsupported, work = TOY.AXES, TOY.ARMS, TOY.points, TOY.unsupported, TOY.work


def build(case: Case, arm: str, device: str) -> Workload:
    """An arm that makes an operation on several threads."""
    return Workload(run=lambda: computed(None), check=lambda: Numerics({"sqnr_db": 28.5}))
