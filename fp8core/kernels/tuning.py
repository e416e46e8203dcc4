"""Which tile of a kernel is fastest here: measured once, stored on disk.

The first of the choices is the default. All are run once, which compiles them, and then timed in turn for `ROUNDS` rounds:
the median over rounds of time / default's time decides, and must be `MARGIN` below 1 to replace the default.

    FP8CORE_TUNE=0, no GPU, Triton's interpreter   nothing is measured or recalled: the default
    a CUDA graph records, or memory is short       what is stored, else the default, for this call
    past the time limit                            the fastest of the others, for this process
    else                                           stored under `key`: what, sizes, dtypes, device, versions of torch, CUDA and
                                                   Triton, and a digest of the kernels' sources

The file is JSON under `$FP8CORE_CACHE_DIR`, else `$XDG_CACHE_HOME/fp8core`, else `~/.cache/fp8core`. Whatever is
unreadable, damaged or names a choice that is no longer offered counts as not there and is measured anew; a cache that
cannot be written is not written.

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
import statistics
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Candidate = dict[str, int]  # launch parameters
FILE_NAME = "tuning.json"
LIMIT_S = 20.0  # of one choice, compilation included: after it no further candidate is begun
ROUNDS = 5
MARGIN = 0.02  # of the default's time; what a choice between equals could win is noise
_log = logging.getLogger(__name__)
_tables: dict[Path, dict[str, Any]] = {}  # what has been read, by file
_unfinished: dict[str, Any] = {}  # choices that hold for this process; never written
_launching_all = False  # inside `every_candidate`


def choose(
    kernel: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device_name: str,
    candidates: Sequence[Candidate],
    run: Callable[[Candidate], None],
    *,
    time_ms: Callable[[Callable[[], object]], float] | None = None,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Candidate:
    """The fastest launch parameters for this kind of call.

    Args:
        kernel: a name that tells apart everything that `run` does besides shape and dtype.
        shape: sizes in elements; shapes that round up to the same powers of two differ by less than the parameters do.
        dtype: of the operands.
        device_name: as the driver reports it.
        candidates: launch parameters; the first is the default. One that the device lacks resources for is skipped.
        run: launches with the given parameters; called several times, so it must be idempotent.
        time_ms: measures a closure in milliseconds; default CUDA events over an emptied cache.
        limit_s: once this many seconds are spent and one candidate has run, the others are not tried.
        clock: seconds.

    Raises:
        ValueError: no candidates.
        RuntimeError: every candidate was refused by the device.
    """
    if not candidates:
        raise ValueError(f"no candidates to choose from for {kernel}")
    if not _launching_all and (len(candidates) == 1 or (time_ms is None and off())):
        return candidates[0]
    from triton.runtime.errors import OutOfResources, PTXASError  # not on every platform

    if _launching_all:
        for candidate in candidates:
            with suppress(OutOfResources, PTXASError):
                run(candidate)
        return candidates[0]
    name = key(kernel, shape, dtype, device_name)
    table = _table(cache_file())
    for stored in (table.get(name), _unfinished.get(name)):
        if stored in candidates:
            return stored  # type: ignore[return-value]
    if time_ms is None and capturing():
        return candidates[0]
    begin = clock()
    able: list[Candidate] = []
    refusals: list[str] = []
    try:
        for candidate in candidates:
            if able and clock() - begin > limit_s:
                break
            try:
                run(candidate)
                able.append(candidate)
            except (OutOfResources, PTXASError) as error:
                refusals.append(f"{candidate}: {error}")
        if not able:
            what = " ".join(name.split("|")[:4])
            raise RuntimeError(f"no candidate of {what} runs on this device; " + "; ".join(refusals))
        best = able[race([functools.partial(run, candidate) for candidate in able], time_ms or cuda_ms)]
    except torch.OutOfMemoryError:  # measuring takes memory of its own; a later call may find some
        return candidates[0]
    if len(able) + len(refusals) < len(candidates):
        _unfinished[name] = best
    else:
        table[name] = best
        _write(cache_file(), table)
    return best


@contextmanager
def every_candidate() -> Iterator[None]:
    """Launch each candidate that the device has room for, and time and store none, in all threads; fills Triton's cache."""
    global _launching_all
    outer, _launching_all = _launching_all, True
    try:
        yield
    finally:
        _launching_all = outer


def race(
    runs: Sequence[Callable[[], object]],
    time_ms: Callable[[Callable[[], object]], float],
    rounds: int = ROUNDS,
) -> int:
    """The index of the fastest, by medians of ratios within a round; 0 where none is `MARGIN` faster than the first.

    A round times all of them, every second one in reverse, so that a drift of the clock or of the load hits each alike.
    """
    if len(runs) == 1:
        return 0
    ratios: list[list[float]] = []
    for number in range(rounds):
        order = range(len(runs))[:: -1 if number % 2 else 1]
        times = {index: time_ms(runs[index]) for index in order}
        ratios.append([times[index] / times[0] for index in range(len(runs))])
    medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
    best = min(range(len(runs)), key=medians.__getitem__)
    return best if medians[best] < 1 - MARGIN else 0


def key(kernel: str, shape: Sequence[int], dtype: torch.dtype, device_name: str) -> str:
    """The name that a result is stored under: all that its validity depends on.

    >>> key("cast", (1000, 4096), torch.bfloat16, "H200").rsplit("|", 4)[0]
    'cast|1024x4096|bfloat16|H200'
    """
    import triton

    sizes = "x".join(str(1 << max(size - 1, 0).bit_length()) for size in shape)
    versions = f"torch {torch.__version__}|cuda {torch.version.cuda}|triton {triton.__version__}"
    return (
        f"{kernel}|{sizes}|{str(dtype).removeprefix('torch.')}|{device_name}|{versions}|kernels {sources()}"
    )


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
    _tables.clear()
    _unfinished.clear()


def off() -> bool:
    """Whether no choice is made at all: without a GPU, in Triton's interpreter, and where the user said no."""
    if os.environ.get("FP8CORE_TUNE") == "0" or not torch.cuda.is_available():
        return True
    import triton

    return bool(triton.knobs.runtime.interpret)


def capturing() -> bool:
    """Whether a CUDA graph records, which would record the measuring."""
    return torch.cuda.is_current_stream_capturing()


def cuda_ms(closure: Callable[[], object], warmup_ms: int = 2, measured_ms: int = 10) -> float:
    """Median milliseconds of a call on the current device, its L2 cache emptied before each."""
    import triton

    milliseconds: float = triton.testing.do_bench(
        closure, warmup=warmup_ms, rep=measured_ms, return_mode="median"
    )
    return milliseconds


def _table(path: Path) -> dict[str, Any]:
    """What the file holds, read once."""
    if path not in _tables:
        _tables[path] = _read(path)
    return _tables[path]


def _read(path: Path) -> dict[str, Any]:
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


def _write(path: Path, table: dict[str, Any]) -> None:
    """Adds the table to what other processes wrote meanwhile; readers see the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            merged = {**_read(path), **table}
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
                json.dump(merged, file, indent=1, sort_keys=True)
            Path(file.name).replace(path)
    except OSError as error:
        _log.warning("tuning cache %s cannot be written (%s)", path, error)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, without which one of two writers could replace what the other has just added.

    Where there are no locks, that may happen: the result that is lost is measured anew.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
