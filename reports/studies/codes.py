"""Study `codes`: does a cast of this device give the codes that the format defines, on every pattern? Numerics, not speed.

    python reports/studies/codes.py device=cpu

Inputs are exhaustive for bfloat16 and float16: all 65,536 patterns. For float32 they are all finite values of the format,
all midpoints of neighbours and points of overflow, each with both float32 neighbours, which is where a cast can go
wrong. The axis `inputs` takes them apart, since casts differ by kind: rounding among subnormals, and what becomes of
values beyond the largest. The reference looks codes up among the decoded ones (`harness.suites.oracle`), saturates as
docs/numerics.md, section 2, defines, and takes NaN as one class.

    plain               x.to(dtype), the result of this version of torch: recorded and not judged
    saturating          fp8core.cast.cast_saturating: 0 mismatches, or the arm fails
    saturating_compile  the same under torch.compile
    kernels             fp8core's fused operators, by an amax that makes the scale 1
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from own_suite import run
from torch import Tensor

from fp8core.cast import cast_saturating
from fp8core.formats import Format, as_element_format
from fp8core.kernels import ops
from harness.store.case import Arm
from harness.suites import oracle
from harness.suites.common import compile_missing, crossed_points, kernels_missing, outcome
from harness.timing import metrics
from harness.timing.compiling import fresh_compile
from harness.timing.workload import ArmInfo, Axis, Numerics, Unsupported, Workload, arm_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.store.case import Case

SOURCES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INPUTS = {
    "normal": "from the smallest normal value to where rounding leaves the format, and 0",
    "subnormal": "smaller, down to what rounds to 0",
    "overflow": "finite, and rounds beyond the largest value",
    "infinity": "Inf and -Inf",
    "nan": "NaN",
}

AXES = {
    "source": Axis("dtype of the input", tuple(SOURCES)),
    "dtype": Axis("FP8 dtype", ("e4m3fn", "e5m2")),
    "inputs": Axis("; ".join(f"{name}: {doc}" for name, doc in INPUTS.items()), tuple(INPUTS)),
}
ARMS = arm_table(
    {
        Arm(variant="plain"): ArmInfo("x.to(dtype)"),
        Arm(variant="saturating"): ArmInfo("fp8core.cast.cast_saturating"),
        Arm(variant="saturating", mode="compile"): ArmInfo(
            "the same under torch.compile", baseline="saturating"
        ),
        Arm(variant="kernels"): ArmInfo("fp8core's fused operators, scale 1", baseline="saturating"),
    }
)


points = crossed_points("codes", "fixed patterns", AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Any device casts; a compiled arm needs a compiler, and kernels an NVIDIA GPU."""
    if arm == "kernels":
        return kernels_missing(device, "cast by their plain twins")
    return compile_missing(device) if ARMS[arm].arm.mode else None


def work(case: Case) -> float:
    """Bytes of the patterns."""
    return float(2**18)


def build(case: Case, arm: str, device: str) -> Workload:
    """Makes the patterns; what is timed is their cast, which is too small to be a speed."""
    fmt = as_element_format(str(case["dtype"]))
    x = patterns(str(case["source"]), fmt, str(case["inputs"])).to(device)
    scale_one = torch.full((), fmt.max, device=device)  # an amax
    cast = _cast(arm, fmt, scale_one)

    def check() -> Numerics:
        wanted, _ = oracle.reference_cast(x, fmt.dtype, "tensorwise", amax=scale_one)
        wrong = metrics.mismatches(cast(x), wanted)
        of = f"{wrong:.0f} of {x.numel()} codes differ from the format's definition"
        fault = f"{of}; 0 expected (docs/numerics.md, section 2)"
        return outcome({"mismatches": wrong}, fault if wrong and arm != "plain" else "")

    return Workload(
        run=lambda: cast(x),
        check=check,
        resolved={
            "evidence": "none" if arm == "plain" else "refutes",
            "timed": "the cast of all patterns: too few for a speed",
            "patterns": x.numel(),
        },
        compiled=bool(ARMS[arm].arm.mode),
    )


def _cast(arm: str, fmt: Format, scale_one: Tensor) -> Callable[[Tensor], Tensor]:
    def saturating(x: Tensor) -> Tensor:
        return cast_saturating(x, fmt)

    if arm == "plain":
        return lambda x: x.to(fmt.dtype)
    if arm == "kernels":
        return lambda x: ops.cast(x.view(1, -1), scale_one, fmt.dtype, False)[0].view(-1)
    return fresh_compile(saturating) if ARMS[arm].arm.mode else saturating


def patterns(source: str, fmt: Format, kind: str) -> Tensor:
    """All inputs of a dtype that are of one kind for a format, on the CPU, [n].

    Args:
        source: a key of `SOURCES`.
        fmt: that they are cast to.
        kind: a key of `INPUTS`.
    """
    x = _all_of(SOURCES[source], fmt)
    size = x.double().abs()
    small = (size > 0) & (size < fmt.min_normal)
    over = size.isfinite() & (size >= fmt.overflow_threshold)
    chosen = {
        "nan": x.isnan(),
        "infinity": x.isinf(),
        "overflow": over,
        "subnormal": small,
        "normal": size.isfinite() & ~small & ~over,
    }
    return x[chosen[kind]]


def _all_of(dtype: torch.dtype, fmt: Format) -> Tensor:
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).double()
    finite = every[every.isfinite()].unique()
    beyond = torch.tensor([fmt.overflow_threshold, 2 * fmt.max, 3e38], dtype=torch.float64)
    points = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, beyond, -beyond]).float()
    infinity = torch.tensor(torch.inf)
    near = (points, points.nextafter(infinity), points.nextafter(-infinity))
    return torch.cat([*near, infinity.view(1), -infinity.view(1), torch.tensor([torch.nan])])


if __name__ == "__main__":
    sys.exit(run("codes", sys.modules[__name__], sys.argv[1:]))
