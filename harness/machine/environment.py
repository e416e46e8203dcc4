"""Where a number was measured: the fixed facts of machine and software, and the volatile state beside them.

`fingerprint` is stored with every row; `env_id` hashes the part of it that a time depends on. No name of a
person or machine is stored: host name and GPU UUID are hashed.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.util
import json
import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import psutil

from harness.machine.gpu_monitor import GpuMonitor, Monitor, monitor_for
from harness.machine.processes import memory_of_machine
from harness.store.differences import ENV_ID_FIELDS, LATER
from harness.store.errors import UsageError
from harness.store.extensions import TABLES
from harness.store.private import hashed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "ENV_ID_FIELDS",
    "code_hash",
    "counted",
    "device_kind",
    "env_id",
    "fingerprint",
    "hash_of",
    "monitor_for",
    "of_gpu",
    "snapshot",
]

_TOPS = ("fp8core", "harness", "sweeps")
_RUN = frozenset({".py", ".yaml", ".j2", ".csv"})
COMMIT_VARIABLE = "FP8_HARNESS_COMMIT"

# Instruction sets by which CPU matmuls and casts choose their kernels, as /proc/cpuinfo spells them.
_ISA = (
    *("f16c", "fma", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_fp16", "asimd", "bf16", "sve", "sve2"),
)
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")


def device_kind(device: str) -> Literal["cpu", "cuda"]:
    """Resolves "auto", "cpu" or "cuda" to what this machine has.

    Raises:
        UsageError: another word, or "cuda" where torch sees no GPU.
    """
    if device == "cpu":
        return "cpu"
    if device not in ("auto", "cuda"):
        hint = "; choose a GPU with CUDA_VISIBLE_DEVICES" if device.startswith("cuda:") else ""
        raise UsageError(f"device={device!r} must be auto, cpu or cuda{hint}")
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "auto":
        return "cpu"
    build = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
    raise UsageError(
        f"device='cuda': torch {torch.__version__} ({build}) sees no GPU; use device=cpu or device=auto"
    )


def of_gpu(facts: Mapping[str, Any], index: int, cuda: Any = None) -> dict[str, Any]:
    """A fingerprint as it would read on another visible GPU of this machine."""
    with monitor_for(f"cuda:{index}") as monitor:
        return {**facts, **_gpu(monitor, cuda, index)}


def fingerprint(
    device: str, monitor: Monitor | None = None, cuda: Any = None, root: Path | None = None
) -> dict[str, Any]:
    """The fixed facts: a flat mapping of JSON values; None where something is absent or can't be read.

    Args:
        device: "cpu" or "cuda".
        monitor: an open monitor of that device; by default one is opened for this call.
        cuda: the module that describes the GPU; `torch.cuda` by default.
        root: folder whose git state is recorded; by default the project that the harness is run from.
    """
    facts: dict[str, Any] = {"device": device, **_versions(), **_host(), **_git(root or _project())}
    facts["code"] = code_hash(root or Path(__file__).resolve().parents[2])
    facts["extensions"] = extensions_hash()
    if device == "cpu":
        return facts
    if monitor is not None:
        return facts | _gpu(monitor, cuda)
    with monitor_for(device) as opened:
        return facts | _gpu(opened, cuda)


def env_id(facts: Mapping[str, Any]) -> str:
    """Ten hexadecimal digits over `ENV_ID_FIELDS`; a missing field counts as None."""
    relevant: list[Any] = [facts.get(name) for name in ENV_ID_FIELDS if name not in LATER]
    later = {name: facts[name] for name in LATER if facts.get(name) is not None}
    text = json.dumps(relevant + [later] * bool(later), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


@functools.cache
def code_hash(root: Path) -> str | None:
    """Twelve hexadecimal digits over what is run below a folder (`counted`); None where there is nothing of it.

    It says what a commit can't: whether a tree with uncommitted changes, or without git, is the same code. A checkout and a
    wheel built from it have the same.
    """
    inside = (root / "harness" / "sweeps").exists()  # a wheel's; beside it `sweeps` is somebody else's
    tops = _TOPS[:-1] if inside else _TOPS
    files = ((file, file.relative_to(root).as_posix()) for top in tops for file in (root / top).rglob("*"))
    return hash_of((name, file.read_bytes()) for file, path in files if (name := counted(path)))


def counted(path: str) -> str:
    """The name by which a file counts into `code_hash`; "" for one that does not.

    Counted are Python, and the data and templates that the wheel ships beside it: a row may depend on each of them.

    >>> counted("harness/store/facts.yaml"), counted("harness/sweeps/gemm.yaml"), counted("harness/report/page.css")
    ('harness/store/facts.yaml', 'sweeps/gemm.yaml', '')

    Args:
        path: below a checkout, or below where a wheel is installed; with slashes.
    """
    place = PurePosixPath(path.removeprefix("harness/") if path.startswith("harness/sweeps/") else path)
    return str(place) if place.parts[0] in _TOPS and place.suffix in _RUN else ""


@functools.cache
def extensions_hash() -> str | None:
    """Hash over the sources of installed packages that bring suites, peers, recipes, models or backends; none is imported."""
    names = {
        entry.module.partition(".")[0]
        for table in TABLES
        for entry in metadata.entry_points(group=f"fp8_harness.{table}")
    }
    paths = [
        Path(place)
        for name in sorted(names)
        if (spec := importlib.util.find_spec(name))
        for place in spec.submodule_search_locations or [spec.origin or ""]
    ]
    return hash_of(
        (file.relative_to(place.parent).as_posix(), file.read_bytes())
        for place in paths
        for file in (place.rglob("*") if place.is_dir() else [place])
        if file.suffix in _RUN
    )


def hash_of(files: Iterable[tuple[str, bytes]]) -> str | None:
    """Twelve hexadecimal digits over names and contents, in whatever order they come; None for none."""
    whole, found = hashlib.sha256(), sorted(files)
    for name, content in found:
        whole.update(f"{name}\0".encode() + content + b"\0")
    return whole.hexdigest()[:12] if found else None


def snapshot(monitor: Monitor | None = None) -> dict[str, Any]:
    """What changes by the minute: time, load average, free memory, and the monitor's readings."""
    return {
        "time_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average_1min": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "memory_available_gib": _gib(memory_of_machine("available"), 2),
        **(monitor or Monitor()).state(),
    }


