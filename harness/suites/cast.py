"""Suite `cast`: bringing a tensor [M, K] to FP8, as a layer does it before each GEMM.

Timed is all of `fp8core.tensor.quantize`: amax, scale, multiply, clamp and rounding. Rowwise, a scale is shared
along K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8core.formats import as_element_format
from fp8core.tensor import Float8Tensor, quantize
from harness import metrics
from harness.compiling import fresh_compile
from harness.suites import oracle
from harness.suites.common import Rotation, compile_missing, draw, generator, with_defaults
from harness.workload import ArmInfo, Axis, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from fp8core.recipe import Granularity
    from harness.case import Case, Scalar

Quantise = Callable[[Tensor], Float8Tensor]

SOURCES = {"bf16": torch.bfloat16, "fp32": torch.float32}
AXES: Mapping[str, Axis] = {
    "dtype": Axis("FP8 format", ("e4m3fn", "e5m2")),
    "granularity": Axis("how many elements share a scale", ("tensorwise", "rowwise")),
    "M": Axis("rows"),
    "K": Axis("columns"),
    "src": Axis("dtype of the input", tuple(SOURCES)),
}
ARMS: Mapping[str, ArmInfo] = {
    "eager": ArmInfo("PyTorch operators, one kernel each"),
    "compile": ArmInfo("the same under torch.compile, fused", baseline="eager"),
}
CHECKED = 2**24  # elements of the timed tensor that are compared with the reference


def points(
    shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
) -> list[dict[str, Scalar]]:
    """No linked axes; M and K must be given.

    Raises:
        ValueError: M or K is missing, or shapes are named, which this suite has no use for.
    """
    missing = [f"axes.{name}" for name in ("M", "K") if name not in axes]
    if missing:
        raise ValueError(f"suite cast needs {' and '.join(missing)}")
    if shapes:
        raise ValueError(f"suite cast takes sizes by axes.M and axes.K, not shapes={list(shapes)}")
    return with_defaults([{}], axes, AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Any device casts; compiled arms need a compiler."""
    return compile_missing(device) if arm == "compile" else None


def work(case: Case) -> float:
    """Bytes: read for amax, read again, codes written; the scales are left out."""
    source = SOURCES[str(case["src"])].itemsize
    return float(case.integer("M") * case.integer("K") * (source + source + 1))


def build(case: Case, arm: str, device: str) -> Workload:
    """Draws the input; the check compares what the timed function makes of it, and of special inputs."""
    dtype = as_element_format(str(case["dtype"])).dtype
    granularity: Granularity = "rowwise" if case["granularity"] == "rowwise" else "tensorwise"
    shape = (case.integer("M"), case.integer("K"))
    x = draw("randn", shape, generator(device, case.seed, 0), SOURCES[str(case["src"])])

    def cast(x: Tensor) -> Float8Tensor:
        return quantize(x, dtype, granularity, dim=-1)

    function = fresh_compile(cast) if arm == "compile" else cast
    return Workload(
        run=lambda: function(x),
        check=lambda: _check(function, x, dtype, granularity, case.seed),
        bytes_moved=work(case),
        resolved={
            "timed": "amax, scale and cast (fp8core.tensor.quantize)",
            "bytes": "input read twice, codes written once",
            "backend": arm,
        },
        compiled=arm == "compile",
        variants=Rotation(function, (x,), device),
    )


def _check(
    function: Quantise, x: Tensor, dtype: torch.dtype, granularity: Granularity, seed: int
) -> Numerics:
    """Codes and scales must be those of the reference, bit for bit: of the timed input and of special ones."""
    rows = oracle.sample_rows(x.shape[0], seed, max(CHECKED // x.shape[1], 2), str(x.device))
    wrong: dict[str, int] = {}
    for name, special in _inputs(x, dtype):
        wrong[name] = _mismatches(function(special), special, rows, dtype, granularity)
    timed = function(x)
    overflow = as_element_format(dtype).overflow_threshold
    codes = _take(timed.qdata, rows)
    scale_inv = timed.scale_inv[rows] if timed.scale_inv.dim() else timed.scale_inv
    values = metrics.figures(codes.double() * scale_inv.double(), x[rows])
    values["mismatches"] = float(sum(wrong.values()))
    values["underflow_frac"] = metrics.underflow_frac(codes, x[rows])
    values["saturated_frac"] = metrics.saturated_frac(x[rows].double() / scale_inv.double(), overflow)
    found = ", ".join(f"{count} in {name!r}" for name, count in wrong.items() if count)
    reason = f"codes or scales differ from the reference cast: {found}; 0 expected (docs/numerics.md)"
    return Numerics(values, ok=not found, reason=reason if found else "")


def _mismatches(
    actual: Float8Tensor, x: Tensor, rows: Tensor, dtype: torch.dtype, granularity: Granularity
) -> int:
    """Codes and scales of the chosen rows that differ from the reference; NaN is one class."""
    amax = x.abs().max() if granularity == "tensorwise" else None
    codes, scale_inv = oracle.reference_cast(x[rows], dtype, granularity, amax=amax)
    scales = actual.scale_inv[rows] if actual.scale_inv.dim() else actual.scale_inv
    same = (scales == scale_inv) | (scales.isnan() & scale_inv.isnan())
    return int(metrics.mismatches(_take(actual.qdata, rows), codes)) + int((~same).sum())


def _take(codes: Tensor, rows: Tensor) -> Tensor:
    """Rows of a float8 tensor, through its bytes: not every device indexes float8."""
    return codes.view(torch.uint8)[rows].view(codes.dtype)


def _inputs(x: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The timed input, and inputs of its shape and dtype that a wrong cast gets wrong.

    Rowwise, a special first row must leave the other rows alone; tensorwise, it decides the scale of all.
    """
    yield "the timed input", x
    yield "zeros", torch.zeros_like(x)
    decoded = torch.arange(256, dtype=torch.uint8, device=x.device).view(dtype).double()
    finite = decoded[decoded.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    # With the largest value in each row the scale is 1, so that every middle between two codes is a tie.
    ties = torch.cat([finite[-1:], middles, finite]).to(x.dtype)
    ties = ties.repeat(-(-x.numel() // len(ties)))[: x.numel()].view_as(x).clone()
    ties[:, 0] = finite[-1]
    yield "every code and every tie between two", ties
    for name, value in SPECIAL_ROWS.items():
        special = x.clone()
        special[0] = value
        special[0, ::2] *= -1
        yield name, special
    for name, value in SPECIAL_ELEMENTS.items():
        special = x.clone()
        special[0, -1] = value
        yield name, special


SPECIAL_ROWS = {"a row of zeros": 0.0, "a row of denormals": 1e-40, "a row of large values": 3e38}
SPECIAL_ELEMENTS = {"one Inf": float("inf"), "one -Inf": -float("inf"), "one NaN": float("nan")}
