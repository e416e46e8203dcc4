"""Suite `outliers`: where each recipe breaks, by the distribution of its data. Numerics, not speed.

D [M, N] = A [M, K] @ B [K, N], both operands cast as the recipe casts them for one GEMM, A with outliers, B
Gaussian. Products are summed in float64, so that what is seen is the casts alone and is the same on every device.
The SQNR of the whole result is dominated by the outliers and hides the other elements, so there is `bulk_sqnr_db`:
the product of the elements of A that are no outliers, cast beside those that are. Underflow and saturation are A's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8core.gemm import scaled_mm
from fp8core.recipe import RECIPES, Cast
from fp8core.tensor import Float8Tensor, quantize
from harness.store.arm import Arm
from harness.suites import oracle
from harness.suites.common import draw, generator, refuse_shapes, with_defaults
from harness.suites.extended import extended_table
from harness.suites.oracle import Judgement
from harness.suites.shapes import ROLES
from harness.timing import metrics
from harness.timing.workload import ArmInfo, Axis, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.store.case import Case, Scalar

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
EXACT_DB, EXACT = 120.0, "against the product of the reference's codes; both are summed in float64"

AXES: Mapping[str, Axis] = {
    "data": Axis("; ".join(f"{name}: {doc}" for name, doc in DATA.items()), tuple(DATA)),
    "role": Axis("which GEMM of a linear layer", ROLES),
    "M": Axis("rows of A"),
    "K": Axis("contracted dimension"),
    "N": Axis("columns of B"),
}
# Delayed and static scaling cast like tensorwise by an amax of earlier steps, of which there are none here.
ARMS: Mapping[str, ArmInfo] = extended_table(
    {
        Arm(name): ArmInfo(f"casts of recipe {name}")
        for name, recipe in RECIPES.items()
        if recipe.scaling == "dynamic"
    },
    RECIPES,
)


def points(
    shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
) -> list[dict[str, Scalar]]:
    """No linked axes; M, K and N must be given.

    Raises:
        ValueError: M, K or N is missing, or shapes are named, which this suite has no use for.
    """
    missing = [f"axes.{name}" for name in ("M", "K", "N") if name not in axes]
    if missing:
        raise ValueError(f"suite outliers needs {' and '.join(missing)}")
    refuse_shapes("outliers", shapes, "sizes by axes.M, axes.K and axes.N")
    return with_defaults([{}], axes, AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Any device emulates; a GEMM that the recipe leaves in high precision has nothing to break."""
    role = str(case["role"])
    if RECIPES[arm].gemms[role].is_fp8:
        return None
    return Unsupported("device", f"recipe {arm} leaves GEMM {role} in high precision: nothing is cast")


def work(case: Case) -> float:
    """Floating-point operations of the product."""
    return 2.0 * case.integer("M") * case.integer("K") * case.integer("N")


def build(case: Case, arm: str, device: str) -> Workload:
    """Draws and casts A and B; what is timed is the emulation, and no speed of FP8."""
    gemm = RECIPES[arm].gemms[str(case["role"])]
    assert gemm.a is not None
    assert gemm.b is not None
    casts = gemm.a, gemm.b
    a, b, bulk = operands(case, device)

    def multiply() -> tuple[Float8Tensor, Float8Tensor, Tensor]:
        qa, qb = _quantised(a, casts[0], 1), _quantised(b, casts[1], 0)
        return qa, qb, scaled_mm(qa, qb, torch.float64, backend="reference")

    resolved: dict[str, object] = {
        "timed": "both casts and the emulated product: no evidence of FP8's speed",
        "recipe": arm,
        "a_cast": str(casts[0]),
        "b_cast": str(casts[1]),
        "backend": "reference, float64",
    }
    return Workload(
        run=multiply,
        check=lambda: _check(*multiply(), case, casts, a, b, bulk, resolved),
        resolved=resolved,
    )


def operands(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A [M, K] and B [K, N] in bfloat16, the same for every arm, and which elements of A are no outliers."""
    M, K, N = case.integer("M"), case.integer("K"), case.integer("N")
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


def _check(
    qa: Float8Tensor,
    qb: Float8Tensor,
    result: Tensor,
    case: Case,
    casts: tuple[Cast, Cast],
    a: Tensor,
    b: Tensor,
    bulk: Tensor,
    resolved: dict[str, object],
) -> Numerics:
    """Codes must be the reference's and the product theirs; what the casts lost is recorded, not judged."""
    a_codes, a_inv = oracle.reference_operand(a, casts[0], 1, torch.arange(a.shape[0], device=a.device))
    b_codes, b_inv = oracle.reference_operand(b, casts[1], 0, torch.arange(b.shape[1], device=a.device))
    a_lp, b_lp = oracle.values(a_codes, a_inv), oracle.values(b_codes, b_inv)
    judgement = Judgement(metrics.figures(result, oracle.product(a, b)))
    judgement.at_least("the product", metrics.sqnr_db(result, a_lp @ b_lp), EXACT_DB, EXACT)
    kept = qa.dequantize(torch.float64) * bulk
    judgement.values |= {
        "bulk_sqnr_db": metrics.sqnr_db(oracle.product(kept, b_lp), oracle.product(a * bulk, b)),
        "underflow_frac": metrics.underflow_frac(qa.qdata.float(), a),
        "saturated_frac": metrics.saturated_frac(a.double() / a_inv, casts[0].format.overflow_threshold),
        "mismatches": metrics.mismatches(qa.qdata, a_codes) + metrics.mismatches(qb.qdata, b_codes),
    }
    if judgement.values["mismatches"]:
        judgement.reasons.append(f"{judgement.values['mismatches']:.0f} codes differ from the reference cast")
    if case["data"] in ("randn", "randn_small"):
        formats = casts[0].format.short, casts[1].format.short
        size = case.integer("M"), case.integer("K"), case.integer("N")
        judgement.gaussian("sqnr_db", formats, size, float("inf"))
        resolved["sqnr_bound_db"] = judgement.bounds
    return judgement.verdict()
