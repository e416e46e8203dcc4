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
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fp8core import four_bits
from fp8core.convert import convert_to_float8_training
from fp8core.gemm import backend_named
from fp8core.history import update_scales
from fp8core.inputs.operands import casts_route
from fp8core.proof.profiled_gemms import fp8_gemms
from fp8core.recipe import RECIPES, Recipe
from harness.peers import PEERS, Peer, peer_of
from harness.peers.peer import fp8_kernels
from harness.store.case import Arm
from harness.store.errors import Cause
from harness.suites import axes_of, oracle
from harness.suites.common import (
    JUDGED,
    compile_missing,
    draw,
    flops,
    gemm_missing,
    gemm_refused,
    generator,
    kernel_names,
    kernels_missing,
    lacking,
    layer_points,
    peer_facts,
    peer_missing,
    profiled,
    sizes,
    timed,
)
from harness.suites.extended import extended_table
from harness.suites.oracle import OracleCheck
from harness.suites.shapes import gemm_sizes, linear_points
from harness.timing import metrics
from harness.timing.compiling import fresh_compile
from harness.timing.workload import ArmInfo, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fp8core.recipe import Gemm, Kernels
    from harness.store.case import Case

Tensors = tuple[Tensor, Tensor, Tensor]
LayerStep = Callable[[Tensor, Tensor], Tensors]  # x, grad_output -> output and both gradients

