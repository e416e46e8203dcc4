"""Modules of a suite do such things at their import; importable by workers. Which of them is chosen by a variable."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

POOL = ThreadPoolExecutor(1)
if os.environ.get("AT_IMPORT") == "operation":
    TABLE = torch.ones(512, 512)  # more than 32,768 elements: on several threads
if os.environ.get("AT_IMPORT") == "pool":
    POOL.submit(int).result()


def computed(tell: object) -> list[float]:
    """What needs the threads that the import may have started."""
    return [torch.ones(512, 512).sum().item(), POOL.submit(sum, [1, 2]).result()]
