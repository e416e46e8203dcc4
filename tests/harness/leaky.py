"""A suite whose arm `other` changes its process while it is built, checked or timed; importable by workers."""

from __future__ import annotations

import gc
import importlib
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import library
from torch.nn import functional
from torch.nn.modules import module
from torch.nn.modules.module import register_module_forward_hook
from toy import ToySuite

from harness.timing.workload import ArmInfo, Numerics, Workload

if TYPE_CHECKING:
    from harness.store.case import Case

NOWHERE = Path(os.devnull).open("w")  # noqa: SIM115 -- it stays open


def of(module: str) -> Any:
    """A module of the compiler's: seconds to import, for the cases that need it."""
    return importlib.import_module(module)


def lower_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def umask() -> int:
    os.umask(now := os.umask(0o077))
    return now


def append_to_config() -> None:
    """Changes a list in place."""
    of("torch._inductor.config").fx_passes_numeric_check["of_an_arm"] = True


OF_THE_PROCESS: Mapping[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "dynamo": (
        lambda: setattr(of("torch._dynamo.config"), "suppress_errors", True),
        lambda: of("torch._dynamo.config").suppress_errors,
    ),
    "recompile limit": (
        lambda: setattr(torch.compiler.config, "recompile_limit", 1),
        lambda: of("torch._dynamo.config").recompile_limit,
    ),
    "inductor": (
        lambda: setattr(of("torch._inductor.config"), "max_autotune", True),
        lambda: of("torch._inductor.config").max_autotune,
    ),
    "nested": (
        lambda: setattr(of("torch._inductor.config").triton, "cudagraphs", True),
        lambda: of("torch._inductor.config").triton.cudagraphs,
    ),
    "in place": (
        append_to_config,
        lambda: "of_an_arm" in of("torch._inductor.config").fx_passes_numeric_check,
    ),
    "budget": (
        lambda: setattr(of("torch._functorch.config"), "activation_memory_budget", 0.5),
        lambda: of("torch._functorch.config").activation_memory_budget,
    ),
    "stance": (
        lambda: torch.compiler.set_stance("force_eager"),
        lambda: of("torch._dynamo.eval_frame")._stance.stance,
    ),
    "backward": (lambda: torch._C._set_multithreading_enabled(False), torch._C._is_multithreading_enabled),
    "fill": (
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
    ),
    "swap": (
        lambda: torch.__future__.set_swap_module_params_on_conversion(True),
        torch.__future__.get_swap_module_params_on_conversion,
    ),
    "limit": (lower_limit, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)),
    "handler": (
        lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
        lambda: str(signal.getsignal(signal.SIGALRM)),
    ),
    "output": (
        lambda: setattr(sys, "stdout", NOWHERE),
        lambda: getattr(sys.stdout, "name", "") == os.devnull,
    ),
    "recursion": (lambda: sys.setrecursionlimit(900), sys.getrecursionlimit),
}
if len(os.sched_getaffinity(0)) > 1:
    OF_THE_PROCESS = {
        **OF_THE_PROCESS,
        "affinity": (
            lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
            lambda: sorted(os.sched_getaffinity(0)),
        ),
    }


def enter(context: Any) -> None:
    """Enters what nobody leaves."""
    KEPT.append(context)
    context.__enter__()


def enter_inference_mode() -> None:
    enter(torch.inference_mode())


def enter_a_mode() -> None:
    enter(torch.overrides.BaseTorchFunctionMode())


def override_an_operator() -> None:
    KEPT.append(library.Library("aten", "IMPL"))
    KEPT[-1].impl("frac", lambda x: x + 1, "CPU")


def override(key: str, kernel: Callable[..., object], operator: str = "mm") -> None:
    """A kernel of an operator for a dispatch key."""
    KEPT.append(library.Library("aten", "IMPL"))
    KEPT[-1].impl(operator, kernel, key)


def override_once_more() -> None:
    """Another in its place, from another line: a kernel is recognised by where it was registered."""
    KEPT.append(library.Library("aten", "IMPL"))
    KEPT[-1].impl("mm", lambda a, b: a.new_full((2, 2), 9.0), "CPU", allow_override=True)


def _shape_of_vmap() -> object:
    try:
        return torch.vmap(torch.mm)(torch.ones(2, 2, 2), torch.ones(2, 2, 2)).shape
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return type(error)


def start_a_thread() -> None:
    """Computes for ever, as a library's watcher may."""
    threading.Thread(target=spin, daemon=True).start()


def spin() -> None:
    while True:
        time.sleep(1)