def _gib(size: int | None, digits: int) -> float | None:
    return None if size is None else round(size / 2**30, digits)


def _versions() -> dict[str, Any]:
    import torch

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "torchao": _version("torchao"),
        "transformer_engine": _version("transformer-engine"),
        "deep_gemm": _version("deep-gemm"),
        "aiter": _version("amd-aiter") or _version("aiter"),  # renamed, see harness.peers.aiter
        "numpy": _version("numpy"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cublas": next((v for v in map(_version, _CUBLAS) if v), None),
        "cudnn": torch.backends.cudnn.version(),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _host() -> dict[str, Any]:
    import torch

    model, isa = _cpu_model(Path("/proc/cpuinfo"))
    return {
        "os": platform.platform(),
        "cpu": model,
        "isa": isa,
        "cpu_cores": psutil.cpu_count(logical=False),
        "cpu_threads": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_gib": _gib(memory_of_machine("total"), 1),
        "host_hash": hashed(socket.gethostname()),
    }


def _cpu_model(cpuinfo: Path) -> tuple[str, list[str]]:
    """Model name and the instruction sets of `_ISA` that the kernel reports."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, [flag for flag in _ISA if flag in flags]


def _gpu(monitor: Monitor, cuda: Any, index: int | None = None) -> dict[str, Any]:
    """Facts of a GPU, by default the current one: what torch says, and what NVML adds where it can be asked."""
    if cuda is None:
        import torch

        cuda = torch.cuda
    properties = cuda.get_device_properties(cuda.current_device() if index is None else index)
    facts: dict[str, Any] = {
        "gpu": properties.name,
        "gpu_count": cuda.device_count(),
        "gpu_uuid_hash": hashed(str(properties.uuid)),
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "gpu_sm_count": properties.multi_processor_count,
        "gpu_l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "gpu_capability": f"{properties.major}.{properties.minor}",
        "gpu_architecture": getattr(properties, "gcnArchName", None),
    }
    if not isinstance(monitor, GpuMonitor):
        return facts
    return facts | {
        "driver": monitor.driver(),
        "power_limit_w": monitor.power_limit_w(),
        "max_sm_clock_mhz": monitor.max_sm_clock_mhz(),
        "ecc": monitor.ecc(),
        "mig": monitor.mig(),
        "nvml_problem": monitor.problem or None,
    }


def _project() -> Path:
    """The checkout that holds this file, or the working folder where the harness is installed elsewhere."""
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / ".git").exists() else Path.cwd()


def commit_here() -> str | None:
    """The commit of the code that runs; None where it is not known."""
    commit: str | None = _git(_project())["git_commit"]
    return commit


def _git(root: Path) -> dict[str, Any]:
    """Commit and whether tracked files differ from it; None for both outside of git."""
    commit = _git_output(root, "rev-parse", "HEAD")
    if commit is None:  # a copy without history: whoever copied it may know
        return {"git_commit": os.environ.get(COMMIT_VARIABLE) or None, "git_dirty": None}
    changes = _git_output(root, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}


def _git_output(root: Path, *words: str) -> str | None:
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no repository, no commit yet, or a hung disk
        return None
    return done.stdout.strip()
