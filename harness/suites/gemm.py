"""Suite `gemm`: one matrix product on operands that are already in their format; casting is not timed.

D [M, N] = A [M, K] @ B [K, N] with A row-major and B column-major, D in bfloat16. The role of the GEMM in a
training step chooses the formats as the recipes `tensorwise` and `rowwise` do; it is `output` for sizes given by
number. Arms `_triton` are fp8core's own kernel beside the library's on the same operands, and blocks, which only it
multiplies. Arms of peers (`harness.peers`) are compared with ours on the same operands: what our call costs beside theirs, its
checks of sizes and layouts included.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8core.cast import scale_and_cast
from fp8core.gemm import scaled_mm
from fp8core.gemm.layout import Operand
from fp8core.recipe import RECIPES, Cast, Gemm
from harness.peers import PEERS, Peer, peer_of
from harness.store.case import Arm
from harness.suites import axes_of, oracle
from harness.suites.common import (
    DATA,
    JUDGED,
    draw,
    fast_accum_missing,
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
from harness.suites.shapes import ROLES, gemm_points
from harness.timing import metrics
from harness.timing.workload import ArmInfo, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.store.case import Case

EAGER = "eager"  # mode of every arm: one call of an operator
BASE = str(Arm("bf16", EAGER))
UNCAST = Gemm(None, None)
OPERATORS = {"torch": "torch._scaled_mm", "triton": "fp8core::matmul"}  # by backend
SCALES = {
    "tensorwise": "one scale a tensor",
    "rowwise": "a power-of-two scale for each row of A and column of B",
}
# Variant of an arm of ours -> fast accumulation, backend, variant that it is compared with, what it is
PRODUCTS = {
    "": (False, "torch", None, "{scales}"),
    "fast": (True, "torch", None, "the same with fast accumulation"),
    "triton": (False, "triton", "", "{twin} by fp8core's own kernel"),
    "fast_triton": (True, "triton", "fast", "{twin} by fp8core's own kernel"),
}


def _ours(recipe: str, variant: str | None = "") -> str:
    return BASE if variant is None else str(Arm(recipe, EAGER, variant=variant))


def _twin(peer: Peer, recipe: str) -> str:
    """Our arm that a peer's is compared with: the same scales and the same accumulation."""
    return _ours(recipe, "triton" if recipe == "blockwise" else "fast" if peer.fast_accum else "")


