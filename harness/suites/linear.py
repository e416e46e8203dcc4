"""Suite `linear`: forward and backward pass of one linear layer, the 2x2 square of eager / compile and bf16 / FP8.

    output      [M, N] = x [M, K] @ weight.T
    grad_input  [M, K] = grad_output [M, N] @ weight
    grad_weight [N, K] = grad_output.T @ x

Everything that the layer does is timed: casts, the three GEMMs, autograd. FP8 is compared with bf16 of the same
mode and compiled bf16 with eager bf16, so that no ratio mixes the gain of FP8 with that of the compiler. Arms of
peers (`harness.peers`) are `<peer>_<recipe>_<mode>`: the same weight, inputs and checks.

Eager casts are fp8core's kernels where they run, compiled ones plain code that the compiler fuses. Two more arms
turn that round and so show what it is worth: `<recipe>_plain_eager`, `<recipe>_kernels_compile`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8core.convert import convert_to_float8_training
from fp8core.gemm import backend_named, layout
from fp8core.history import update_scales
from fp8core.inputs.operands import casts_route
from fp8core.recipe import RECIPES, Cast, Recipe
from fp8core.watching import count_fp8_gemms
from harness.peers import PEERS, Peer, peer_of
from harness.peers.peer import fp8_kernels
from harness.store.arm import Arm
from harness.store.cause import Cause
from harness.suites import oracle
from harness.suites.common import (
    SIZES,
    Rotation,
    compile_missing,
    covering,
    draw,
    generator,
    kernel_names,
    kernels_missing,
    model_layers,
    peer_missing,
    profiled,
    way_out,
)
from harness.suites.extended import extended_table
from harness.suites.oracle import Judgement
from harness.suites.shapes import linear_points
from harness.timing import metrics
from harness.timing.compiling import fresh_compile
from harness.timing.workload import ArmInfo, Axis, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from fp8core.recipe import Kernels
    from harness.store.case import Case, Scalar

Step = Callable[
    [Tensor, Tensor], tuple[Tensor, Tensor, Tensor]
]  # x, grad_output -> output and both gradients

AXES: Mapping[str, Axis] = {
    **SIZES,
    "M": Axis("tokens", linked=True),
    "K": Axis("input features", linked=True),
    "N": Axis("output features", linked=True),
}
ARMS: Mapping[str, ArmInfo] = extended_table(
    {
        Arm("bf16", "eager"): ArmInfo("nn.Linear in bfloat16"),
        Arm("bf16", "compile"): ArmInfo("nn.Linear in bfloat16 under torch.compile", baseline="bf16_eager"),
        **{
            Arm(recipe, mode): ArmInfo(f"Float8Linear, recipe {recipe}, {mode}", baseline=f"bf16_{mode}")
            for recipe in RECIPES
            for mode in ("eager", "compile")
        },
        **{
            Arm(recipe, "eager", "plain"): ArmInfo(
                f"{recipe}_eager without kernels for its casts", baseline="bf16_eager"
            )
            for recipe in RECIPES
        },
        **{
            Arm(recipe, "compile", "kernels"): ArmInfo(
                f"{recipe}_compile with kernels for its casts, into which the compiler can't look",
                baseline="bf16_compile",
            )
            for recipe in RECIPES
        },
        **{
            Arm(recipe, mode, peer=peer.arm): ArmInfo(
                f"{peer.doc}, recipe {recipe}, {mode}", baseline=f"bf16_{mode}", peer=name
            )
            for name, peer in PEERS.items()
            if peer.linear is not None
            for recipe in peer.recipes
            for mode in peer.modes
        },
    },
    RECIPES,
    PEERS,
)
WEIGHT_STD = 0.02  # GPT-2's initialisation
GRADIENT_STD = (
    2.0**-14
)  # e4m3's smallest subnormal is 2^-9: a cast that forgets to scale turns all of it into zero
CHECKED_LINES = 64  # rows of each GEMM's result
CHECKED_COLUMNS = 512
CASTS: Mapping[str, Kernels] = {"plain": "never", "kernels": "always"}  # word of an arm -> Recipe.kernels


def points(
    shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
) -> list[dict[str, Scalar]]:
    """The named layers at each number of tokens, or the product of M, K and N."""
    return linear_points(shapes, axes, model_layers(shapes, model))


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """FP8's sizes and this device's kernels for each FP8 GEMM of the recipe; the peer; a compiler."""
    recipe, peer, compiled = _parse(arm)
    why = gemms_unsupported(case, recipe, device)
    if peer is not None and recipe is not None and (why is None or why.kind == "device"):
        # Where a peer is absent, how to get it says more than what this device lacks.
        absent = peer_missing(peer, device)
        reason = None if absent or why else peer.unfit(recipe.name, device)
        why = absent or (Unsupported("device", reason) if reason else why)
    if why is None and recipe is not None and recipe.kernels != "auto":
        why = kernels_missing(device, f"repeat {recipe.name}_{'compile' if compiled else 'eager'}")
    return why or (compile_missing(device) if compiled else None)


def gemms_unsupported(case: Case, recipe: Recipe | None, device: str) -> Unsupported | None:
    """The first FP8 GEMM of the recipe that no device, or not this one, has a kernel for."""
    for name, (a, b) in _fp8_gemms(recipe).items():
        M, K, N = _gemm_sizes(case)[name]
        assert recipe is not None
        rules, granularity = backend_named(recipe.backend), recipe.gemms[name].granularity
        reason = rules.shape_reason(M, K, N, a.format, b.format, granularity)
        if reason:
            why = f"GEMM {name}: {reason}; {way_out(M, K, N, layout.MULTIPLE, 'bf16_eager')}"
            return Unsupported("shape", why)
        reason = rules.device_reason(device, a.format, b.format)
        reason = reason or rules.granularity_reason(device, granularity, recipe.nearest)
        if reason:
            return Unsupported("device", reason)
    return None


def work(case: Case) -> float:
    """Floating-point operations of the three GEMMs."""
    return 3 * _gemm_flops(case)


def build(case: Case, arm: str, device: str) -> Workload:
    """Makes the layer, converts and compiles it as the arm says, and times forward and backward."""
    recipe, peer, compiled = _parse(arm)
    x, weight, grad = operands(case, device)
    layer = make_layer(weight, recipe, peer)
    warm_up(layer, recipe, x, grad)
    step = step_of(layer, compiled)
    resolved: dict[str, object] = {
        "timed": "forward and backward of one linear layer, casts included",
        "module": type(layer).__name__,
        "recipe": recipe.name if recipe else "bf16",
        "backend": peer.doc if peer else backend_of(recipe, device),
        "compile": "fullgraph, static shapes" if compiled else "eager",
    }
    if peer is not None:
        resolved |= {"peer": peer.arm, "peer_version": peer.version()}
        if not peer.operators:
            resolved["fp8_gemms_by"] = "kernel names"
    elif recipe is not None:
        by_compiler = compiled and recipe.kernels != "always"
        resolved["casts"] = (
            "plain PyTorch, fused by the compiler" if by_compiler else casts_route(weight, recipe)
        )
    return workload(case, recipe, step, (x, weight, grad), resolved)


def backend_of(recipe: Recipe | None, device: str) -> str:
    """Who multiplies: fp8core's own kernel has a plain twin where it can't run."""
    if recipe is None:
        return "torch.mm"
    twin = recipe.backend == "triton" and kernels_missing(device, "") is not None
    return f"{recipe.backend}, its plain twin" if twin else recipe.backend


def workload(
    case: Case,
    recipe: Recipe | None,
    step: Step,
    operands: tuple[Tensor, Tensor, Tensor],
    resolved: dict[str, object],
) -> Workload:
    """The timed step over `operands` (x, weight, grad_output), with what it is checked against and declares."""
    x, _, grad = operands
    return Workload(
        run=lambda: step(x, grad),
        check=lambda: _check(step, recipe, case, operands, resolved),
        flops=_flops(case, recipe),
        resolved=resolved,
        compiled=resolved["compile"] != "eager",
        variants=Rotation(step, (x, grad), str(x.device)),
        covering=covering(step, (x, grad), str(x.device)),
    )


def _parse(arm: str) -> tuple[Recipe | None, Peer | None, bool]:
    """The recipe (None for bf16) of an arm, whose layer it is (None for ours), and whether it is compiled."""
    record = ARMS[arm].arm
    recipe = RECIPES[record.recipe] if record.has_fp8 else None
    if recipe is not None and record.casts:
        recipe = recipe.with_kernels(CASTS[record.casts])
    return recipe, peer_of(record), record.mode == "compile"


def make_layer(weight: Tensor, recipe: Recipe | None, peer: Peer | None = None) -> nn.Module:
    """A layer without bias over weight [N, K]: nn.Linear, Float8Linear of the recipe, or the peer's."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    if recipe is None:
        return layer
    if peer is None:
        return convert_to_float8_training(layer, config=recipe)
    assert peer.linear is not None
    return peer.linear(layer, recipe.name)


