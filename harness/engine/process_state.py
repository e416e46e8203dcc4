"""State of a process that an arm may set, and that its own later cases would find: read as the process begins and after each case.

Not in it is what each case begins anew (random generators), and what compilers and profilers set for themselves once they are
used, or an arm as what it is: their options, caches and variables. In a new process they would be set again, case after case.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.backends import cuda, cudnn, mkldnn

if TYPE_CHECKING:
    from collections.abc import Callable

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_REDUCED = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
# Of compilers, profilers, and of runs that are to be repeatable (`harness.training.loop`, and inductor as it is imported)
_OWN = re.compile(r"_?TORCHINDUCTOR_|TRITON_|TORCH_WARM_POOL|KMP_|KINETO_|.*CUPTI|CUBLAS_WORKSPACE_CONFIG")


def _umask() -> int:
    os.umask(now := os.umask(0o077))
    return now


# What decides how fast something is computed, in what precision, from which files, or whether at all
_READ: dict[str, Callable[[], Any]] = {
    "threads": torch.get_num_threads,
    "affinity": lambda: os.sched_getaffinity(0),
    "dtype": torch.get_default_dtype,
    "device": torch.get_default_device,
    "grad": torch.is_grad_enabled,
    "inference": torch.is_inference_mode_enabled,
    "autocast": lambda: [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
    "precision": torch.get_float32_matmul_precision,
    "reduction": lambda: [getattr(cuda.matmul, name) for name in _REDUCED],
    "attention": lambda: [getattr(cuda, name)() for name in _ATTENTION],
    "convolution": lambda: (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
    "onednn": lambda: mkldnn.enabled,
    "deterministic": torch.get_deterministic_debug_mode,
    "denormals": lambda: torch.tensor(1e-40, dtype=torch.float32, device="cpu").mul(1).item(),
    "collector": lambda: (gc.isenabled(), gc.get_threshold()),
    "recursion": sys.getrecursionlimit,
    "folder": Path.cwd,
    "umask": _umask,
    "limits": lambda: list(map(resource.getrlimit, _LIMITS)),
}
_first: dict[str, object] = {}


def _now() -> dict[str, object]:
    found: dict[str, object] = {f"variable {k}": v for k, v in os.environ.items() if not _OWN.match(k)}
    for code, read in _READ.items():
        try:
            found[code] = read()
        except Exception as error:  # noqa: BLE001 - a folder that is gone, flags that contradict one another: a state too
            found[code] = type(error)
    return found


def begin() -> None:
    """From now on `changed` compares with the state that this process has now."""
    _first.clear()
    _first.update(_now())


def changed() -> list[str]:
    """What differs from the state at the beginning: codes."""
    now = _now()
    return sorted(code for code in _first.keys() | now.keys() if _first.get(code) != now.get(code))
