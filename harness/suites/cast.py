"""Suite `cast`: bringing a tensor [M, K] to FP8, as a layer does it before each GEMM.

Timed is all of it: amax, scale, multiply, clamp and rounding. Rowwise, a scale is shared along K. Arms of peers
(`harness.peers`) do the same to the same input.

The arms `copy` and `read` move the same input without casting it, in the same rounds: what a cast is held against.

Bytes are those that no implementation can spare, the same for all arms of a case but for the second layout of
`fused_both`: the input once, the codes, and the input again only where its scales need a first pass over more than
the last cache holds. So no share of the copy bandwidth passes 100 % by counting.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8core.formats import as_element_format
from fp8core.gemm.layout import Operand, Scaled, transposed
from fp8core.inputs.operands import cast_both, cast_one
from fp8core.recipe import Cast
from fp8core.tensor import Float8Tensor, quantize
from harness.peers import PEERS, Peer, peer_of
from harness.store.case import Arm
from harness.suites import axes_of, oracle
from harness.suites.common import (
    JUDGED,
    compile_missing,
    crossed_points,
    draw,
    generator,
    kernels_missing,
    moved,
    outcome,
    peer_facts,
    peer_missing,
    timed,
)
from harness.suites.extended import extended_table
from harness.timing import metrics
from harness.timing.compiling import fresh_compile
from harness.timing.workload import ArmInfo, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8core.recipe import Granularity
    from harness.store.case import Case

Quantise = Callable[[Tensor], Any]  # x -> what `_layouts` takes

SOURCES = {"bf16": torch.bfloat16, "fp32": torch.float32}
AXES = axes_of("cast", src=SOURCES)
ARMS = extended_table(
    {
        Arm(mode="eager"): ArmInfo("PyTorch operators, one kernel each"),
        Arm(mode="compile"): ArmInfo("the same under torch.compile, fused", baseline="eager"),
        Arm(variant="copy"): ArmInfo("the input copied: read and written once"),
        Arm(variant="read"): ArmInfo("the input read once, for its largest value", baseline="copy"),
        Arm(casts="fused"): ArmInfo("fp8core's kernels", baseline="eager"),
        Arm(casts="fused_both"): ArmInfo(
            "fp8core's kernels, with the transposed codes that a second GEMM needs", baseline="eager"
        ),
        **{
            Arm(mode=mode, peer=peer.arm): ArmInfo(f"{peer.doc}, {mode}", baseline=mode, peer=name)
            for name, peer in PEERS.items()
            if peer.cast is not None
            for mode in peer.modes
        },
    },
    PEERS,
)
FUSED = ("fused", "fused_both")
MOVES = ("copy", "read")
CHECKED = 2**24  # elements of the timed tensor that are compared with the reference
# Inputs that a wrong cast gets wrong: the first row, with signs in turn; the last element of that row
SPECIAL_ROWS = {"a row of zeros": 0.0, "a row of denormals": 1e-40, "a row of large values": 3e38}
SPECIAL_ELEMENTS = {"one Inf": float("inf"), "one -Inf": -float("inf"), "one NaN": float("nan")}


points = crossed_points("cast", "sizes by axes.M and axes.K", AXES, required="MK")


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Any device casts; peers must be there, compiled arms need a compiler and kernels an NVIDIA GPU."""
    if arm in FUSED:
        return kernels_missing(device, "time their plain twins")
    peer, compiled = _parse(arm)
    return peer_missing(peer, device) or (compile_missing(device) if compiled else None)


def work(case: Case) -> float:
    """Bytes of the input, by which cases are ranked."""
    return float(case.integer("M") * case.integer("K") * SOURCES[str(case["src"])].itemsize)


def bytes_moved(case: Case, arm: str, cache: int) -> float:
    """Bytes that a cast moves: see the module docstring; scales of rows are left out.

    Args:
        case: the tensor.
        arm: only `fused_both` differs.
        cache: bytes that the last cache can have kept of a first pass.
    """
    size, layouts = work(case), 2 if arm == "fused_both" else 1
    two_passes = case["granularity"] == "tensorwise" or layouts == 2
    again = max(0.0, size - cache) if two_passes else 0.0
    return size + again + case.integer("M") * case.integer("K") * layouts


