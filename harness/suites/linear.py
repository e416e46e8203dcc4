"""Suite `linear`: forward and backward pass of one linear layer, the 2x2 square of eager / compile and bf16 / FP8.

    output      [M, N] = x [M, K] @ weight.T
    grad_input  [M, K] = grad_output [M, N] @ weight
    grad_weight [N, K] = grad_output.T @ x

Everything that the layer does is timed: casts, the three GEMMs, autograd. FP8 is compared with bf16 of the same
mode and compiled bf16 with eager bf16, so that no ratio mixes the gain of FP8 with that of the compiler.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

from fp8core.convert import convert_to_float8_training
from fp8core.gemm import layout
from fp8core.recipe import RECIPES, Cast, Recipe
from harness import metrics
from harness.compiling import fresh_compile
from harness.shapes import linear_points
from harness.suites import oracle
from harness.suites.common import SIZES, Rotation, compile_missing, draw, generator, model_layers, way_out
from harness.suites.oracle import Judgement
from harness.workload import ArmInfo, Axis, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from harness.case import Case, Scalar

Step = Callable[
    [Tensor, Tensor], tuple[Tensor, Tensor, Tensor]
]  # x, grad_output -> output and both gradients

AXES: Mapping[str, Axis] = {
    **SIZES,
    "M": Axis("tokens", linked=True),
    "K": Axis("input features", linked=True),
    "N": Axis("output features", linked=True),
}
TIMED = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # recipes with a reference in `oracle`
ARMS: Mapping[str, ArmInfo] = {
    "bf16_eager": ArmInfo("nn.Linear in bfloat16"),
    "bf16_compile": ArmInfo("nn.Linear in bfloat16 under torch.compile", baseline="bf16_eager"),
    **{
        f"{recipe}_{mode}": ArmInfo(f"Float8Linear, recipe {recipe}, {mode}", baseline=f"bf16_{mode}")
        for recipe in TIMED
        for mode in ("eager", "compile")
    },
}
WEIGHT_STD = 0.02  # GPT-2's initialisation
GRADIENT_STD = (
    2.0**-14
)  # e4m3's smallest subnormal is 2^-9: a cast that forgets to scale turns all of it into zero
CHECKED_LINES = 64  # rows of each GEMM's result
CHECKED_COLUMNS = 512
SCALED_MM = ("aten::_scaled_mm", "aten::_scaled_mm_v2")  # the second is torch.nn.functional.scaled_mm's


def points(
    shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
) -> list[dict[str, Scalar]]:
    """The named layers at each number of tokens, or the product of M, K and N."""
    return linear_points(shapes, axes, model_layers(shapes, model))


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """FP8's sizes and this device's FP8 units for each FP8 GEMM of the recipe; a compiler for compiled arms."""
    recipe, compiled = _parse(arm)
    for name, (a, b) in _fp8_gemms(recipe).items():
        M, K, N = _gemm_sizes(case)[name]
        reason = layout.shape_reason(M, K, N, a.format, b.format)
        if reason:
            why = f"GEMM {name}: {reason}; {way_out(M, K, N, layout.MULTIPLE, 'bf16_eager')}"
            return Unsupported("shape", why)
        reason = layout.device_reason(device, a.format, b.format)
        if reason:
            return Unsupported("device", reason)
    return compile_missing(device) if compiled else None


def work(case: Case) -> float:
    """Floating-point operations of the three GEMMs."""
    return 3 * _gemm_flops(case)


def build(case: Case, arm: str, device: str) -> Workload:
    """Makes the layer, converts and compiles it as the arm says, and times forward and backward."""
    recipe, compiled = _parse(arm)
    x, weight, grad = _operands(case, device)
    layer: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    if recipe is not None:
        layer = convert_to_float8_training(layer, config=recipe)
    step = _step(layer, compiled)
    resolved: dict[str, object] = {
        "timed": "forward and backward of one linear layer, casts included",
        "module": type(layer).__name__,
        "recipe": recipe.name if recipe else "bf16",
        "backend": recipe.backend if recipe else "torch.mm",
        "compile": "fullgraph, static shapes" if compiled else "eager",
    }
    return Workload(
        run=lambda: step(x, grad),
        check=lambda: _check(step, recipe, case, (x, weight, grad), resolved),
        flops=_flops(case, recipe),
        resolved=resolved,
        compiled=compiled,
        variants=Rotation(step, (x, grad), device),
    )


def _parse(arm: str) -> tuple[Recipe | None, bool]:
    """The recipe (None for bf16) of an arm, and whether it is compiled."""
    name, _, mode = arm.rpartition("_")
    return (None if name == "bf16" else RECIPES[name]), mode == "compile"


def _step(layer: nn.Module, compiled: bool) -> Step:
    """One forward and backward pass; only the forward needs compiling, its backward comes with it."""
    weight = layer.weight
    assert isinstance(weight, Tensor)

    def forward(x: Tensor) -> Tensor:
        return layer(x)

    run = fresh_compile(forward) if compiled else forward

    def step(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output = run(x)
        grad_input, grad_weight = torch.autograd.grad(output, (x, weight), grad)
        return output.detach(), grad_input, grad_weight

    return step


@functools.lru_cache(maxsize=1)  # every arm of a case has the same operands, not copies of them
def _operands(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K], weight [N, K] and grad_output [M, N] in bfloat16, Gaussian of the sizes met in training."""
    M, K, N = _gemm_sizes(case)["output"]
    x = draw("randn", (M, K), generator(device, case.seed, 0)).requires_grad_()
    weight = draw("randn", (N, K), generator(device, case.seed, 1)) * WEIGHT_STD
    grad = draw("randn", (M, N), generator(device, case.seed, 2)) * GRADIENT_STD
    return x, weight, grad


