"""Suite `gemm`: one matrix product on operands that are already in their format; casting is not timed.

D [M, N] = A [M, K] @ B [K, N] with A row-major and B column-major, D in bfloat16. The role of the GEMM in a
training step chooses the formats as the recipes `tensorwise` and `rowwise` do; it is `output` for sizes given by
number. Arms `_triton` are fp8core's own kernel beside the library's on the same operands, and blocks, which only it
multiplies; arms `_fastest` are backend "fastest", whose choice is made before anything is timed and written into the
row (`chosen`), so that it can be judged by the other two. Arms of peers (`harness.peers`) are compared with ours on the same operands: what our call costs beside
theirs, its checks of sizes and layouts included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8core.cast import scale_and_cast
from fp8core.gemm import FASTEST, backend_named, layout, scaled_mm
from fp8core.gemm.layout import Operand
from fp8core.recipe import RECIPES, Cast
from harness.peers import PEERS, Peer, peer_of
from harness.store.arm import Arm
from harness.suites import oracle
from harness.suites.common import (
    DATA,
    SIZES,
    Rotation,
    covering,
    draw,
    generator,
    kernel_names,
    kernels_missing,
    model_layers,
    peer_missing,
    profiled,
    way_out,
    with_defaults,
)
from harness.suites.extended import extended_table
from harness.suites.oracle import Judgement
from harness.suites.shapes import ROLES, gemm_points
from harness.timing import metrics
from harness.timing.workload import ArmInfo, Axis, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from harness.store.case import Case, Scalar

BLOCKS = ("blockwise",)  # recipes whose product is fp8core's own kernel alone
EAGER = "eager"  # mode of every arm: one call of an operator
BASE = str(Arm("bf16", EAGER))
OPERATORS = {"torch": "torch._scaled_mm", "triton": "fp8core::matmul"}  # by backend


# Variant of an arm of ours -> fast accumulation, backend
PRODUCTS = {
    "": (False, "torch"),
    "fast": (True, "torch"),
    "triton": (False, "triton"),
    "fast_triton": (True, "triton"),
    "fastest": (False, "fastest"),
}


def _ours(recipe: str, variant: str = "") -> Arm:
    return Arm(recipe, EAGER, variant=variant)


def _twin(peer: Peer, recipe: str) -> str:
    """Our arm that a peer's is compared with: the same scales and the same accumulation."""
    return str(_ours(recipe, "triton" if recipe in BLOCKS else "fast" if peer.fast_accum else ""))


AXES: Mapping[str, Axis] = {
    **SIZES,
    "role": Axis("which GEMM of a linear layer", ROLES, linked=True),
    "data": Axis("; ".join(f"{name}: {doc}" for name, doc in DATA.items()), tuple(DATA)),
}
_SCALES = {
    "tensorwise": "one scale a tensor",
    "rowwise": "a power-of-two scale for each row of A and column of B",
}
ARMS: Mapping[str, ArmInfo] = extended_table(
    {
        Arm("bf16", EAGER): ArmInfo("torch.mm on bfloat16"),
        **{
            _ours(recipe, variant): ArmInfo(doc, baseline=BASE)
            for recipe, scales in _SCALES.items()
            for variant, doc in (("", scales), ("fast", "the same with fast accumulation"))
        },
        **{
            _ours(recipe, f"{which}triton"): ArmInfo(f"{twin} by fp8core's own kernel", baseline=twin)
            for recipe in _SCALES
            for which, twin in (("", str(_ours(recipe))), ("fast_", str(_ours(recipe, "fast"))))
        },
        **{
            _ours(recipe, "fastest"): ArmInfo(
                f"{_ours(recipe)} by the faster of the two", baseline=str(_ours(recipe))
            )
            for recipe in _SCALES
        },
        _ours("blockwise", "triton"): ArmInfo(
            "scales of 1x128 and 128x128 blocks, by fp8core's own kernel", baseline=BASE
        ),
        **{
            Arm(recipe, EAGER, peer=peer.arm): ArmInfo(
                f"{peer.doc}, same operands and scales as {_twin(peer, recipe)}",
                baseline=_twin(peer, recipe),
                peer=name,
            )
            for name, peer in PEERS.items()
            if peer.gemm is not None
            for recipe in peer.recipes
        },
    },
    PEERS,
)
Multiply = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # codes of A and B, scale_inv of A and B -> D

CHECKED_ROWS = 64  # of A, where the whole product would be large
CHECKED_WHOLE = 2**24  # multiplications up to which the whole product is checked


