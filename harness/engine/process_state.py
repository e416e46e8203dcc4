"""Process state: what an arm changes for everybody in its process, kept to that arm.

The default dtype, threads, TF32, grad mode, RNGs, the working folder and the like are global. What one arm sets would change
all arms after it, baselines included. Each arm therefore has a state of its own, entered around its build, its check and
each of its timed blocks; between them the process is as it was before. `OwnStates.changed` names what an arm has set.

Left out on purpose: what changes no number of a later arm (umask, print options of torch), and what an import leaves for all
who use the same library, since it is not imported again for the next arm (`sys.path`, warning filters, the handler of SIGCHLD).
"""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch

from harness.engine import compiler_state, replaced

# Variables that torch's compiler sets where they are not set, when it compiles for the first time
_BY_COMPILER = {
    "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TORCH_WARM_POOL", "TRITON_CACHE_DIR",
    "TRITON_LIBDEVICE_PATH", "TRITON_PTXAS_PATH",
}  # fmt: skip

_RECURSION = sys.getrecursionlimit()
_raised = [_RECURSION]  # the highest that was seen

Get = Callable[[], Any]
Set = Callable[[Any], object]


class Setting(NamedTuple):
    """One global.

    Attributes:
        get: reads it.
        set: sets what was read; None where Python cannot put it back.
        travels: another process can be given it.
    """

    get: Get
    set: Set | None
    travels: bool = True


class Kept(Enum):
    """The value of a setting that another process keeps as it has it."""

    AS_IT_IS = "as it is"


class Snapshot(NamedTuple):
    """The globals of this process, in the order of `settings()`; the RNGs apart, which are there to be changed."""

    values: tuple[Any, ...]
    environ: dict[Any, Any]
    rng: tuple[Any, ...]


class UnrestorableError(RuntimeError):
    """An earlier arm has left this process in a state that cannot be put back."""