def _gemm_sizes(case: Case) -> dict[str, tuple[int, int, int]]:
    """M, K, N of each of the three GEMMs, by name."""
    M, K, N = case.integer("M"), case.integer("K"), case.integer("N")
    return {"output": (M, K, N), "grad_input": (M, N, K), "grad_weight": (N, M, K)}


def _gemm_flops(case: Case) -> float:
    M, K, N = _gemm_sizes(case)["output"]
    return 2.0 * M * K * N


def _fp8_gemms(recipe: Recipe | None) -> dict[str, tuple[Cast, Cast]]:
    """The operands' casts of each GEMM that the recipe runs in FP8."""
    if recipe is None:
        return {}
    return {name: (g.a, g.b) for name, g in recipe.gemms.items() if g.a is not None and g.b is not None}


def _flops(case: Case, recipe: Recipe | None) -> dict[str, float]:
    """By the dtype of each GEMM; one with an e5m2 operand counts as e5m2."""
    fp8 = [{a.format.short, b.format.short} for a, b in _fp8_gemms(recipe).values()]
    dtypes = Counter("e5m2" if "e5m2" in formats else "e4m3" for formats in fp8)
    dtypes["bf16"] = 3 - len(fp8)
    return {dtype: count * _gemm_flops(case) for dtype, count in dtypes.items() if count}


def _check(
    step: Step,
    recipe: Recipe | None,
    case: Case,
    operands: tuple[Tensor, Tensor, Tensor],
    resolved: dict[str, object],
) -> Numerics:
    """Judges each GEMM's result, and counts the FP8 GEMMs that a profiler saw in the same pass."""
    x, weight, grad = (t.detach() for t in operands)
    on_gpu = x.device.type == "cuda"
    # Kineto writes each start to stderr unless told otherwise; without a GPU the older tracer starts a second faster.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(use_kineto=on_gpu, use_device="cuda" if on_gpu else None) as profiler:
        results = step(operands[0], operands[2])
        if on_gpu:
            torch.cuda.synchronize()
    events = profiler.function_events or []
    ran = sum(event.name in SCALED_MM for event in events)
    casts = _fp8_gemms(recipe)
    resolved |= {"fp8_gemms": ran, "fp8_gemms_expected": len(casts)}
    if on_gpu:
        resolved["kernels"] = sorted({e.name[:160] for e in events if e.device_type == DeviceType.CUDA})

    judgement = Judgement()
    pairs = {"output": (x, weight.t()), "grad_input": (grad, weight), "grad_weight": (grad.t(), x)}
    for (name, (a, b)), result in zip(pairs.items(), results, strict=True):
        fast = recipe is not None and recipe.gemms[name].fast_accum and on_gpu
        _judge(judgement, name, a, b, result, casts.get(name), fast, case.seed)
    if ran != len(casts):
        judgement.reasons.append(f"{ran} FP8 GEMMs ran where {len(casts)} were due: FP8 did not run as asked")
    if judgement.bounds:
        resolved["sqnr_bound_db"] = judgement.bounds
    return judgement.verdict()


def _judge(
    judgement: Judgement,
    name: str,
    a: Tensor,
    b: Tensor,
    result: Tensor,
    casts: tuple[Cast, Cast] | None,
    fast: bool,
    seed: int,
) -> None:
    """One GEMM a [M, K] @ b [K, N] on a random choice of its rows and columns."""
    device = str(a.device)
    rows = oracle.sample_rows(a.shape[0], seed, CHECKED_LINES, device)
    columns = oracle.sample_rows(b.shape[1], seed + 1, CHECKED_COLUMNS, device)
    part, a_part, b_part = result[rows][:, columns], a[rows], b[:, columns]
    exact = oracle.product(a_part, b_part)
    figures = metrics.figures(part, exact)
    prefix = "" if name == "output" else f"{name}_"
    judgement.values[f"{prefix}sqnr_db"] = figures["sqnr_db"]
    judgement.values[f"{prefix}sqnr_row_min_db"] = figures["sqnr_row_min_db"]
    if name == "output":
        judgement.values["rel_err_max"] = figures["rel_err_max"]
    if casts is None:
        judgement.rounded(name, part, exact, oracle.BF16_MATMUL_DB, oracle.BF16_MATMUL)
        return
    lp_a = oracle.reference_operand(a_part, casts[0], dim=1, whole=a)
    lp_b = oracle.reference_operand(b_part, casts[1], dim=0, whole=b)
    every_row = torch.arange(len(rows), device=device)
    bound, source = oracle.fast_accum_bound(a.shape[1]) if fast else oracle.rounded_bound(device)
    accumulation = judgement.rounded(
        name, part, oracle.product_of_codes(lp_a, lp_b, every_row), bound, source
    )
    formats = casts[0].format.short, casts[1].format.short
    size = (len(rows), a.shape[1], len(columns))
    judgement.gaussian(f"{prefix}sqnr_db", formats, size, accumulation)
    low = judgement.values.get("accum_sqnr_db", accumulation)
    judgement.values["accum_sqnr_db"] = min(low, accumulation)
