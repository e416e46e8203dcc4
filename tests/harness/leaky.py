"""A suite whose arm `other` changes its process while it is built, checked or timed; importable by workers."""

from __future__ import annotations

import gc
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
from typing import Any

import numpy as np
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


def append_to_config() -> None:
    """Changes a list in place."""
    torch._inductor.config.fx_passes_numeric_check["of_an_arm"] = True


Leak = tuple[Callable[[], object], Callable[[], object], set[str]]


def attribute(owner: Any, name: str, value: object, told: str) -> Leak:
    """A setting that is an attribute."""
    return lambda: setattr(owner, name, value), lambda: getattr(owner, name), {told}


OF_THE_PROCESS: Mapping[str, Leak] = {
    "dynamo": attribute(torch._dynamo.config, "suppress_errors", True, "dynamo_config"),
    "recompile limit": (
        lambda: setattr(torch.compiler.config, "recompile_limit", 1),
        lambda: torch._dynamo.config.recompile_limit,
        {"dynamo_config"},
    ),
    "inductor": attribute(torch._inductor.config, "max_autotune", True, "inductor_config"),
    "nested": attribute(torch._inductor.config.triton, "cudagraphs", True, "inductor_config"),
    "in place": (
        append_to_config,
        lambda: "of_an_arm" in torch._inductor.config.fx_passes_numeric_check,
        {"inductor_config"},
    ),
    "budget": attribute(torch._functorch.config, "activation_memory_budget", 0.5, "functorch_config"),
    "stance": (
        lambda: torch.compiler.set_stance("force_eager"),
        lambda: torch._dynamo.eval_frame._stance.stance,
        {"compiler_stance"},
    ),
    "backward": (
        lambda: torch._C._set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
        {"autograd_threads"},
    ),
    "fill": attribute(
        torch.utils.deterministic, "fill_uninitialized_memory", False, "fill_uninitialized_memory"
    ),
    "swap": (
        lambda: torch.__future__.set_swap_module_params_on_conversion(True),
        torch.__future__.get_swap_module_params_on_conversion,
        {"swap_module_params_on_conversion"},
    ),
    "limit": (lower_limit, lambda: resource.getrlimit(resource.RLIMIT_NOFILE), {"limit_NOFILE"}),
    "handler": (
        lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
        lambda: str(signal.getsignal(signal.SIGALRM)),
        {"handler_SIGALRM"},
    ),
    "output": (
        lambda: setattr(sys, "stdout", NOWHERE),
        lambda: getattr(sys.stdout, "name", "") == os.devnull,
        {"standard_streams"},
    ),
    "recursion": (lambda: sys.setrecursionlimit(900), sys.getrecursionlimit, {"recursion_limit"}),
}
if len(os.sched_getaffinity(0)) > 1:
    OF_THE_PROCESS = {
        **OF_THE_PROCESS,
        "affinity": (
            lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
            lambda: sorted(os.sched_getaffinity(0)),
            {"cpu_affinity"},
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
# What sets a global, what reads it, and the names that a row has it by; no name for an RNG.
LEAKS: Mapping[str, Leak] = {
    "dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: str(torch.ones(1).dtype),
        {"default_dtype"},
    ),
    "device": (
        lambda: torch.set_default_device("meta"),
        lambda: torch.ones(1).device.type,
        {"default_device"},
    ),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads, {"threads"}),
    "tf32": attribute(torch.backends.cuda.matmul, "allow_tf32", True, "fp32_precision_cuda_matmul"),
    "precision": (
        lambda: torch.set_float32_matmul_precision("high"),
        torch.get_float32_matmul_precision,
        {"fp32_precision_cuda_matmul"},
    ),
    "grad": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled, {"grad_mode"}),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.are_deterministic_algorithms_enabled,
        {"deterministic"},
    ),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
        {"autocast_cpu"},
    ),
    "benchmark": attribute(torch.backends.cudnn, "benchmark", True, "cudnn_benchmark"),
    "onednn": attribute(torch.backends.mkldnn, "enabled", False, "onednn"),
    "denormals": (
        lambda: torch.set_flush_denormal(True),
        lambda: torch.tensor(1e-40).mul(1).item(),
        {"flush_denormal"},
    ),
    "folder": (lambda: os.chdir("/"), lambda: str(Path.cwd()), {"folder"}),
    "variable": (
        lambda: os.environ.update(OF_AN_ARM="1"),
        lambda: os.environ.get("OF_AN_ARM"),
        {"environ"},
    ),
    "python_rng": (lambda: random.seed(7), lambda: hash(random.getstate()), set()),
    "numpy_rng": (lambda: np.random.seed(7), lambda: np.random.get_state()[1].tolist(), set()),  # noqa: NPY002
    "torch_rng": (lambda: torch.manual_seed(7), lambda: torch.get_rng_state().tolist(), set()),
    "collector": (lambda: gc.set_threshold(7), gc.get_threshold, {"gc"}),
    **OF_THE_PROCESS,
}
# Likewise, what no process can put back; some as a library does it that is imported
FOR_GOOD: Mapping[str, Leak] = {
    "inference": (enter_inference_mode, torch.is_inference_mode_enabled, {"inference_mode"}),
    "mode": (enter_a_mode, torch._C._len_torch_function_stack, {"function_modes"}),
    "function": (
        lambda: setattr(functional, "linear", lambda *given: LINEAR(*given)),
        lambda: functional.linear is LINEAR,
        {"functions"},
    ),
    "method": (
        lambda: setattr(torch.nn.Module, "__call__", lambda self, *given: self.forward(*given)),
        lambda: torch.nn.Module.__call__.__name__,
        {"functions"},
    ),
    "class": (
        lambda: setattr(torch.nn, "Linear", type("Linear", (torch.nn.Module,), {})),
        lambda: torch.nn.Linear.__module__,
        {"functions"},
    ),
    "operator": (override_an_operator, lambda: torch.frac(torch.ones(1)).item(), {"operators"}),
    "shapes of an operator": (
        lambda: override("Meta", lambda a, b: a.new_empty(7)),
        lambda: (torch.ones(2, 2, device="meta") @ torch.ones(2, 2, device="meta")).shape,
        {"operators"},
    ),
    "batches of an operator": (
        lambda: override("FuncTorchBatched", lambda a, b: torch.ones(3)),
        lambda: _shape_of_vmap(),
        {"operators"},
    ),
    "override": (
        lambda: override("CPU", lambda a, b: a.new_zeros(2, 2)),
        lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).sum().item(),
        {"operators"},
    ),
    "override of an override": (
        override_once_more,
        lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).sum().item(),
        {"operators"},
    ),
    "hook": (
        lambda: register_module_forward_hook(lambda *_: None),
        lambda: len(module._global_forward_hooks),
        {"module_hooks"},
    ),
    "thread": (start_a_thread, threading.active_count, {"python_threads"}),
    "saved tensors": (
        lambda: enter(torch.autograd.graph.saved_tensors_hooks(torch.neg, torch.neg)),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        {"saved_tensors_hooks"},
    ),
    "profiler": (
        lambda: enter(torch.autograd.profiler.profile()),
        torch._C._autograd._profiler_enabled,
        {"profiler"},
    ),
    "relu": (
        lambda: override("CPU", lambda x: x + 7, "relu"),
        lambda: torch.relu(torch.ones(1)).item(),
        {"operators"},
    ),
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
        leak, read, _ = [*LEAKS.values(), *FOR_GOOD.values()][case.integer("n") - 1]
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
