"""Suite `smoke_kernels`: every operator of fp8core once on this device, against its twin in plain PyTorch.

`do: compile` launches each of them, tuned ones with every candidate, and compares nothing: it fills Triton's cache on
disk, by as many processes at once as there are `workers`. `do: check` compares. Casts must agree bit for bit; results
that are sums or products in floating point (norms, SwiGLU, matmul) to `BOUND_DB` of their largest value, and codes made of
those in all but `CODES` of their elements: one bfloat16 rounding of the operand moves a code by one step.

A device without kernels runs the twins themselves, and `resolved.ran` says so: nothing is proved there but the calls.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8core.kernels import ops, reference, tuning
from harness.store.errors import Cause
from harness.suites.common import crossed_points, generator
from harness.timing import metrics
from harness.timing.workload import ArmInfo, Axis, Series, Trial, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from harness.store.case import Case

METRIC = "mismatches"  # of a row that says why there is no figure
SOURCES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BOUND_DB = 40.0  # bfloat16 rounds to 2**-9 of a value, about 54 dB; sums in another order cost a few more
CODES = 0.02
E4M3 = torch.float8_e4m3fn
SCALARS = {"eps": 1e-5, "dtype": E4M3, "power_of_two": True, "margin": 1, "mode": "floor"}

AXES = {
    "kernel": Axis("an operator fp8core::<name>", tuple(ops.OPERATORS)),
    "do": Axis("launch only, or compare", ("check", "compile")),
    "M": Axis("rows of the input", default=16384),
    "K": Axis("columns of the input; rows and columns of the other operand of matmul", default=4096),
}
ARMS = {name: ArmInfo(f"input in {name}") for name in SOURCES}


points = crossed_points("smoke_kernels", "sizes by axes.M and axes.K", AXES, every="kernel")


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """None: a device without kernels runs their twins."""
    return None


def work(case: Case) -> float:
    """Elements of the input."""
    return float(case.integer("M") * case.integer("K"))


def trial(case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]) -> Trial:
    """One operator, called once or more."""
    name, compiling = case.text("kernel"), case["do"] == "compile"
    call = arguments(name, case, SOURCES[arm], device)
    why = ops.kernel_missing(call[0])
    resolved = {
        "ran": f"plain PyTorch, no kernel: {why}" if why else "Triton kernel",
        "operator": f"fp8core::{name}",
    }
    begun = time.perf_counter()
    with tuning.every_candidate() if compiling else nullcontext():
        got = ops.OPERATORS[name](*call)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    seconds = Series("compile_s", (time.perf_counter() - begun,), (0,))
    on_step(1, 1)
    if compiling:
        return Trial((seconds,), resolved)
    results = [
        each if isinstance(each, tuple) else (each,) for each in (got, getattr(reference, name)(*call))
    ]
    wrong, fault = compare(name, *results)
    failure = fault and f"fp8core::{name}: {fault}"
    return Trial((Series(METRIC, (float(wrong),), (0,)),), resolved, failure=failure, cause=Cause.NUMERICS)


def arguments(name: str, case: Case, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """A call of an operator at the sizes of the case, by the names and types of its schema.

    Raises:
        KeyError: an argument of unknown meaning; add it below.
    """
    M, K = case.integer("M"), case.integer("K")
    random = generator(device, case.seed, 0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    if name == "matmul":
        ones = torch.ones((), device=device)
        return drawn(M, K).to(E4M3), drawn(K, K).to(E4M3), ones, ones, torch.bfloat16, 0

    tensors: dict[str, Callable[[], Tensor]] = {
        "weight": lambda: drawn(K),
        "amax": lambda: torch.full((), 4.48, device=device),
        "rstd": lambda: 0.5 + torch.rand(M, 1, generator=random, device=device),
    }

    def value(argument: Any) -> Any:
        if argument.name in SCALARS:
            return SCALARS[argument.name]
        if argument.name in tensors:
            return tensors[argument.name]()
        if str(argument.type) != "Tensor":
            raise KeyError(f"fp8core::{name} has an argument {argument.name!r} of type {argument.type}")
        return drawn(M, K)

    return tuple(value(argument) for argument in getattr(torch.ops.fp8core, name).default._schema.arguments)


def compare(name: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> tuple[int, str]:
    """Elements that differ by more than rounding explains, and why that is too many; "" where it is not.

    Args:
        name: of the operator.
        got: its results.
        want: those of its twin.
    """
    exact = name.startswith(("amax", "cast"))
    if len(got) != len(want):
        return 0, f"{len(got)} results, the reference has {len(want)}"
    for place, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            what = f"{list(mine.shape)} {mine.dtype}, the reference's is {list(theirs.shape)} {theirs.dtype}"
            return mine.numel(), f"result {place} is {what}"
        a, b = mine.double(), theirs.double()
        differ = int(((a != b) & ~(a.isnan() & b.isnan())).sum())
        if exact or mine.element_size() == 1:
            allowed = 0 if exact else int(CODES * mine.numel())
            if differ > allowed:
                what = f"elements of result {place} differ from the reference, {allowed} allowed"
                return differ, f"{differ} of {mine.numel()} {what}"
        elif differ and not (decibels := metrics.sqnr_db(a, b)) >= BOUND_DB:
            return differ, f"result {place} is {decibels:.1f} dB from the reference, {BOUND_DB:g} expected"
    return 0, ""
