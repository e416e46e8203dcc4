"""A suite whose arm `other` changes its process while it is built, checked or timed; importable by workers."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch import library
from torch.nn import functional
from torch.nn.modules import module
from torch.nn.modules.module import register_module_forward_hook
from toy import ToySuite

from harness.store.case import Case
from harness.timing.workload import ArmInfo, Numerics, Workload

NOWHERE = Path(os.devnull).open("w")  # noqa: SIM115 -- it stays open


def lower_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def enter(context: Any) -> None:
    """Enters what nobody leaves."""
    KEPT.append(context)
    context.__enter__()


def override_an_operator() -> None:
    KEPT.append(library.Library("aten", "IMPL"))
    KEPT[-1].impl("frac", lambda x: x + 1, "CPU")


def start_a_thread() -> None:
    """Computes for ever, as a library's watcher may."""
    threading.Thread(target=spin, daemon=True).start()


def spin() -> None:
    while True:
        time.sleep(1)


KEPT: list[Any] = []
LINEAR = functional.linear
# What sets a global, and what reads it: of torch, its compiler and its generators, of Python and of the operating system
LEAKS: Mapping[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: str(torch.ones(1).dtype)),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "grad": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "torch_rng": (lambda: torch.manual_seed(7), lambda: torch.get_rng_state().tolist()),
    "dynamo": (
        lambda: setattr(torch._dynamo.config, "suppress_errors", True),
        lambda: torch._dynamo.config.suppress_errors,
    ),
    "folder": (lambda: os.chdir("/"), lambda: str(Path.cwd())),
    "variable": (lambda: os.environ.update(OF_AN_ARM="1"), lambda: os.environ.get("OF_AN_ARM")),
    "limit": (lower_limit, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)),
    "output": (
        lambda: setattr(sys, "stdout", NOWHERE),
        lambda: getattr(sys.stdout, "name", "") == os.devnull,
    ),
}
# Likewise, what no process can put back; some as a library does it that is imported
FOR_GOOD: Mapping[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "inference": (lambda: enter(torch.inference_mode()), torch.is_inference_mode_enabled),
    "function": (
        lambda: setattr(functional, "linear", lambda *given: LINEAR(*given)),
        lambda: functional.linear is LINEAR,
    ),
    "operator": (override_an_operator, lambda: torch.frac(torch.ones(1)).item()),
    "hook": (
        lambda: register_module_forward_hook(lambda *_: None),
        lambda: len(module._global_forward_hooks),
    ),
    "thread": (start_a_thread, threading.active_count),
}


@dataclass
class Leaky(ToySuite):
    """Case n: `other` sets the n-th leak in the stage `when`; each arm notes what it reads, by stage."""

    when: str = "build"
    ARMS: Mapping[str, ArmInfo] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.ARMS = {
            "base": ArmInfo("the baseline"),
            "other": ArmInfo("changes its process", baseline="base"),
            "last": ArmInfo("comes after it", baseline="base"),
        }

    def build(self, case: Case, arm: str, device: str) -> Workload:
        leak, read = [*LEAKS.values(), *FOR_GOOD.values()][case.integer("n") - 1]
        seen: dict[str, list[object]] = {"build": [read()], "check": [], "timed": []}

        def at(stage: str) -> None:
            if stage != "build" and read() not in seen[stage]:
                seen[stage].append(read())
            if arm == "other" and stage == self.when:
                leak()

        def check() -> Numerics:
            at("check")
            return Numerics({"sqnr_db": 28.5})

        at("build")
        return Workload(run=lambda: at("timed"), check=check, resolved={"seen": seen, "process": os.getpid()})
