"""Every operator of fp8core against its twin in plain PyTorch, for `doctor`.

Casts must agree bit for bit; results that are sums or products in floating point (norms, SwiGLU, matmul) to `BOUND_DB` of
their largest value, and codes made of those in all but `CODES` of their elements: one bfloat16 rounding of the operand
moves a code by one step.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8core.kernels import ops, reference, tuning
from harness.suites.common import generator
from harness.timing import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SOURCES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROWS, COLUMNS = 16384, 4096  # the activation of a Llama-3-8B block over 16,384 tokens
COMPILED = (4096, 14336)  # columns: candidates of a tuned kernel differ by them
MOST_PROCESSES = 16  # each holds a context of the GPU, half a GiB
BOUND_DB = 40.0  # bfloat16 rounds to 2**-9 of a value, about 54 dB; sums in another order cost a few more
CODES = 0.02
E4M3 = torch.float8_e4m3fn
SCALARS = {"eps": 1e-5, "dtype": E4M3, "power_of_two": True, "margin": 1, "mode": "floor"}


def compile_all(end: float) -> tuple[bool, str]:
    """Fill Triton's cache on disk, tuned kernels with every candidate, by a process a core; whether all of it was done, in words too.

    A kernel that is in the cache costs nothing, so only those that changed take time. What a launch raises is seen again when that
    kernel is compared.

    Args:
        end: when to stop, by `time.monotonic()`.
    """
    count = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    begun = time.monotonic()
    calls = [(name, source, columns) for name in ops.OPERATORS for source in SOURCES for columns in COMPILED]
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        launched = [pool.apply_async(_launch, call) for call in calls]
        for each in launched:
            each.wait(max(0.0, end - time.monotonic()))
        done = sum(each.ready() and each.successful() for each in launched)
    words = f"{done} of {len(calls)} launches in {time.monotonic() - begun:.0f} s by {count} processes"
    return done == len(calls), words


def _launch(name: str, source: str, columns: int) -> None:
    with tuning.every_candidate():
        ops.OPERATORS[name](*arguments(name, ROWS, columns, SOURCES[source], "cuda"))
    torch.cuda.synchronize()


def fault(name: str, rows: int, columns: int, device: str) -> str:
    """What is wrong with an operator for inputs of each dtype; "" where nothing is.

    On a device without kernels the twin is compared with itself, which proves nothing: ask `ops.kernel_missing` before.
    """
    for source, dtype in SOURCES.items():
        call = arguments(name, rows, columns, dtype, device)
        got, want = (
            result if isinstance(result, tuple) else (result,)
            for result in (ops.OPERATORS[name](*call), getattr(reference, name)(*call))
        )
        if why := compare(name, got, want):
            return f"input in {source}: {why}"
    return ""


def arguments(name: str, rows: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """A call of an operator at these sizes, by the names and types of its schema.

    Raises:
        KeyError: an argument of unknown meaning; add it below.
    """
    random = generator(device, 0, 0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    if name == "matmul":
        ones = torch.ones((), device=device)
        return (
            drawn(rows, columns).to(E4M3),
            drawn(columns, columns).to(E4M3),
            ones,
            ones,
            torch.bfloat16,
            0,
        )

    tensors: dict[str, Callable[[], Tensor]] = {
        "weight": lambda: drawn(columns),
        "amax": lambda: torch.full((), 4.48, device=device),
        "rstd": lambda: 0.5 + torch.rand(rows, 1, generator=random, device=device),
    }

    def value(argument: Any) -> Any:
        if argument.name in SCALARS:
            return SCALARS[argument.name]
        if argument.name in tensors:
            return tensors[argument.name]()
        if str(argument.type) != "Tensor":
            raise KeyError(f"fp8core::{name} has an argument {argument.name!r} of type {argument.type}")
        return drawn(rows, columns)

    return tuple(value(argument) for argument in getattr(torch.ops.fp8core, name).default._schema.arguments)


def compare(name: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Why results differ by more than rounding explains; "" where they do not.

    Args:
        name: of the operator.
        got: its results.
        want: those of its twin.
    """
    exact = name.startswith(("amax", "cast"))
    if len(got) != len(want):
        return f"{len(got)} results, the reference has {len(want)}"
    for place, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            expected = f"the reference's is {list(theirs.shape)} {theirs.dtype}"
            return f"result {place} is {list(mine.shape)} {mine.dtype}, {expected}"
        a, b = mine.double(), theirs.double()
        differ = int(((a != b) & ~(a.isnan() & b.isnan())).sum())
        if exact or mine.element_size() == 1:
            allowed = 0 if exact else int(CODES * mine.numel())
            if differ > allowed:
                what = f"elements of result {place} differ from the reference, {allowed} allowed"
                return f"{differ} of {mine.numel()} {what}"
        elif differ and not (decibels := metrics.sqnr_db(a, b)) >= BOUND_DB:
            return f"result {place} is {decibels:.1f} dB from the reference, {BOUND_DB:g} expected"
    return ""
