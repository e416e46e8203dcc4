"""What an arm may change of the compiler, of Python and of its process, for `leaky.LEAKS`: what sets it, reads it, its names."""

from __future__ import annotations

import locale
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config

NOWHERE = Path(os.devnull).open("w")  # noqa: SIM115 -- it stays open


def lower_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def append_to_config() -> None:
    """Changes a list in place."""
    torch._inductor.config.fx_passes_numeric_check["of_an_arm"] = True


OF_THE_PROCESS: Mapping[str, tuple[Callable[[], object], Callable[[], object], set[str]]] = {
    "dynamo": (
        lambda: setattr(torch._dynamo.config, "suppress_errors", True),
        lambda: torch._dynamo.config.suppress_errors,
        {"dynamo_config"},
    ),
    "recompile limit": (
        lambda: setattr(torch.compiler.config, "recompile_limit", 1),
        lambda: torch._dynamo.config.recompile_limit,
        {"dynamo_config"},
    ),
    "inductor": (
        lambda: setattr(torch._inductor.config, "max_autotune", True),
        lambda: torch._inductor.config.max_autotune,
        {"inductor_config"},
    ),
    "nested": (
        lambda: setattr(torch._inductor.config.triton, "cudagraphs", True),
        lambda: torch._inductor.config.triton.cudagraphs,
        {"inductor_config"},
    ),
    "in place": (
        append_to_config,
        lambda: "of_an_arm" in torch._inductor.config.fx_passes_numeric_check,
        {"inductor_config"},
    ),
    "budget": (
        lambda: setattr(torch._functorch.config, "activation_memory_budget", 0.5),
        lambda: torch._functorch.config.activation_memory_budget,
        {"functorch_config"},
    ),
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
    "fill": (
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        {"fill_uninitialized_memory"},
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
    "timer": (
        lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 3600.0, 3600.0),
        lambda: signal.getitimer(signal.ITIMER_VIRTUAL)[1],
        {"interval_timers"},
    ),
    "warning": (
        lambda: warnings.filterwarnings("error", message="of an arm"),
        lambda: any(f[1] and "of an arm" in f[1].pattern for f in warnings.filters),
        {"warnings_as_errors"},
    ),
    "output": (
        lambda: setattr(sys, "stdout", NOWHERE),
        lambda: getattr(sys.stdout, "name", "") == os.devnull,
        {"standard_streams"},
    ),
    "division": (lambda: np.seterr(divide="raise"), lambda: np.geterr()["divide"], {"numpy_errors"}),
    "recursion": (lambda: sys.setrecursionlimit(900), sys.getrecursionlimit, {"recursion_limit"}),
    "switches": (lambda: sys.setswitchinterval(0.1), sys.getswitchinterval, {"switch_interval"}),
    "profile": (
        lambda: sys.setprofile(lambda *_: None),
        lambda: sys.getprofile() is None,
        {"tracing"},
    ),
    "profile of threads": (
        lambda: threading.setprofile(lambda *_: None),
        lambda: threading.getprofile() is None,
        {"tracing"},
    ),
    "locale": (
        lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8"),
        lambda: locale.setlocale(locale.LC_NUMERIC),
        {"locale"},
    ),
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