def points(
    shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
) -> list[dict[str, Scalar]]:
    """The GEMMs of the named layers, each in its roles, or the product of M, K and N."""
    return with_defaults(gemm_points(shapes, axes, model_layers(shapes, model)), axes, AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """FP8's sizes and formats on any device, then this device's FP8 units, then fast accumulation."""
    casts = _casts(case, arm)
    if casts is None:
        return None
    M, K, N = _sizes(case)
    formats, rules = (casts[0].format, casts[1].format), backend_named(_backend(arm))
    reason = rules.shape_reason(M, K, N, *formats, casts[0].granularity, torch.bfloat16)
    if reason:
        return Unsupported("shape", f"{reason}; {way_out(M, K, N, layout.MULTIPLE, 'bf16_eager')}")
    peer = _peer(arm)
    if peer is not None:
        if absent := peer_missing(peer, device):
            return absent
        reason, pair = None, (casts[0].granularity, casts[1].granularity)
        if peer.granularities and pair not in peer.granularities:
            reason = f"{peer.doc} takes scales of {_pairs(peer.granularities)}, not {_pairs([pair])}"
        reason = reason or rules.device_reason(device, *formats)
        return Unsupported("device", reason) if reason else None
    if _backend(arm) != "torch":
        instead = "time its plain twin" if _backend(arm) == "triton" else f"repeat {ARMS[arm].baseline}"
        if why := kernels_missing(device, instead):
            return why
    reason = rules.device_reason(device, *formats)
    if not reason and _fast(arm) and torch.device(device).type == "cpu":
        reason = "a CPU ignores use_fast_accum: this arm would repeat the one without it"
    return Unsupported("device", reason) if reason else None


def work(case: Case) -> float:
    """Floating-point operations."""
    M, K, N = _sizes(case)
    return 2.0 * M * K * N


def build(case: Case, arm: str, device: str) -> Workload:
    """Draws A and B^T, casts them, and times nothing but the product."""
    M, K, N = _sizes(case)
    casts = _casts(case, arm)
    whole = M * K * N <= CHECKED_WHOLE
    rows = oracle.sample_rows(M, case.seed, M if whole else CHECKED_ROWS, device)
    resolved: dict[str, object] = {
        "timed": "the product of operands cast beforehand",
        "out_dtype": "bfloat16",
        "checked_rows": len(rows),
    }
    if casts is None:
        a, b = _operands(case, device)
        return Workload(
            run=lambda: torch.mm(a, b),
            check=lambda: _check_bf16(torch.mm(a, b), a, b, rows),
            flops={"bf16": work(case)},
            bytes_moved=2.0 * (M * K + K * N + M * N),
            resolved={**resolved, "a_dtype": "bfloat16", "b_dtype": "bfloat16", "backend": "torch.mm"},
            variants=Rotation(torch.mm, (a, b), device),
            covering=covering(torch.mm, (a, b), device),
        )
    qa, qb = (_quantised(x, c, d) for x, c, d in zip(_operands(case, device), casts, (-1, 0), strict=True))
    fast, peer, backend = _fast(arm), _peer(arm), _backend(arm)

    def multiply(a_codes: Tensor, b_codes: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor) -> Tensor:
        if peer is not None and peer.gemm is not None:
            return peer.gemm(a_codes, b_codes, a_scale_inv, b_scale_inv, fast)
        a, b = Operand(a_codes, a_scale_inv), Operand(b_codes, b_scale_inv)
        return scaled_mm(a, b, torch.bfloat16, use_fast_accum=fast, backend=backend)

    operands = (qa.qdata, qb.qdata, qa.scale_inv, qb.scale_inv)
    ran = backend
    if backend == "fastest":
        resolved["chosen"] = ran = FASTEST.choice(*operands, torch.bfloat16, fast)
    formats = oracle.short(qa.qdata.dtype), oracle.short(qb.qdata.dtype)
    resolved |= {
        "a_dtype": str(qa.qdata.dtype).removeprefix("torch."),
        "b_dtype": str(qb.qdata.dtype).removeprefix("torch."),
        "a_cast": str(casts[0]),
        "b_cast": str(casts[1]),
        "backend": peer.doc if peer else OPERATORS[ran],
        "use_fast_accum": fast,
    }
    if peer is not None:
        resolved |= {"peer": peer.arm, "peer_version": peer.version()}
    return Workload(
        run=lambda: multiply(*operands),
        check=lambda: _check_fp8(multiply, case, qa, qb, rows, resolved),
        flops={"e5m2" if "e5m2" in formats else "e4m3": work(case)},
        bytes_moved=1.0 * (M * K + K * N) + 2.0 * M * N + 4.0 * (qa.scale_inv.numel() + qb.scale_inv.numel()),
        resolved=resolved,
        variants=Rotation(multiply, operands, device),
        covering=covering(multiply, operands, device),
    )


def _sizes(case: Case) -> tuple[int, int, int]:
    return case.integer("M"), case.integer("K"), case.integer("N")


def _casts(case: Case, arm: str) -> tuple[Cast, Cast] | None:
    """How the operands are cast; None for bf16."""
    record = ARMS[arm].arm
    if not record.has_fp8:
        return None
    gemm = RECIPES[record.recipe].gemms[str(case["role"])]
    assert gemm.a is not None
    assert gemm.b is not None
    return gemm.a, gemm.b


def _pairs(of: Sequence[tuple[str, str]]) -> str:
    return " or ".join(f"{a} and {b}" for a, b in of)


def _fast(arm: str) -> bool:
    peer = _peer(arm)
    return PRODUCTS[ARMS[arm].arm.variant][0] if peer is None else peer.fast_accum


def _backend(arm: str) -> str:
    """Name in `fp8core.gemm.BACKENDS` whose shape rules an arm follows; peers for blocks follow "triton"."""
    record = ARMS[arm].arm
    if record.peer:
        return "triton" if record.recipe in BLOCKS else "torch"
    return PRODUCTS[record.variant][1]


def _peer(arm: str) -> Peer | None:
    """Whose product an arm is; None for ours and for bf16."""
    return peer_of(ARMS[arm].arm)


@functools.lru_cache(maxsize=1)  # every arm of a case has the same operands, not copies of them
def _operands(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """A [M, K] row-major and B [K, N] column-major in bfloat16; the same for every arm, and for its check."""
    M, K, N = _sizes(case)
    data = str(case["data"])
    a = draw(data, (M, K), generator(device, case.seed, 0))
    return a, draw(data, (N, K), generator(device, case.seed, 1)).t()


def _quantised(x: Tensor, cast: Cast, dim: int) -> Operand:
    """An operand in FP8, scaled along the contracted dimension `dim`; scales of blocks as the fused casts lay them."""
    codes, scale_inv = scale_and_cast(
        x, cast.format, cast.granularity, dim=dim, power_of_two=cast.power_of_two
    )
    # Of A's blocks neighbouring rows are neighbours; of B's, which is a transposed weight, those along K.
    if (cast.granularity == "1x128" and dim != 0) or (cast.granularity == "128x128" and dim == 0):
        scale_inv = scale_inv.t().contiguous().t()
    return Operand(codes, scale_inv)


def _check_bf16(actual: Tensor, a: Tensor, b: Tensor, rows: Tensor) -> Numerics:
    judgement = Judgement()
    exact = oracle.product(a[rows], b)
    judgement.values = metrics.figures(actual[rows], exact)
    judgement.rounded("the product", actual[rows], exact, oracle.BF16_MATMUL_DB, oracle.BF16_MATMUL)
    return judgement.verdict()


def _check_fp8(
    multiply: Multiply, case: Case, qa: Operand, qb: Operand, rows: Tensor, resolved: dict[str, object]
) -> Numerics:
    """The timed product on the timed operands, and on the same codes with scales that differ from line to line."""
    judgement = Judgement()
    a, b = _operands(case, qa.qdata.device.type)
    whole, events = profiled(lambda: multiply(qa.qdata, qb.qdata, qa.scale_inv, qb.scale_inv), str(a.device))
    resolved |= kernel_names(events)
    part = whole[rows]
    judgement.values = metrics.figures(part, oracle.product(a[rows], b))

    bound, source = oracle.rounded_bound(str(part.device))
    if resolved["use_fast_accum"]:
        bound, source = oracle.fast_accum_bound(case.integer("K"), positive=case["data"] == "ones")
    accumulation = judgement.rounded(
        "the product", part, oracle.product_of_codes(qa, qb, rows), bound, source
    )
    judgement.values["accum_sqnr_db"] = accumulation
    if case["data"] == "randn":
        formats = oracle.short(qa.qdata.dtype), oracle.short(qb.qdata.dtype)
        size = (len(rows), case.integer("K"), case.integer("N"))
        judgement.gaussian("sqnr_db", formats, size, accumulation)
        resolved["sqnr_bound_db"] = judgement.bounds

    if qa.scale_inv.dim():
        # Rows of like data have like scales; only a probe with unlike ones tells a scale from its neighbour's.
        a_probe, b_probe = _spread(qa), _spread(qb)
        part = multiply(a_probe.qdata, b_probe.qdata, a_probe.scale_inv, b_probe.scale_inv)[rows]
        exact = oracle.product_of_codes(a_probe, b_probe, rows)
        judgement.rounded("rows and columns of unlike size", part, exact, bound, source)
    return judgement.verdict()


def _spread(operand: Operand) -> Operand:
    """The operand with its lines multiplied by 2^-8 .. 2^8 in turn; 17 of them, prime to every tile of a kernel."""
    lines = operand.scale_inv.numel()
    exponents = torch.arange(lines, device=operand.scale_inv.device) % 17 - 8
    factors = torch.ldexp(torch.ones_like(operand.scale_inv), exponents.view_as(operand.scale_inv))
    return Operand(operand.qdata, operand.scale_inv * factors)
