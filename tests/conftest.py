"""For all tests: those marked `gpu` run on a device only, and say why elsewhere."""

from __future__ import annotations

import gc
import os

import pytest
import torch


def pytest_xdist_auto_num_workers() -> int:
    """Processes of `-n logical`: half as many again as cores, for a third of the time a test waits for other processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + (cores + 1) // 2


def pytest_collection_finish() -> None:
    """What was imported and collected is never garbage: half a million objects that each full collection looked through."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """The same random numbers in a test whatever ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_step_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the gates of tests out of the summary of the CI job that runs the tests."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device; none is visible"))