@cache
def settings() -> Mapping[str, Setting]:
    """Every global that is looked after, by the name that rows have it by. Those that this torch lacks are left out."""
    backends, c, future = torch.backends, torch._C, torch.__future__
    found: dict[str, Setting] = {
        # Before the modes: it is one of them.
        "default_device": Setting(_default_device, torch.set_default_device),
        "default_dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
        "threads": Setting(torch.get_num_threads, torch.set_num_threads),
        "grad_mode": Setting(torch.is_grad_enabled, c._set_grad_enabled),
        "inference_mode": Setting(torch.is_inference_mode_enabled, None),
        "function_modes": Setting(c._len_torch_function_stack, None),
        "dispatch_modes": Setting(c._len_torch_dispatch_stack, None),
        "anomaly_mode": Setting(
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda both: torch.set_anomaly_enabled(*both),
        ),
        "deterministic": Setting(
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
        ),
        "flush_denormal": Setting(_flushes_denormals, torch.set_flush_denormal),
        "autocast_cache": Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "folder": Setting(_folder, os.chdir),
        "gc": Setting(lambda: (gc.isenabled(), gc.get_threshold()), _set_gc),
        "functions": Setting(replaced.functions, None),
        "operators": Setting(replaced.operators, None),
        "module_hooks": Setting(replaced.module_hooks, None),
        "python_threads": Setting(replaced.threads, None),
        "saved_tensors_hooks": Setting(
            lambda: c._autograd._top_saved_tensors_default_hooks(True), None, False
        ),
        "profiler": Setting(c._autograd._profiler_enabled, None),
        "autograd_threads": Setting(c._is_multithreading_enabled, c._set_multithreading_enabled),
        "fill_uninitialized_memory": Setting(
            c._get_deterministic_fill_uninitialized_memory, c._set_deterministic_fill_uninitialized_memory
        ),
        "compiler_stance": Setting(compiler_state.stance, compiler_state.set_stance, False),
    }
    for name, module in compiler_state.CONFIGS.items():
        found[name] = Setting(
            partial(compiler_state.overrides, module), partial(compiler_state.set_overrides, module), False
        )
    for which in ("swap", "overwrite"):
        what = f"{which}_module_params_on_conversion"
        found[what] = Setting(getattr(future, f"get_{what}"), getattr(future, f"set_{what}"))
    found["cpu_affinity"] = Setting(lambda: os.sched_getaffinity(0), _set_affinity)
    found["recursion_limit"] = Setting(_recursion_limit, _set_recursion_limit)
    for name in ("AS", "DATA", "NOFILE", "STACK"):
        number = getattr(resource, f"RLIMIT_{name}")
        found[f"limit_{name}"] = Setting(
            partial(resource.getrlimit, number), partial(resource.setrlimit, number)
        )
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM):
        found[f"handler_{signum.name}"] = Setting(
            partial(signal.getsignal, signum), partial(signal.signal, signum), False
        )
    found["standard_streams"] = Setting(lambda: (sys.stdout, sys.stderr), _set_streams, False)
    for device in ("cpu", "cuda"):
        found[f"autocast_{device}"] = Setting(partial(_autocast, device), partial(_set_autocast, device))
    # torch 2.9 and later keep each precision by backend and operator, and beside it what the older switches were set to,
    # which refuse to be read where the two disagree. Setting an older one sets the newer, so it comes first.
    found["float32_matmul_precision"] = Setting(
        lambda: _or_mixed(torch.get_float32_matmul_precision), torch.set_float32_matmul_precision
    )
    found["cudnn_allow_tf32"] = Setting(lambda: _or_mixed(c._get_cudnn_allow_tf32), c._set_cudnn_allow_tf32)
    if hasattr(c, "_get_fp32_precision_getter"):
        for backend in ("generic", "cuda", "mkldnn"):
            for operator in ("all", "matmul", "conv", "rnn") if backend != "generic" else ("all",):
                found[f"fp32_precision_{backend}_{operator}"] = Setting(
                    partial(c._get_fp32_precision_getter, backend, operator),
                    partial(c._set_fp32_precision_setter, backend, operator),
                )
    found["onednn"] = Setting(c._get_mkldnn_enabled, c._set_mkldnn_enabled)
    for name in ("enabled", "benchmark", "deterministic"):
        found[f"cudnn_{name}"] = Setting(getattr(c, f"_get_cudnn_{name}"), getattr(c, f"_set_cudnn_{name}"))
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        found[f"sdp_{name}"] = Setting(
            getattr(backends.cuda, f"{name}_sdp_enabled"), getattr(backends.cuda, f"enable_{name}_sdp")
        )
    for name in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation"):
        found[f"cublas_{name}"] = Setting(
            partial(getattr, backends.cuda.matmul, f"allow_{name}"),
            partial(setattr, backends.cuda.matmul, f"allow_{name}"),
        )
    return {name: setting for name, setting in found.items() if _works(setting)}


def _works(setting: Setting) -> bool:
    with suppress(Exception):
        setting.get()
        return True
    return False


def _recursion_limit() -> int:
    """The limit, as far as it is lowered: torch's compiler raises it for good, and libraries for as long as they run."""
    now = sys.getrecursionlimit()
    _raised[0] = max(_raised[0], now)
    return min(now, _RECURSION)


def _set_recursion_limit(wanted: int) -> None:
    sys.setrecursionlimit(_raised[0] if wanted == _RECURSION else wanted)


def _set_affinity(wanted: set[int]) -> None:
    """Set it for the threads that were started under the present one too, torch's among them."""
    now = os.sched_getaffinity(0)
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            if os.sched_getaffinity(int(task.name)) == now:
                os.sched_setaffinity(int(task.name), wanted)