AXES = axes_of("linear")
CASTS: Mapping[str, Kernels] = {"plain": "never", "kernels": "always"}  # word of an arm -> Recipe.kernels
_OURS = (  # the arms of a recipe: mode, casts, what it is
    ("eager", "", "Float8Linear, recipe {}, eager"),
    ("compile", "", "Float8Linear, recipe {}, compile"),
    ("eager", "plain", "{}_eager without kernels for its casts"),
    ("compile", "kernels", "{}_compile with kernels for its casts, into which the compiler can't look"),
)
ARMS = extended_table(
    {
        Arm("bf16", "eager"): ArmInfo("nn.Linear in bfloat16"),
        Arm("bf16", "compile"): ArmInfo("nn.Linear in bfloat16 under torch.compile", baseline="bf16_eager"),
        **{
            Arm(recipe, mode, casts): ArmInfo(doc.format(recipe), baseline=f"bf16_{mode}")
            for recipe in RECIPES
            for mode, casts, doc in _OURS
            if not (casts and RECIPES[recipe].is_four_bit)  # no kernel casts to four bits
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
)  # e4m3's smallest subnormal is 2^-9: a cast that forgets to scale makes all of it zero
CHECKED_LINES, CHECKED_COLUMNS = 64, 512  # of each GEMM's result


points = layer_points(linear_points, AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """FP8's sizes and this device's kernels for each FP8 GEMM of the recipe; the peer; a compiler."""
    recipe, peer, compiled = _parse(arm)
    why = gemms_unsupported(case, recipe, device)
    if peer is not None and recipe is not None and (why is None or why.kind == "device"):
        # Where a peer is absent, how to get it says more than what this device lacks.
        why = peer_missing(peer, device) or why or lacking(peer.unfit(recipe.name, device))
    if why is None and recipe is not None and recipe.kernels != "auto":
        why = kernels_missing(device, f"repeat {recipe.name}_{'compile' if compiled else 'eager'}")
    return why or (compile_missing(device, recipe) if compiled else None)


def gemms_unsupported(case: Case, recipe: Recipe | None, device: str) -> Unsupported | None:
    """The first FP8 GEMM of the recipe that no device, or not this one, has a kernel for."""
    for name, gemm in recipe.gemms.items() if recipe else ():
        assert recipe is not None
        size = gemm_sizes(*sizes(case))[name]
        why = gemm_refused(size, gemm, recipe.backend, f"GEMM {name}: ")
        if why := why or gemm_missing(gemm, recipe.backend, device, recipe.nearest):
            return why
    return None


def work(case: Case) -> float:
    """Floating-point operations of the three GEMMs."""
    return 3 * flops(case)


def build(case: Case, arm: str, device: str) -> Workload:
    """Makes the layer, converts and compiles it as the arm says, and times forward and backward."""
    recipe, peer, compiled = _parse(arm)
    x, weight, grad = operands(case, device)
    layer = make_layer(weight, recipe, peer)
    warm_up(layer, recipe, x, grad)
    resolved = {
        "compile": "fullgraph, static shapes" if compiled else "eager",
        "backend": peer.doc if peer else backend_of(recipe, device),
        **peer_facts(peer),
    }
    if peer is not None:
        if not peer.operators:
            resolved["fp8_gemms_by"] = "kernel names"
    elif recipe is not None:
        by_compiler = compiled and recipe.kernels != "always"
        plain = "plain PyTorch, fused by the compiler"
        resolved["casts"] = plain if by_compiler else casts_route(weight, recipe)
    return workload(case, recipe, layer, (x, weight, grad), resolved)


def backend_of(recipe: Recipe | None, device: str) -> str:
    """Who multiplies: fp8core's own kernel has a plain twin where it can't run."""
    if recipe is None:
        return "torch.mm"
    twin = recipe.backend == "triton" and kernels_missing(device, "") is not None
    return f"{recipe.backend}, its plain twin" if twin else recipe.backend


def workload(
    case: Case, recipe: Recipe | None, layer: nn.Module, operands: Tensors, resolved: dict[str, object]
) -> Workload:
    """The timed step over `operands` (x, weight, grad_output), with what it is checked against and declares.

    Args:
        case: the sizes.
        recipe: of the layer.
        layer: compiled here where `resolved["compile"]` says so.
        operands: as `operands` draws them.
        resolved: what else runs: "compile", "backend".
    """
    M, K, N = sizes(case)
    x, weight, grad = operands
    compiled = resolved["compile"] != "eager"
    step = step_of(layer, compiled)
    resolved |= {
        "timed": "forward and backward of one linear layer, casts included",
        "module": type(layer).__name__,
        "recipe": recipe.name if recipe else "bf16",
    }
    if (
        recipe is not None and not backend_named(recipe.backend).is_fp8
    ):  # its times are those of high precision
        resolved.setdefault(
            "emulated", f"recipe {recipe.name} is multiplied in high precision on every device"
        )

    def judge(results: Tensors, given: Sequence[Tensor], seed: int) -> str:
        """Results of the timed calls against those of their own x and grad_output; the weight stays."""
        own = given[0], weight, given[1]
        shapes = [list(result.shape) for result in results]
        if shapes != (due := [[M, N], [M, K], [N, K]]):
            return f"results of shapes {shapes}, {due} expected"
        judgement = OracleCheck()
        for name, _, _, part, exact, bound in _parts(results, recipe, own, seed, (JUDGED, JUDGED)):
            judgement.rounded(name, part, exact, bound)
        return "; ".join(judgement.reasons)

    return timed(
        step,
        (x, grad),
        lambda: _check(step, recipe, case, operands, resolved),
        judge,
        flops=_flops(case, recipe),
        resolved=resolved,
        compiled=compiled,
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


def step_of(layer: nn.Module, compiled: bool = False) -> LayerStep:
    """One forward and backward pass; only the forward needs compiling, its backward comes with it."""
    weight = layer.weight
    assert isinstance(weight, Tensor)

    def forward(x: Tensor) -> Tensor:
        return layer(x)

    run = fresh_compile(forward) if compiled else forward

    def step(x: Tensor, grad: Tensor) -> Tensors:
        output = run(x)
        grad_input, grad_weight = torch.autograd.grad(output, (x, weight), grad)
        return output.detach(), grad_input, grad_weight

    return step


@functools.lru_cache(maxsize=1)  # every arm of a case has the same operands, not copies of them
def operands(case: Case, device: str) -> Tensors:
    """x [M, K], weight [N, K] and grad_output [M, N] in bfloat16, Gaussian of the sizes met in training."""
    M, K, N = sizes(case)
    x, weight, grad = (
        draw("randn", shape, generator(device, case.seed, stream))
        for stream, shape in enumerate(((M, K), (N, K), (M, N)))
    )
    return x.requires_grad_(), weight * WEIGHT_STD, grad * GRADIENT_STD


def _flops(case: Case, recipe: Recipe | None) -> dict[str, float]:
    """By the dtype of each GEMM; one with an e5m2 operand counts as e5m2, an emulated one as fp32."""
    emulated = recipe is not None and not backend_named(recipe.backend).is_fp8
    dtypes: Counter[str] = Counter()
    for gemm in recipe.gemms.values() if recipe else ():
        formats = [cast.format.short for cast in (gemm.a, gemm.b) if cast is not None]
        own = "fp32" if emulated else "e5m2" if "e5m2" in formats else "e4m3"
        dtypes[own if gemm.is_fp8 else "bf16"] += 1
    return {dtype: count * flops(case) for dtype, count in (dtypes or {"bf16": 3}).items()}


def _check(
    step: LayerStep, recipe: Recipe | None, case: Case, operands: Tensors, resolved: dict[str, object]
) -> Numerics:
    """Judges each GEMM's result on some rows and columns, and counts the FP8 GEMMs that a profiler saw in the same pass."""
    x, weight, grad = (t.detach() for t in operands)
    device = str(x.device)
    results, events = profiled(lambda: step(operands[0], operands[2]), device)
    by_name = "fp8_gemms_by" in resolved
    ran = fp8_kernels(events) if by_name else len(fp8_gemms(events))
    due = recipe.fp8_gemms if recipe is not None and backend_named(recipe.backend).is_fp8 else 0
    resolved |= {"fp8_gemms": ran, "fp8_gemms_expected": due, **kernel_names(events)}

    judgement = OracleCheck()
    for name, gemm, (a, b), part, exact, bound in _parts(results, recipe, (x, weight, grad), case.seed):
        prefix = "" if name == "output" else f"{name}_"
        uncast = gemm is None or not gemm.is_fp8
        for metric, figure in metrics.figures(part, exact if uncast else oracle.product(a, b)).items():
            if not prefix or metric != "rel_err_max":
                judgement.values[prefix + metric] = figure
        if gemm is not None and gemm.is_four_bit:
            judgement.four_bits(name, f"{prefix}sqnr_db")
            if not _is_stochastic(gemm):
                judgement.rounded(name, part, exact, bound)
        elif gemm is None or uncast:
            judgement.rounded(name, part, exact, bound)
            judgement.bounds[f"{prefix}sqnr_db"] = bound[0]
        else:
            judgement.fp8(name, part, exact, bound, gemm, a.shape[1], prefix)
    if ran < due or (ran > due and not by_name):  # one GEMM may be several kernels
        judgement.reasons.append(f"{ran} FP8 GEMMs ran where {due} were due: FP8 did not run as asked")
        judgement.cause = Cause.NOT_FP8
    return judgement.verdict(resolved)


def _is_stochastic(gemm: Gemm) -> bool:
    return any(cast is not None and cast.rounding == "stochastic" for cast in (gemm.a, gemm.b))


def _parts(
    results: Tensors,
    recipe: Recipe | None,
    operands: Tensors,
    seed: int,
    most: tuple[int, int] = (CHECKED_LINES, CHECKED_COLUMNS),
) -> Iterator[tuple[str, Gemm | None, tuple[Tensor, Tensor], Tensor, Tensor, oracle.Bound]]:
    """Some rows and columns of each GEMM: its name, casts, operands there, result, exact result of its codes, and the bound."""
    x, weight, grad = (t.detach() for t in operands)
    device = str(x.device)
    on_units = recipe is not None and backend_named(recipe.backend).is_fp8
    pairs = {"output": (x, weight.t()), "grad_input": (grad, weight), "grad_weight": (grad.t(), x)}
    for (name, (a, b)), result in zip(pairs.items(), results, strict=True):
        rows = oracle.sample_rows(a.shape[0], seed, most[0], device)
        columns = oracle.sample_rows(b.shape[1], seed + 1, most[1], device)
        part, gemm = result[rows][:, columns], recipe.gemms[name] if recipe else None
        if gemm is None or gemm.a is None or gemm.b is None or _is_stochastic(gemm):
            bound = oracle.FOUR_BITS if gemm is not None and gemm.is_four_bit else oracle.BF16_MATMUL
            exact = oracle.product(a[rows], b[:, columns])
        elif (
            gemm.is_four_bit
        ):  # codes by the library's own cast, which tests hold: the product is what is judged
            of_a, of_b = (
                four_bits.dequantize(four_bits.quantize_lines(whole, cast, dim), torch.float64)
                for whole, cast, dim in ((a, gemm.a, 1), (b, gemm.b, 0))
            )
            exact, bound = (
                oracle.product(of_a[rows], of_b[columns].t()),
                oracle.fp8_bound(device, a.shape[1], False),
            )
        else:
            of_a = oracle.values(*oracle.reference_operand(a, gemm.a, 1, rows))
            of_b = oracle.values(*oracle.reference_operand(b, gemm.b, 0, columns))
            exact = oracle.product(of_a, of_b)
            bound = oracle.fp8_bound(device, a.shape[1], on_units and gemm.fast_accum and x.is_cuda)
        yield name, gemm, (a[rows], b[:, columns]), part, exact, bound