AXES = axes_of("gemm", role=ROLES, data=DATA)
ARMS = extended_table(
    {
        Arm("bf16", EAGER): ArmInfo("torch.mm on bfloat16"),
        **{
            Arm(recipe, EAGER, variant=variant): ArmInfo(
                doc.format(scales=scales, twin=_ours(recipe, twin)), baseline=_ours(recipe, twin)
            )
            for recipe, scales in SCALES.items()
            for variant, (_, _, twin, doc) in PRODUCTS.items()
        },
        Arm("blockwise", EAGER, variant="triton"): ArmInfo(
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
CHECKED_ROWS = 64  # of A, where the whole product would be large
CHECKED_WHOLE = 2**24  # multiplications up to which the whole product is checked


points = layer_points(gemm_points, AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """FP8's sizes and formats on any device, then the peer, then this device's units, then fast accumulation."""
    gemm, peer, fast, backend = _parse(case, arm)
    why = gemm_refused(sizes(case), gemm, backend) or peer_missing(peer, device)
    if why is None and peer is not None and gemm.a is not None and gemm.b is not None:
        pair = gemm.a.granularity, gemm.b.granularity
        if peer.granularities and pair not in peer.granularities:
            why = lacking(f"{peer.doc} takes scales of {_pairs(*peer.granularities)}, not {_pairs(pair)}")
    elif why is None and backend != "torch":
        instead = "time its plain twin" if backend == "triton" else f"repeat {ARMS[arm].baseline}"
        why = kernels_missing(device, instead)
    why = why or gemm_missing(gemm, backend, device)
    return why or (fast_accum_missing(device) if fast and peer is None else None)


work = flops


def build(case: Case, arm: str, device: str) -> Workload:
    """Draws A and B^T, casts them, and times nothing but the product."""
    M, K, N = sizes(case)
    gemm, peer, fast, backend = _parse(case, arm)
    rows = oracle.sample_rows(M, case.seed, M if M * K * N <= CHECKED_WHOLE else CHECKED_ROWS, device)
    a, b = _operands(case, device)
    resolved: dict[str, object] = {
        "timed": "the product of operands cast beforehand",
        "out_dtype": "bfloat16",
        "checked_rows": len(rows),
    }

    def check_bf16() -> Numerics:
        product, exact = torch.mm(a, b)[rows], oracle.product(a[rows], b)
        judgement = OracleCheck(metrics.figures(product, exact))
        judgement.rounded("the product", product, exact, oracle.BF16_MATMUL)
        return judgement.verdict(resolved)

    def judge(product: Tensor, operands: Sequence[Tensor], seed: int) -> str:
        """A product of the timed calls against the exact one of its own operands."""
        if product.shape != (M, N):
            return f"a product of shape {list(product.shape)}, [{M}, {N}] expected"
        some = oracle.sample_rows(M, seed, JUDGED, device)
        if uncast:
            exact, least = oracle.product(operands[0][some], operands[1]), oracle.BF16_MATMUL
        else:
            codes = Operand(operands[0], operands[2]), Operand(operands[1], operands[3])
            exact = oracle.product_of_codes(*codes, some)
            least = oracle.fp8_bound(device, K, fast, positive=case["data"] == "ones")
        judgement = OracleCheck()
        judgement.rounded("the product", product[some], exact, least)
        return "; ".join(judgement.reasons)

    uncast = gemm.a is None or gemm.b is None
    if gemm.a is None or gemm.b is None:
        resolved |= {"a_dtype": "bfloat16", "b_dtype": "bfloat16", "backend": "torch.mm"}
        size = 2.0 * (M * K + K * N + M * N)
        count = {"bf16": flops(case)}
        return timed(torch.mm, (a, b), check_bf16, judge, flops=count, bytes_moved=size, resolved=resolved)

    qa, qb = quantised(a, gemm.a, -1), quantised(b, gemm.b, 0)

    def multiply(a_codes: Tensor, b_codes: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor) -> Tensor:
        if peer is not None and peer.gemm is not None:
            return peer.gemm(a_codes, b_codes, a_scale_inv, b_scale_inv, fast)
        operands = Operand(a_codes, a_scale_inv), Operand(b_codes, b_scale_inv)
        return scaled_mm(*operands, torch.bfloat16, use_fast_accum=fast, backend=backend)

    def check() -> Numerics:
        """The timed product on the timed operands, and on the same codes with scales that differ from line to line."""
        whole, events = profiled(lambda: multiply(*_flat(qa, qb)), device)
        resolved.update(kernel_names(events))
        judgement = OracleCheck(metrics.figures(whole[rows], oracle.product(a[rows], b)))
        bound = oracle.fp8_bound(device, K, fast, positive=case["data"] == "ones")
        casts = gemm if case["data"] == "randn" else UNCAST
        judgement.fp8("the product", whole[rows], oracle.product_of_codes(qa, qb, rows), bound, casts, K)
        if qa.scale_inv.dim():
            # Rows of like data have like scales; only a probe with unlike ones tells a scale from its neighbour's.
            probes = _spread(qa), _spread(qb)
            exact = oracle.product_of_codes(*probes, rows)
            judgement.rounded(
                "rows and columns of unlike size", multiply(*_flat(*probes))[rows], exact, bound
            )
        return judgement.verdict(resolved)

    resolved |= {
        "a_dtype": str(qa.qdata.dtype).removeprefix("torch."),
        "b_dtype": str(qb.qdata.dtype).removeprefix("torch."),
        "a_cast": str(gemm.a),
        "b_cast": str(gemm.b),
        "backend": peer.doc if peer else OPERATORS[backend],
        "use_fast_accum": fast,
        **peer_facts(peer),
    }
    return timed(
        multiply,
        _flat(qa, qb),
        check,
        judge,
        flops={"e5m2" if "e5m2" in (gemm.a.format.short, gemm.b.format.short) else "e4m3": flops(case)},
        bytes_moved=1.0 * (M * K + K * N) + 2.0 * M * N + 4.0 * (qa.scale_inv.numel() + qb.scale_inv.numel()),
        resolved=resolved,
    )


def _flat(a: Operand, b: Operand) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return a.qdata, b.qdata, a.scale_inv, b.scale_inv


def _parse(case: Case, arm: str) -> tuple[Gemm, Peer | None, bool, str]:
    """The casts of an arm's operands, whose product it is (None for ours), fast accumulation and backend.

    The backend is one of `fp8core.gemm.BACKENDS`; a peer follows the rules of ours for the same scales.
    """
    record = ARMS[arm].arm
    peer = peer_of(record)
    fast, backend, *_ = PRODUCTS[record.variant]
    if peer is not None:
        fast, backend = peer.fast_accum, "triton" if record.recipe == "blockwise" else "torch"
    return RECIPES[record.recipe].gemms[str(case["role"])] if record.has_fp8 else UNCAST, peer, fast, backend


def _pairs(*of: tuple[str, str]) -> str:
    return " or ".join(f"{a} and {b}" for a, b in of)


@functools.lru_cache(maxsize=1)  # every arm of a case has the same operands, not copies of them
def _operands(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """A [M, K] row-major and B [K, N] column-major in bfloat16; the same for every arm, and for its check."""
    M, K, N = sizes(case)
    data = str(case["data"])
    a = draw(data, (M, K), generator(device, case.seed, 0))
    return a, draw(data, (N, K), generator(device, case.seed, 1)).t()


def quantised(x: Tensor, cast: Cast, dim: int) -> Operand:
    """An operand in FP8, scaled along the contracted dimension `dim`; scales of blocks as the fused casts lay them."""
    codes, scale_inv = scale_and_cast(
        x, cast.format, cast.granularity, dim=dim, power_of_two=cast.power_of_two
    )
    # Of A's blocks neighbouring rows are neighbours; of B's, which is a transposed weight, those along K.
    if (cast.granularity == "1x128" and dim != 0) or (cast.granularity == "128x128" and dim == 0):
        scale_inv = scale_inv.t().contiguous().t()
    return Operand(codes, scale_inv)


def _spread(operand: Operand) -> Operand:
    """The operand with its lines multiplied by 2^-8 .. 2^8 in turn; 17 of them, prime to every tile of a kernel."""
    lines = operand.scale_inv.numel()
    exponents = torch.arange(lines, device=operand.scale_inv.device) % 17 - 8
    factors = torch.ldexp(torch.ones_like(operand.scale_inv), exponents.view_as(operand.scale_inv))
    return Operand(operand.qdata, operand.scale_inv * factors)
