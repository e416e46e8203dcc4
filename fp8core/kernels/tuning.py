"""Which of several ways to compute the same is fastest here: measured once, stored on disk. Tiles of kernels, and libraries.

The first of the choices is the default. All are run once, which compiles them, and then timed in turn for `ROUNDS` rounds:
the median over rounds of time / default's time decides, and must be `MARGIN` below 1 to replace the default.

    FP8CORE_TUNE=0, no GPU, Triton's interpreter   nothing is measured or recalled: the default
    a CUDA graph records, or memory is short       what is stored, else the default, for this call
    past the time limit, or someone failed         the fastest of the others, for this process
    else                                           stored under `key`: what, sizes, dtypes, device, versions of torch, CUDA and
                                                   Triton, and a digest of the kernels' sources

The file is JSON under `$FP8CORE_CACHE_DIR`, else `$XDG_CACHE_HOME/fp8core`, else `~/.cache/fp8core`. Whatever is
unreadable, damaged or names a choice that is no longer offered counts as not there and is measured anew; a cache that
cannot be written is not written.

Tuned are the matmul and the casts that write a transposed copy: there the shape of a tile trades runs of memory
against registers, and the best differs with the shape. The others - amax, casts in one layout, norms, SwiGLU - stream
memory in blocks of 16-byte accesses with several in flight, which saturates it at any sensible block, and MX holds
whole groups of 32 both ways, for which one tile is right; a choice would cost launches and change nothing.
`fp8core.gemm.fastest` chooses by the same means which library multiplies a shape.
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
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Candidate = dict[str, int]  # launch parameters
C = TypeVar("C", Candidate, str)
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
    **measuring: Any,
) -> Candidate:
    """The fastest launch parameters for this kind of call.

    Args:
        kernel: a name that tells apart everything that `run` does besides shape and dtype.
        shape: sizes in elements; shapes that round up to the same powers of two differ by less than the parameters do.
        dtype: of the operands.
        device_name: as the driver reports it.
        candidates: launch parameters; the first is the default.
        run: launches with the given parameters; called several times, so it must be idempotent.
        **measuring: `time_ms`, `limit_s` and `clock` of `fastest`.

    Raises:
        ValueError: no candidates.
        RuntimeError: every candidate was refused by the device.
    """
    if not candidates:
        raise ValueError(f"no candidates to choose from for {kernel}")
    if _launching_all:
        from triton.runtime.errors import OutOfResources, PTXASError

        for candidate in candidates:
            with suppress(OutOfResources, PTXASError):
                run(candidate)
        return candidates[0]
    if len(candidates) == 1 or (measuring.get("time_ms") is None and off()):
        return candidates[0]
    name = key(kernel, [rounded(size, 1) for size in shape], (dtype,), device_name)
    best = fastest(name, candidates, lambda candidate: functools.partial(run, candidate), **measuring)
    return candidates[0] if best is None else best


@contextmanager
def every_candidate() -> Iterator[None]:
    """Launch each candidate that the device has room for, and time and store none, in all threads; fills Triton's cache."""
    global _launching_all
    outer, _launching_all = _launching_all, True
    try:
        yield
    finally:
        _launching_all = outer


def fastest(
    name: str,
    choices: Sequence[C],
    closure: Callable[[C], Callable[[], object]],
    *,
    time_ms: Callable[[Callable[[], object]], float] | None = None,
    tolerates: tuple[type[Exception], ...] = (),
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> C | None:
    """The choice stored under a name, else the fastest.

    Args:
        name: see `key`.
        choices: the first is the default, at least one.
        closure: what runs a choice; one that the device lacks resources for is skipped.
        time_ms: measures a closure in milliseconds; default CUDA events over an emptied cache.
        tolerates: errors by which a choice is skipped too, but which may pass: the result is not stored.
        limit_s: once this many seconds are spent and one choice has run, the others are not tried.
        clock: seconds.

    Returns:
        One of `choices`; None where nothing can be measured now.

    Raises:
        RuntimeError: every choice was refused by the device.
    """
    stored = recall(name, choices)
    if stored is None and _unfinished.get(name) in choices:
        stored = _unfinished[name]
    if stored is not None or (time_ms is None and capturing()):
        return stored
    from triton.runtime.errors import OutOfResources, PTXASError  # not on every platform

    begin = clock()
    able: list[C] = []
    refusals: list[str] = []
    is_final = True
    try:
        for choice in choices:
            if able and clock() - begin > limit_s:
                is_final = False
                break
            try:
                closure(choice)()
                able.append(choice)
            except torch.OutOfMemoryError:
                raise
            except (OutOfResources, PTXASError, *tolerates) as error:
                refusals.append(f"{choice}: {error}")
                is_final = is_final and isinstance(error, OutOfResources | PTXASError)
        if not able:
            what = " ".join(name.split("|")[:4])
            raise RuntimeError(f"no candidate of {what} runs on this device; " + "; ".join(refusals))
        best = able[race([closure(choice) for choice in able], time_ms or cuda_ms)]
    except torch.OutOfMemoryError:  # measuring takes memory of its own; a later call may find some
        return None
    for refusal in refusals if not is_final else ():
        _log.warning("%s: left out of the choice, which another process makes again: %s", name, refusal)
    if is_final:
        remember(name, best)
    else:
        _unfinished[name] = best
    return best


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


def recall(name: str, choices: Sequence[C]) -> C | None:
    """What is stored under this name, if it is one of `choices`."""
    stored = _table(cache_file()).get(name)
    return stored if stored in choices else None


def remember(name: str, best: Candidate | str) -> None:
    """Keeps a result in memory, and on disk where that can be written."""
    path = cache_file()
    table = _table(path)
    table[name] = best
    _write(path, table)


def key(what: str, sizes: Sequence[int], dtypes: Sequence[torch.dtype], device_name: str) -> str:
    """The name that a result is stored under: all that its validity depends on.

    >>> key("cast", (1024, 4096), [torch.bfloat16], "H200").rsplit("|", 4)[0]
    'cast|1024x4096|bfloat16|H200'
    """
    import triton

    types = " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    versions = f"torch {torch.__version__}|cuda {torch.version.cuda}|triton {triton.__version__}"
    return f"{what}|{'x'.join(map(str, sizes))}|{types}|{device_name}|{versions}|kernels {sources()}"


def rounded(size: int, leading_bits: int) -> int:
    """The size rounded up to so many binary digits; one digit leaves powers of two.

    >>> [rounded(n, 5) for n in (31, 33, 4096, 4100, 14336, 16384)]
    [31, 34, 4096, 4352, 14336, 16384]
    """
    step = 1 << max(size.bit_length() - leading_bits, 0)
    return -(-size // step) * step


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
    if isinstance(entry, dict):
        return all(type(value) is int for value in entry.values())
    return isinstance(entry, str)


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
