"""Suite `accumulation`: how does this device add up the products of an FP8 GEMM? Numerics, not speed.

D [64, 64] = A [64, K] @ B [K, 64] of e4m3 codes with one scale each, returned in float32, against three sums of the same
codes: the exact one, and the two of `fp8core.gemm.accumulate`, a model of Hopper's short register with and without
promotion. The model was made from a paper and never met hardware, so it is no oracle here: what is reported is which
of the three the device agrees with best. All-positive operands tell them apart, since cutting toward zero is a bias
that zero-mean data hide.

    reference                   emulated in float32: what a sum without a short register gives
    slow, fast                  torch._scaled_mm without and with use_fast_accum
    triton_slow, triton_fast    fp8core's kernel likewise
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fp8core.cast import scale_and_cast
from fp8core.formats import E4M3FN
from fp8core.gemm import scaled_mm
from fp8core.gemm.accumulate import Accumulation, accumulate
from fp8core.gemm.layout import Operand, device_reason
from harness.suites import oracle
from harness.suites.common import crossed_points, draw, generator, kernels_missing
from harness.suites.oracle import Judgement
from harness.timing import metrics
from harness.timing.workload import ArmInfo, Axis, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from harness.store.case import Case

LINES = 64  # rows of A and columns of B: a tile of every kernel
FIGURES: dict[Accumulation, str] = {
    "exact": "accum_sqnr_db",
    "fp22": "fp22_sqnr_db",
    "fp22_promote128": "fp22_promote128_sqnr_db",
}

AXES: Mapping[str, Axis] = {
    "K": Axis("contracted dimension", default=4096),
    "data": Axis("randn: Gaussian; positive: its magnitudes", ("positive", "randn")),
}
ARMS: Mapping[str, ArmInfo] = {
    "reference": ArmInfo("emulated in float32"),
    "slow": ArmInfo("torch._scaled_mm"),
    "fast": ArmInfo("torch._scaled_mm, use_fast_accum"),
    "triton_slow": ArmInfo("fp8core::matmul"),
    "triton_fast": ArmInfo("fp8core::matmul, use_fast_accum"),
}
_WAYS = {  # arm -> backend, use_fast_accum
    "reference": ("reference", False),
    "slow": ("torch", False),
    "fast": ("torch", True),
    "triton_slow": ("triton", False),
    "triton_fast": ("triton", True),
}
BACKENDS = {
    "reference": "a float32 product of the codes",
    "torch": "torch._scaled_mm",
    "triton": "fp8core::matmul",
}


points = crossed_points("accumulation", "axes.K", AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """FP8 units, kernels where the arm is of these, and K in multiples of 16."""
    if case.integer("K") % 16:
        return Unsupported("shape", f"K={case['K']}: FP8 GEMMs take multiples of 16")
    if arm == "reference":
        return None
    if _backend(arm) == "triton" and (why := kernels_missing(device, "sum as their plain twin")):
        return why
    reason = device_reason(device, E4M3FN, E4M3FN)
    if not reason and _fast(arm) and torch.device(device).type == "cpu":
        reason = "a CPU ignores use_fast_accum: this arm would repeat the one without it"
    return Unsupported("device", reason) if reason else None


def work(case: Case) -> float:
    """Floating-point operations."""
    return 2.0 * LINES * LINES * case.integer("K")


def build(case: Case, arm: str, device: str) -> Workload:
    """Draws and casts both operands."""
    a, b = operands(case, device)

    def multiply() -> Tensor:
        return scaled_mm(a, b, torch.float32, use_fast_accum=_fast(arm), backend=_backend(arm))

    resolved: dict[str, object] = {
        "timed": "a product of one tile: too small for a speed",
        "out_dtype": "float32",
        "use_fast_accum": _fast(arm),
        "backend": BACKENDS[_backend(arm)],
    }
    return Workload(
        run=multiply,
        check=lambda: _check(multiply(), a, b, case, resolved),
        flops={"e4m3": work(case)},
        resolved=resolved,
    )


def operands(case: Case, device: str) -> tuple[Operand, Operand]:
    """A [64, K] row-major and B [K, 64] column-major in e4m3, tensorwise; the same for every arm."""
    drawn = [draw("randn", (LINES, case.integer("K")), generator(device, case.seed, i)) for i in (0, 1)]
    a, b = (x.abs() if case["data"] == "positive" else x for x in drawn)
    return Operand(*scale_and_cast(a, E4M3FN, "tensorwise", dim=1)), Operand(
        *scale_and_cast(b.t(), E4M3FN, "tensorwise", dim=0)
    )


def _fast(arm: str) -> bool:
    return _WAYS[arm][1]


def _backend(arm: str) -> str:
    return _WAYS[arm][0]


def _check(actual: Tensor, a: Operand, b: Operand, case: Case, resolved: dict[str, object]) -> Numerics:
    """SQNR against each sum; only a result that no known register explains is called wrong."""
    # On the CPU, where float64 costs nothing to speak of and the models' steps are the same for all devices
    a_codes, b_codes = (operand.qdata.cpu().double() for operand in (a, b))
    scale = float(a.scale_inv) * float(b.scale_inv)
    result = actual.cpu().double()
    judgement = Judgement()
    for mode, metric in FIGURES.items():
        judgement.values[metric] = metrics.sqnr_db(result, accumulate(a_codes, b_codes, mode) * scale)
    resolved["agrees_best_with"] = max(FIGURES, key=lambda mode: judgement.values[FIGURES[mode]])
    bound, source = oracle.fast_accum_bound(case.integer("K"), positive=case["data"] == "positive")
    judgement.at_least("the sum", judgement.values["accum_sqnr_db"], bound, source)
    return judgement.verdict()