def warm_up(layer: nn.Module, recipe: Recipe | None, x: Tensor, grad: Tensor) -> None:
    """One step of delayed or static scaling, so that what is timed takes its scales from an earlier step.

    The step is over the same data, so the codes are those of dynamic scaling and have the same reference.
    """
    if recipe is not None and recipe.scaling != "dynamic":
        step_of(layer)(x, grad)
        update_scales(layer)


def step_of(layer: nn.Module, compiled: bool = False) -> Step:
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
def operands(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
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
    """By the dtype of each GEMM; one with an e5m2 operand counts as e5m2, an emulated one as fp32."""
    if recipe is not None and not backend_named(recipe.backend).is_fp8:
        count = len(_fp8_gemms(recipe))
        flops = {"fp32": count * _gemm_flops(case), "bf16": (3 - count) * _gemm_flops(case)}
        return {dtype: amount for dtype, amount in flops.items() if amount}
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
    results, events = profiled(lambda: step(operands[0], operands[2]), str(x.device))
    by_name = "fp8_gemms_by" in resolved
    ran = fp8_kernels(events) if by_name else count_fp8_gemms(events)
    casts = _fp8_gemms(recipe)
    due = len(casts) if recipe is not None and backend_named(recipe.backend).is_fp8 else 0
    resolved |= {"fp8_gemms": ran, "fp8_gemms_expected": due, **kernel_names(events)}

    judgement = Judgement()
    pairs = {"output": (x, weight.t()), "grad_input": (grad, weight), "grad_weight": (grad.t(), x)}
    for (name, (a, b)), result in zip(pairs.items(), results, strict=True):
        fast = due > 0 and recipe is not None and recipe.gemms[name].fast_accum and on_gpu
        _judge(judgement, name, a, b, result, casts.get(name), fast, case.seed)
    if ran < due or (ran > due and not by_name):  # one GEMM may be several kernels
        judgement.reasons.append(f"{ran} FP8 GEMMs ran where {due} were due: FP8 did not run as asked")
        judgement.cause = Cause.NOT_FP8
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
    lp_a = oracle.values(*oracle.reference_operand(a, casts[0], 1, rows))
    lp_b = oracle.values(*oracle.reference_operand(b, casts[1], 0, columns))
    bound, source = oracle.fast_accum_bound(a.shape[1]) if fast else oracle.rounded_bound(device)
    accumulation = judgement.rounded(name, part, oracle.product(lp_a, lp_b), bound, source)
    formats = casts[0].format.short, casts[1].format.short
    size = (len(rows), a.shape[1], len(columns))
    judgement.gaussian(f"{prefix}sqnr_db", formats, size, accumulation)
    low = judgement.values.get("accum_sqnr_db", accumulation)
    judgement.values["accum_sqnr_db"] = min(low, accumulation)
