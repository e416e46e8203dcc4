"""Study `outliers`: where each recipe breaks, by the distribution of its data. Numerics, not speed.

    python reports/studies/outliers.py device=cpu

D [M, N] = A [M, K] @ B [K, N], both operands cast as the recipe casts them for one GEMM, A with outliers, B
Gaussian. Products are summed in float64, so that what is seen is the casts alone and is the same on every device.
The SQNR of the whole result is dominated by the outliers and hides the other elements, so there is `bulk_sqnr_db`:
the product of the elements of A that are no outliers, cast beside those that are. Underflow and saturation are A's.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from own_suite import run
from torch import Tensor

from fp8core.gemm import scaled_mm
from fp8core.recipe import RECIPES, Cast
from fp8core.tensor import Float8Tensor, quantize
from harness.store.case import Arm
from harness.suites import oracle
from harness.suites.common import crossed_points, draw, flops, generator, lacking, sizes
from harness.suites.extended import extended_table
from harness.suites.oracle import OracleCheck
from harness.suites.shapes import ROLES
from harness.timing import metrics
from harness.timing.workload import ArmInfo, Axis, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from harness.store.case import Case

SHARE = 1e-3  # of the elements of A
FACTORS = {"outliers_1e2": 1e2, "outliers_1e3": 1e3, "outliers_1e4": 1e4, "outliers_1e5": 1e5}
DATA = {
    "randn": "Gaussian",
    "zeros": "all 0",
    "randn_small": "Gaussian times 2^-14, the size of gradients",
    **{name: f"Gaussian, one element in a thousand {f:g} times as large" for name, f in FACTORS.items()},
}
SMALL = 2.0**-14
WEIGHT_STD = 0.02
EXACT = 120.0, "against the product of the reference's codes; both are summed in float64"

AXES = {
    "data": Axis("; ".join(f"{name}: {doc}" for name, doc in DATA.items()), tuple(DATA)),
    "role": Axis("which GEMM of a linear layer", tuple(ROLES)),
    "M": Axis("rows of A"),
    "K": Axis("contracted dimension"),
    "N": Axis("columns of B"),
}
# Delayed and static scaling cast like tensorwise by an amax of earlier steps, of which there are none here. Four bits have no
# second cast among the oracles of suites; tests/fp8core/test_four_bits.py holds theirs.
ARMS = extended_table(
    {
        Arm(name): ArmInfo(f"casts of recipe {name}")
        for name, recipe in RECIPES.items()
        if recipe.scaling == "dynamic" and not recipe.is_four_bit
    },
    RECIPES,
)


points = crossed_points("outliers", "sizes by axes.M, axes.K and axes.N", AXES, required="MKN")


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Any device emulates; a GEMM that the recipe leaves in high precision has nothing to break."""
    role = str(case["role"])
    reason = f"recipe {arm} leaves GEMM {role} in high precision: nothing is cast"
    return lacking(None if RECIPES[arm].gemms[role].is_fp8 else reason)


work = flops


def build(case: Case, arm: str, device: str) -> Workload:
    """Draws and casts A and B; what is timed is the emulation, and no speed of FP8."""
    gemm = RECIPES[arm].gemms[str(case["role"])]
    a_cast, b_cast = gemm.a, gemm.b
    assert a_cast is not None
    assert b_cast is not None
    a, b, bulk = operands(case, device)

    def multiply() -> tuple[Float8Tensor, Float8Tensor, Tensor]:
        qa, qb = _quantised(a, a_cast, 1), _quantised(b, b_cast, 0)
        return qa, qb, scaled_mm(qa, qb, torch.float64, backend="reference")

    def check() -> Numerics:
        """Codes must be the reference's and the product theirs; what the casts lost is recorded, not judged."""
        qa, qb, result = multiply()
        a_codes, a_inv = oracle.reference_operand(a, a_cast, 1, torch.arange(a.shape[0], device=a.device))
        b_codes, b_inv = oracle.reference_operand(b, b_cast, 0, torch.arange(b.shape[1], device=a.device))
        a_lp, b_lp = oracle.values(a_codes, a_inv), oracle.values(b_codes, b_inv)
        judgement = OracleCheck(metrics.figures(result, oracle.product(a, b)))
        judgement.at_least("the product", metrics.sqnr_db(result, a_lp @ b_lp), EXACT)
        kept = qa.dequantize(torch.float64) * bulk
        wrong = metrics.mismatches(qa.qdata, a_codes) + metrics.mismatches(qb.qdata, b_codes)
        judgement.values |= {
            "bulk_sqnr_db": metrics.sqnr_db(oracle.product(kept, b_lp), oracle.product(a * bulk, b)),
            "underflow_frac": metrics.underflow_frac(qa.qdata.float(), a),
            "saturated_frac": metrics.saturated_frac(a.double() / a_inv, a_cast.format.overflow_threshold),
            "mismatches": wrong,
        }
        if wrong:
            judgement.reasons.append(f"{wrong:.0f} codes differ from the reference cast")
        if case["data"] in ("randn", "randn_small"):
            judgement.gaussian("sqnr_db", gemm, sizes(case), float("inf"))
        return judgement.verdict(resolved)

    resolved: dict[str, object] = {
        "evidence": "refutes",
        "timed": "both casts and the emulated product: no evidence of FP8's speed",
        "recipe": arm,
        "a_cast": str(a_cast),
        "b_cast": str(b_cast),
        "backend": "reference, float64",
    }
    return Workload(run=multiply, check=check, resolved=resolved)


def operands(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A [M, K] and B [K, N] in bfloat16, the same for every arm, and which elements of A are no outliers."""
    M, K, N = sizes(case)
    data = str(case["data"])
    a = draw("zeros" if data == "zeros" else "randn", (M, K), generator(device, case.seed, 0))
    b = draw("randn", (N, K), generator(device, case.seed, 1)).t() * WEIGHT_STD
    bulk = torch.ones(M, K, dtype=torch.bool, device=device)
    if data == "randn_small":
        a = a * SMALL
    if data in FACTORS:
        bulk = torch.rand(M, K, device=device, generator=generator(device, case.seed, 2)) >= SHARE
        a = torch.where(bulk, a, a * FACTORS[data])
    return a, b, bulk


def _quantised(x: Tensor, cast: Cast, dim: int) -> Float8Tensor:
    return quantize(
        x, cast.format, cast.granularity, dim=dim, power_of_two=cast.power_of_two, mx_mode=cast.mx_mode
    )


if __name__ == "__main__":
    sys.exit(run("outliers", sys.modules[__name__], sys.argv[1:]))