KEPT: list[Any] = []
LINEAR = functional.linear
# What sets a global, and what reads it
LEAKS: Mapping[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: str(torch.ones(1).dtype)),
    "device": (lambda: torch.set_default_device("meta"), lambda: torch.ones(1).device.type),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "tf32": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: torch.backends.cuda.matmul.allow_tf32,
    ),
    "precision": (lambda: torch.set_float32_matmul_precision("high"), torch.get_float32_matmul_precision),
    "grad": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
    "benchmark": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "onednn": (
        lambda: setattr(torch.backends.mkldnn, "enabled", False),
        lambda: torch.backends.mkldnn.enabled,
    ),
    "denormals": (lambda: torch.set_flush_denormal(True), lambda: torch.tensor(1e-40).mul(1).item()),
    "folder": (lambda: os.chdir("/"), lambda: str(Path.cwd())),
    "umask": (lambda: os.umask(0o137), umask),
    "variable": (lambda: os.environ.update(OF_AN_ARM="1"), lambda: os.environ.get("OF_AN_ARM")),
    "python_rng": (lambda: random.seed(7), lambda: hash(random.getstate())),
    "numpy_rng": (lambda: np.random.seed(7), lambda: np.random.get_state()[1].tolist()),  # noqa: NPY002
    "torch_rng": (lambda: torch.manual_seed(7), lambda: torch.get_rng_state().tolist()),
    "collector": (lambda: gc.set_threshold(7), gc.get_threshold),
    **OF_THE_PROCESS,
}
# Likewise, what no process can put back; some as a library does it that is imported
FOR_GOOD: Mapping[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "inference": (enter_inference_mode, torch.is_inference_mode_enabled),
    "mode": (enter_a_mode, torch._C._len_torch_function_stack),
    "function": (
        lambda: setattr(functional, "linear", lambda *given: LINEAR(*given)),
        lambda: functional.linear is LINEAR,
    ),
    "method": (
        lambda: setattr(torch.nn.Module, "__call__", lambda self, *given: self.forward(*given)),
        lambda: torch.nn.Module.__call__.__name__,
    ),
    "class": (
        lambda: setattr(torch.nn, "Linear", type("Linear", (torch.nn.Module,), {})),
        lambda: torch.nn.Linear.__module__,
    ),
    "operator": (override_an_operator, lambda: torch.frac(torch.ones(1)).item()),
    "shapes of an operator": (
        lambda: override("Meta", lambda a, b: a.new_empty(7)),
        lambda: (torch.ones(2, 2, device="meta") @ torch.ones(2, 2, device="meta")).shape,
    ),
    "batches of an operator": (
        lambda: override("FuncTorchBatched", lambda a, b: torch.ones(3)),
        lambda: _shape_of_vmap(),
    ),
    "override": (
        lambda: override("CPU", lambda a, b: a.new_zeros(2, 2)),
        lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).sum().item(),
    ),
    "override of an override": (
        override_once_more,
        lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).sum().item(),
    ),
    "hook": (
        lambda: register_module_forward_hook(lambda *_: None),
        lambda: len(module._global_forward_hooks),
    ),
    "thread": (start_a_thread, threading.active_count),
    "saved tensors": (
        lambda: enter(torch.autograd.graph.saved_tensors_hooks(torch.neg, torch.neg)),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    ),
    "profiler": (lambda: enter(torch.autograd.profiler.profile()), torch._C._autograd._profiler_enabled),
    "relu": (lambda: override("CPU", lambda x: x + 7, "relu"), lambda: torch.relu(torch.ones(1)).item()),
}


@dataclass
class Leaky(ToySuite):
    """Case n: `other` sets the n-th leak in the stage `when`; each arm notes what it reads, by stage.

    With `pairs` two cases have the same leaks, several at once: the second sets nothing.
    """

    when: str = "build"
    pairs: tuple[tuple[str, ...], ...] = ()
    ARMS: Mapping[str, ArmInfo] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.ARMS = {
            "base": ArmInfo("the baseline"),
            "other": ArmInfo("changes its process", baseline="base"),
            "last": ArmInfo("comes after it", baseline="base"),
        }

    def build(self, case: Case, arm: str, device: str) -> Workload:
        every, n = LEAKS | FOR_GOOD, case.integer("n") - 1
        leaks = [every[name] for name in (self.pairs[n // 2] if self.pairs else [[*every][n]])]
        sets = arm == "other" and not (self.pairs and n % 2)

        def read() -> list[object]:
            return [one() for _, one in leaks]

        seen: dict[str, list[object]] = {"build": [read()], "check": [], "timed": []}

        def at(stage: str) -> None:
            if stage != "build" and read() not in seen[stage]:
                seen[stage].append(read())
            for leak, _ in leaks if sets and stage == self.when else ():
                leak()

        def check() -> Numerics:
            at("check")
            return Numerics({"sqnr_db": 28.5})

        at("build")
        return Workload(run=lambda: at("timed"), check=check, resolved={"seen": seen, "process": os.getpid()})
