"""For all tests: those marked `gpu` run on a device only, and say why elsewhere."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest


def _name_the_cpu() -> None:
    """Name the CPU for Inductor where `-march=native` leaves the tuning generic: a g++ that is older than the CPU.

    With AVX-512, g++ 12.2 then made NaN of gradients of rowwise layers (Xeon model 207, torch 2.13); by the name that it
    resolves `native` to, or without -ftree-vectorize, it does not.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or "TORCHINDUCTOR_CPP_MARCH" in os.environ:
        return
    asked = [compiler, "-march=native", "-Q", "--help=target"]
    target = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    named = dict(re.findall(r"^ *-(march|mtune)=\s+(\S+)", target, re.MULTILINE))
    if named.get("mtune") == "generic" and not named.get("march", "x86-64").startswith("x86-64"):
        os.environ["TORCHINDUCTOR_CPP_MARCH"] = named["march"]


gc.disable()  # until all is collected: looking through what is imported takes a fifth of the collection
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)
_name_the_cpu()  # Inductor reads it when it is imported

import torch  # noqa: E402

SLOW_IMPORTS = ("harness.suites.parallel", "harness.suites.train", "harness.suites.divergence", "pytest")


def pytest_xdist_auto_num_workers() -> int:
    """Processes of `-n logical`: half as many again as cores, for a third of the time a test waits for other processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + (cores + 1) // 2


def pytest_collection_finish() -> None:
    """What was imported and collected is never garbage: half a million objects that each full collection looked through."""
    gc.enable()
    gc.collect()
    gc.freeze()
    if served := sys.modules.get("harness.engine.served"):
        # Whichever test starts the server first: what its processes import, else each of them for 2 to 3 s
        served.PRELOADED += [name for name in SLOW_IMPORTS if name not in served.PRELOADED]


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """The same random numbers in a test whatever ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture
def signals_are_heard() -> Iterator[None]:
    """Puts callbacks of the garbage collector aside (hypothesis has one): a signal that falls into one raises for nobody.

    And an interrupt is one again, where a shell's "&" has handed it down as ignored.
    """
    held, handler = gc.callbacks[:], signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = held
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(autouse=True)
def _no_step_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the gates of tests out of the summary of the CI job that runs the tests."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device; none is visible"))