def _set_streams(wanted: tuple[TextIO, TextIO]) -> None:
    sys.stdout, sys.stderr = wanted


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _set_autocast(device: str, value: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(device, value[0])
    torch.set_autocast_dtype(device, value[1])


def _set_gc(value: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if value[0] else gc.disable)()
    gc.set_threshold(*value[1])


def _or_mixed(get: Get) -> Any:
    try:
        return get()
    except RuntimeError:
        return "mixed"


def _default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 -- Path.cwd() takes four times as long
    except OSError:  # it was removed
        return ""


_SMALLEST = 5e-324  # below the normal numbers: a processor that flushes reads it as 0


def _flushes_denormals() -> bool:
    return _SMALLEST + 0.0 == 0.0


def _rng() -> tuple[Any, ...]:
    """States of the global generators; of a GPU that is in use too. Nothing waits for a device."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return (
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002 - the global generator is what an arm may draw from
        torch.default_generator.get_state().numpy().tobytes(),
        *(generator.get_state().numpy().tobytes() for generator in cuda),
    )


def _set_rng(rng: tuple[Any, ...]) -> None:
    python, numpy, host, *cuda = rng
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    for generator, state in zip(
        (torch.default_generator, *torch.cuda.default_generators), (host, *cuda), strict=False
    ):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _same_rng(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[0] == other[0] and one[2:] == other[2:] and _numpy_key(one[1]) == _numpy_key(other[1])


def _numpy_key(state: Any) -> object:
    return (state[0], state[1].tobytes(), *state[2:])


def portable(state: Snapshot) -> Snapshot:
    """The part of a state that another process can be given."""
    pairs = zip(settings().values(), state.values, strict=True)
    return state._replace(values=tuple(v if s.travels else Kept.AS_IT_IS for s, v in pairs))


def take() -> Snapshot:
    """The state now."""
    return Snapshot(tuple(s.get() for s in settings().values()), dict(_environ()), _rng())


def _environ() -> Mapping[Any, Any]:
    return getattr(os.environ, "_data", os.environb)  # its bytes, of which none is decoded


def restore(wanted: Snapshot, now: Snapshot) -> None:
    """Puts back what differs between two states; what cannot be put back stays."""
    if wanted.values != now.values:
        for setting, value in zip(settings().values(), wanted.values, strict=True):
            if value is Kept.AS_IT_IS or setting.set is None:
                continue
            if setting.get() != value:  # one may have set another
                with suppress(Exception):  # whoever takes another snapshot sees it
                    setting.set(value)
    if wanted.environ != now.environ:
        for name in now.environ.keys() - wanted.environ.keys():
            del os.environ[os.fsdecode(name)]
        for name, value in wanted.environ.items():
            if now.environ.get(name) != value:
                os.environ[os.fsdecode(name)] = os.fsdecode(value)
    if not _same_rng(wanted.rng, now.rng):
        _set_rng(wanted.rng)


def differences(before: Snapshot, after: Snapshot) -> dict[str, list[str]]:
    """What differs, by name: [before, after] of a setting, the names of variables (their values may be secret).

    Not listed: variables that torch's compiler has set for its caches.
    """
    found = {
        name: [str(one), str(other)]
        for name, one, other in zip(settings(), before.values, after.values, strict=True)
        if one != other
    }
    names = before.environ.keys() | after.environ.keys()
    changed = {os.fsdecode(n) for n in names if before.environ.get(n) != after.environ.get(n)}
    new = {os.fsdecode(n) for n in after.environ.keys() - before.environ.keys()}
    variables = sorted(changed - (new & _BY_COMPILER))
    return found | ({"environ": variables} if variables else {})


class OwnStates:
    """The states of several arms in one process, which is as it was when this was made whenever none of them is entered.

    Attributes:
        base: the state of the process when none is entered.
        changed: arm -> what it has set and left so, see `differences`. Draws from an RNG are not listed: each arm has a
            sequence of its own, and all of them begin alike.
        culprit: the arm that has set what cannot be put back; "" where none has.
        left: what that is, see `differences`.
        reason: the same in words.
    """

    def __init__(self) -> None:
        self.base = take()
        self._own: dict[str, Snapshot] = {}  # of the arms that differ from it
        self.changed: dict[str, dict[str, list[str]]] = {}
        self.left: dict[str, list[str]] = {}
        self.culprit = self.reason = ""

    @contextmanager
    def of(self, arm: str) -> Iterator[None]:
        """The process in the state that this arm has left. Entering and leaving take about 0.5 ms in all on a CPU.

        Raises:
            UnrestorableError: there is a `culprit`: whatever is done from now on is not done in its own state.
        """
        if self.culprit:
            raise UnrestorableError(f"arm {self.culprit} {self.reason}")
        if arm in self._own:
            restore(self._own[arm], self.base)
        try:
            yield
        finally:
            self._leave(arm)

    def _leave(self, arm: str) -> None:
        now, base = take(), self.base
        same_settings = now.values == base.values and now.environ == base.environ
        if same_settings and _same_rng(now.rng, base.rng):
            self._own.pop(arm, None)
            return
        self._own[arm] = now
        restore(base, now)
        if same_settings:
            return
        if changed := differences(base, now):
            self.changed[arm] = changed
        if left := differences(base, take()):
            self.culprit, self.left = arm, left
            self.reason = f"changed {', '.join(left)}, which this process cannot put back"
