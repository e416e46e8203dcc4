"""Study `accumulation`: how does this device add up the products of an FP8 GEMM? Numerics, not speed.

    python reports/studies/accumulation.py

D [64, 64] = A [64, K] @ B [K, 64] of e4m3 codes with one scale each, returned in float32, against three sums of the same
codes: the exact one, and the two of `fp8core.proof.adders`, a model of Hopper's short register with and without
promotion. The model was made from a paper and never met hardware, so it is no oracle here: what is reported is which
of the three the device agrees with best. All-positive operands tell them apart, since cutting toward zero is a bias
that zero-mean data hide.

    reference                   emulated in float32: what a sum without a short register gives
    slow, fast                  torch._scaled_mm without and with use_fast_accum
    triton_slow, triton_fast    fp8core's kernel likewise
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from own_suite import run

from fp8core.cast import scale_and_cast
from fp8core.formats import E4M3FN
from fp8core.gemm import scaled_mm
from fp8core.gemm.layout import Operand
from fp8core.proof.adders import Register, accumulate
from fp8core.recipe import Cast, Gemm
from harness.suites import oracle
from harness.suites.common import (
    crossed_points,
    draw,
    fast_accum_missing,
    gemm_missing,
    generator,
    kernels_missing,
)
from harness.suites.gemm import OPERATORS
from harness.suites.oracle import OracleCheck
from harness.timing import metrics
from harness.timing.workload import ArmInfo, Axis, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from harness.store.case import Case

LINES = 64  # rows of A and columns of B: a tile of every kernel
MODELS = {"exact": None, "fp22": Register(13), "fp22_promote128": Register(13, 128)}
FIGURES = {"exact": "accum_sqnr_db", "fp22": "fp22_sqnr_db", "fp22_promote128": "fp22_promote128_sqnr_db"}

AXES = {
    "K": Axis("contracted dimension", default=4096),
    "data": Axis("randn: Gaussian; positive: its magnitudes", ("positive", "randn")),
}
_WAYS = {  # arm -> backend, use_fast_accum
    "reference": ("reference", False),
    "slow": ("torch", False),
    "fast": ("torch", True),
    "triton_slow": ("triton", False),
    "triton_fast": ("triton", True),
}
_RAN = {"reference": "a float32 product of the codes", **OPERATORS}  # by backend
ARMS = {
    name: ArmInfo(_RAN[backend] + (", use_fast_accum" if fast else ""))
    for name, (backend, fast) in _WAYS.items()
}
GEMM = Gemm(Cast(E4M3FN), Cast(E4M3FN))


points = crossed_points("accumulation", "axes.K", AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """FP8 units, kernels where the arm is of these, and K in multiples of 16."""
    if case.integer("K") % 16:
        return Unsupported("shape", f"K={case['K']}: FP8 GEMMs take multiples of 16")
    backend, fast = _WAYS[arm]
    why = kernels_missing(device, "sum as their plain twin") if backend == "triton" else None
    why = why or gemm_missing(GEMM, backend, device)
    return why or (fast_accum_missing(device) if fast else None)


def work(case: Case) -> float:
    """Floating-point operations."""
    return 2.0 * LINES * LINES * case.integer("K")


def build(case: Case, arm: str, device: str) -> Workload:
    """Draws and casts both operands."""
    a, b = operands(case, device)
    backend, fast = _WAYS[arm]

    def multiply() -> torch.Tensor:
        return scaled_mm(a, b, torch.float32, use_fast_accum=fast, backend=backend)

    def check() -> Numerics:
        """SQNR against each sum; only a result that no known register explains is called wrong."""
        # On the CPU, where float64 costs nothing to speak of and the models' steps are the same for all devices
        a_codes, b_codes = (operand.qdata.cpu().double() for operand in (a, b))
        scale = float(a.scale_inv) * float(b.scale_inv)
        result, figures = multiply().cpu().double(), {}
        for mode in FIGURES:
            figures[mode] = metrics.sqnr_db(result, summed(a_codes, b_codes, mode) * scale)
        resolved["agrees_best_with"] = max(figures, key=lambda mode: figures[mode])
        judgement = OracleCheck({FIGURES[mode]: figure for mode, figure in figures.items()})
        bound = oracle.fast_accum_bound(case.integer("K"), positive=case["data"] == "positive")
        judgement.at_least("the sum", figures["exact"], bound)
        return judgement.verdict(resolved)

    resolved: dict[str, object] = {
        "timed": "a product of one tile: too small for a speed",
        "out_dtype": "float32",
        "use_fast_accum": fast,
        "backend": _RAN[backend],
    }
    return Workload(run=multiply, check=check, flops={"e4m3": work(case)}, resolved=resolved)


def summed(a: torch.Tensor, b: torch.Tensor, mode: str) -> torch.Tensor:
    """One of the three sums of a product of codes, float64."""
    register = MODELS[mode]
    return a @ b if register is None else accumulate(a, b, register)


def operands(case: Case, device: str) -> tuple[Operand, Operand]:
    """A [64, K] row-major and B [K, 64] column-major in e4m3, tensorwise; the same for every arm."""
    drawn = [draw("randn", (LINES, case.integer("K")), generator(device, case.seed, i)) for i in (0, 1)]
    a, b = (x.abs() if case["data"] == "positive" else x for x in drawn)
    one, other = (scale_and_cast(x, E4M3FN, "tensorwise", dim=dim) for x, dim in ((a, 1), (b.t(), 0)))
    return Operand(*one), Operand(*other)


if __name__ == "__main__":
    sys.exit(run("accumulation", sys.modules[__name__], sys.argv[1:]))