def last_cache(device: str) -> int:
    """Bytes of the last cache; 0 where the system doesn't say."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    name = "SC_LEVEL3_CACHE_SIZE"
    return max(0, os.sysconf(name)) if name in os.sysconf_names else 0


def build(case: Case, arm: str, device: str) -> Workload:
    """Draws the input; the check compares what the timed function makes of it, and of special inputs."""
    shape = (case.integer("M"), case.integer("K"))
    x = draw("randn", shape, generator(device, case.seed, 0), SOURCES[str(case["src"])])
    if arm in MOVES:
        return moved(arm, x, timed=ARMS[arm].doc)
    peer, compiled = _parse(arm)
    granularity: Granularity = "rowwise" if case["granularity"] == "rowwise" else "tensorwise"
    cast = Cast(as_element_format(str(case["dtype"])), granularity)
    function, cache = _function(arm, cast), last_cache(device)
    ours = "fp8core::* operators" if arm in FUSED else "fp8core.tensor.quantize"
    return timed(
        function,
        (x,),
        lambda: _check(function, x, cast, case.seed),
        lambda found, operands, seed: _fault(found, operands[0], cast, seed),
        bytes_moved=bytes_moved(case, arm, cache),
        compiled=compiled,
        resolved={
            "timed": "amax, scale and cast" + ("" if peer else f" ({ours})"),
            "bytes": f"input and codes once; a second read beyond the {cache / 2**20:.0f} MiB of the last cache",
            "backend": f"{peer.doc}, {ARMS[arm].arm.mode}" if peer else arm,
            **peer_facts(peer),
        },
    )


def _parse(arm: str) -> tuple[Peer | None, bool]:
    """Whose cast an arm is (None for ours), and whether it is compiled."""
    record = ARMS[arm].arm
    return peer_of(record), record.mode == "compile"


def _function(arm: str, cast: Cast) -> Quantise:
    if arm == "fused":
        return lambda x: cast_one(x, cast, 1, kernels="always")
    if arm == "fused_both":
        return lambda x: cast_both(x, cast, cast, kernels="always")
    peer, compiled = _parse(arm)
    offered, dtype, granularity = peer.cast if peer else None, cast.format.dtype, cast.granularity

    def function(x: Tensor) -> Any:
        if offered is not None:
            return offered(x, dtype, granularity)
        return quantize(x, dtype, granularity, dim=-1)

    return fresh_compile(function) if compiled else function


def _layouts(found: Any) -> tuple[Scaled, ...]:
    """A tensor, or two of which the second is transposed here, or a peer's codes and scale_inv."""
    if isinstance(found, Float8Tensor):
        return (found,)
    first, second = found
    return (first, transposed(second)) if isinstance(first, Float8Tensor) else (Operand(first, second),)


def _check(function: Quantise, x: Tensor, cast: Cast, seed: int) -> Numerics:
    """Codes and scales must be those of the reference, bit for bit: of the timed input and of special ones."""
    wrong = {}
    for name, special in _inputs(x, cast.format.dtype):
        found = zip(_layouts(function(special)), (special, special.t()), strict=False)
        wrong[name] = sum(_mismatches(q, of, _lines(of, seed), cast) for q, of in found)
    rows = _lines(x, seed)
    codes, scale_inv = _take(_layouts(function(x))[0], rows)
    values = metrics.figures(codes.double() * scale_inv.double(), x[rows])
    values["mismatches"] = float(sum(wrong.values()))
    values["underflow_frac"] = metrics.underflow_frac(codes, x[rows])
    values["saturated_frac"] = metrics.saturated_frac(
        x[rows].double() / scale_inv.double(), cast.format.overflow_threshold
    )
    listed = ", ".join(f"{count} in {name!r}" for name, count in wrong.items() if count)
    reason = f"codes or scales differ from the reference cast: {listed}; 0 expected (docs/numerics.md)"
    return outcome(values, reason if listed else "")


def _fault(found: Any, x: Tensor, cast: Cast, seed: int) -> str:
    """What differs from the reference in some lines of what the timed calls made of x."""
    for q, of in zip(_layouts(found), (x, x.t()), strict=False):
        if q.qdata.shape != of.shape:
            return f"codes of shape {list(q.qdata.shape)}, {list(of.shape)} expected"
        rows = oracle.sample_rows(of.shape[0], seed, JUDGED, str(x.device))
        if count := _mismatches(q, of, rows, cast):
            return f"{count} codes or scales of {len(rows)} lines differ from the reference cast; 0 expected"
    return ""


def _lines(x: Tensor, seed: int) -> Tensor:
    return oracle.sample_rows(x.shape[0], seed, max(CHECKED // x.shape[1], 2), str(x.device))


def _mismatches(actual: Scaled, x: Tensor, rows: Tensor, cast: Cast) -> int:
    """Codes and scales of the chosen rows that differ from the reference; NaN is one class."""
    wanted, scale_inv = oracle.reference_operand(x, cast, 1, rows)
    codes, scales = _take(actual, rows)
    same = (scales == scale_inv) | (scales.isnan() & scale_inv.isnan())
    return int(metrics.mismatches(codes, wanted)) + int((~same).sum())


def _take(of: Scaled, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows; codes through their bytes, since not every device indexes float8."""
    codes = of.qdata.view(torch.uint8)[rows].view(of.qdata.dtype)
    return codes, of.scale_inv[rows] if of.scale_inv.dim() else of.scale_inv


def _inputs(x: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The timed input, and inputs of its shape and dtype that a wrong cast gets wrong.

    Rowwise, a special first row must leave the other rows alone; tensorwise, it decides the scale of all.
    """
    yield "the timed input", x
    yield "zeros", torch.zeros_like(x)
    decoded = torch.arange(256, dtype=torch.uint8, device=x.device).view(dtype).double()
    finite = decoded[decoded.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    # With the largest value in each row the scale is 1, so that every middle between two codes is a tie.
    ties = torch.cat([finite[-1:], middles, finite]).to(x.dtype)
    ties = ties.repeat(-(-x.numel() // len(ties)))[: x.numel()].view_as(x).clone()
    ties[:, 0] = finite[-1]
    yield "every code and every tie between two", ties
    for name, value in {**SPECIAL_ROWS, **SPECIAL_ELEMENTS}.items():
        special = x.clone()
        if name in SPECIAL_ROWS:
            special[0] = value
            special[0, ::2] *= -1
        else:
            special[0, -1] = value
        yield name, special
