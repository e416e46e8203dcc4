"""Which launch parameters are fastest here: measured once, remembered on disk.

A result belongs to (kernel, shape bucket, dtype, device, triton version). A bucket is each size rounded up to
a power of two: shapes within it differ by less than the parameters do. The file is JSON under
`$FP8CORE_CACHE_DIR`, else `$XDG_CACHE_HOME/fp8core`, else `~/.cache/fp8core`. Whatever is unreadable, damaged or
names parameters that are no longer offered counts as not there and is measured anew; a cache that cannot be
written is not written. `FP8CORE_TUNE=0` measures nothing and takes the first candidate; while a CUDA graph records,
what is known is taken, else the first candidate.

`fp8core.gemm.fastest` keeps in the same file, by `recall` and `remember`, which library multiplies a shape.

Tuned are the matmul and the casts that write a transposed copy: there the shape of a tile trades runs of memory
against registers, and the best differs with the shape. The others - amax, casts in one layout, norms, SwiGLU - stream
memory in blocks of 16-byte accesses with several in flight, which saturates it at any sensible block, and MX holds
whole groups of 32 both ways, for which one tile is right; a choice would cost launches and change nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Candidate = dict[str, int]
FILE_NAME = "tuning.json"
LIMIT_S = 20.0  # of one choice, compilation included: after it no further candidate is begun
_log = logging.getLogger(__name__)
_known: dict[Path, dict[str, Candidate]] = {}  # what has been read, by file
_unfinished: dict[str, Candidate] = {}  # choices that met the limit; never written


def choose(
    kernel: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device_name: str,
    candidates: Sequence[Candidate],
    run: Callable[[Candidate], None],
    *,
    time_ms: Callable[[Callable[[], None]], float] | None = None,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Candidate:
    """The fastest candidate for this kind of call.

    Args:
        kernel: a name that tells apart everything that `run` does besides shape and dtype.
        shape: sizes in elements.
        dtype: of the operands.
        device_name: as the driver reports it.
        candidates: launch parameters; the first is the default where nothing can be measured.
        run: launches with the given parameters; called several times, so it must be idempotent. A candidate
            that the device lacks resources for is skipped.
        time_ms: measures a closure in milliseconds; default CUDA events over an emptied cache.
        limit_s: once this many seconds are spent and one candidate is measured, the others are not tried; the choice
            among those that were holds for this process only, so that a later run may finish it.
        clock: seconds.

    Returns:
        One of `candidates`.

    Raises:
        ValueError: no candidates.
        RuntimeError: every candidate was refused by the device.
    """
    if not candidates:
        raise ValueError(f"no candidates to choose from for {kernel}")
    if len(candidates) == 1 or (time_ms is None and off()):
        return candidates[0]
    name = key(kernel, shape, dtype, device_name)
    best = recall(name, candidates) or _unfinished.get(name)
    if best is not None:
        return best
    if time_ms is None and capturing():
        return candidates[0]
    begin = clock()
    try:
        best, is_complete = _fastest(
            kernel, candidates, run, time_ms or cuda_ms, lambda: clock() - begin > limit_s
        )
    except torch.OutOfMemoryError:  # measuring takes memory of its own; a later call may find some
        return candidates[0]
    if is_complete:
        remember(name, best)
    else:
        _unfinished[name] = best
    return best


def recall(name: str, candidates: Sequence[Candidate]) -> Candidate | None:
    """What is remembered under this name, if it is one of `candidates`."""
    known = _table(cache_file()).get(name)
    return known if known in candidates else None


def remember(name: str, best: Candidate) -> None:
    """Keeps a result in memory, and on disk where that can be written."""
    path = cache_file()
    table = _table(path)
    table[name] = best
    _write(path, table)


def key(kernel: str, shape: Sequence[int], dtype: torch.dtype, device_name: str) -> str:
    """What a result is remembered under.

    >>> key("cast", (1000, 4096), torch.bfloat16, "H200").rsplit("|", 2)[0]
    'cast|1024x4096|bfloat16|H200'
    """
    bucket = "x".join(str(1 << max(size - 1, 0).bit_length()) for size in shape)
    versions = f"triton {triton.__version__}|kernels {sources()}"
    return f"{kernel}|{bucket}|{str(dtype).removeprefix('torch.')}|{device_name}|{versions}"


@functools.cache
def sources() -> str:
    """A digest of the sources of the kernels: what was measured of others holds no more."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def cache_file() -> Path:
    """Where results are kept."""
    folder = os.environ.get("FP8CORE_CACHE_DIR")
    if folder:
        return Path(folder) / FILE_NAME
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8core" / FILE_NAME


def forget() -> None:
    """Drops what was read into memory; the file is read again."""
    _known.clear()
    _unfinished.clear()


def off() -> bool:
    """Whether no choice is made at all: without a GPU, in Triton's interpreter, and where the user said no."""
    if os.environ.get("FP8CORE_TUNE") == "0" or triton.knobs.runtime.interpret:
        return True
    return not torch.cuda.is_available()


def capturing() -> bool:
    """Whether a CUDA graph records, which would record the measuring; what is known already still holds."""
    return torch.cuda.is_current_stream_capturing()


def cuda_ms(closure: Callable[[], None], warmup_ms: int = 10, measured_ms: int = 50) -> float:
    """Median milliseconds of a call on the current device, its L2 cache emptied before each."""
    milliseconds: float = triton.testing.do_bench(
        closure, warmup=warmup_ms, rep=measured_ms, return_mode="median"
    )
    return milliseconds


def _table(path: Path) -> dict[str, Candidate]:
    """What the file holds, read once."""
    if path not in _known:
        _known[path] = _read(path)
    return _known[path]


def _fastest(
    kernel: str,
    candidates: Sequence[Candidate],
    run: Callable[[Candidate], None],
    time_ms: Callable[[Callable[[], None]], float],
    is_late: Callable[[], bool],
) -> tuple[Candidate, bool]:
    """(the fastest, whether all candidates were tried)."""
    times: list[tuple[float, Candidate]] = []
    refusals: list[str] = []
    for candidate in candidates:
        if times and is_late():
            break

        def closure(candidate: Candidate = candidate) -> None:
            run(candidate)

        try:
            times.append((time_ms(closure), candidate))
        except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as error:
            refusals.append(f"{candidate}: {error}")
    if not times:
        raise RuntimeError(f"no candidate of {kernel} runs on this device; " + "; ".join(refusals))
    is_complete = len(times) + len(refusals) == len(candidates)
    return min(times, key=lambda pair: pair[0])[1], is_complete


def _read(path: Path) -> dict[str, Candidate]:
    """The table in the file, without whatever does not have its form."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("tuning cache %s is unreadable (%s); measuring anew", path, error)
        return {}
    if not isinstance(table, dict):
        _log.warning(
            "tuning cache %s holds %s instead of a table; measuring anew", path, type(table).__name__
        )
        return {}
    return {name: entry for name, entry in table.items() if _well_formed(entry)}


def _well_formed(entry: object) -> bool:
    return isinstance(entry, dict) and all(type(value) is int for value in entry.values())


def _write(path: Path, table: dict[str, Candidate]) -> None:
    """Adds the table to what other processes wrote meanwhile; readers see the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        merged = {**_read(path), **table}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(merged, file, indent=1, sort_keys=True)
        Path(file.name).replace(path)
    except OSError as error:
        _log.warning("tuning cache %s cannot be written (%s)", path, error)
