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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8core.formats import as_element_format
from fp8core.gemm.layout import Operand
from fp8core.inputs.operands import cast_both, cast_one
from fp8core.recipe import Cast
from fp8core.tensor import Float8Tensor, quantize
from harness.peers import PEERS, Peer, peer_of
from harness.store.arm import Arm
from harness.suites import oracle
from harness.suites.common import (
    Rotation,
    compile_missing,
    covering,
    draw,
    generator,
    kernels_missing,
    peer_missing,
    refuse_shapes,
    with_defaults,
)
from harness.suites.extended import extended_table
from harness.timing import metrics
from harness.timing.compiling import fresh_compile
from harness.timing.workload import ArmInfo, Axis, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from fp8core.recipe import Granularity
    from harness.store.case import Case, Scalar

Quantised = Float8Tensor | Operand
# x -> its codes, and for `fused_both` those of its transpose
Quantise = Callable[[Tensor], Quantised | tuple[Quantised, Quantised]]

SOURCES = {"bf16": torch.bfloat16, "fp32": torch.float32}
AXES: Mapping[str, Axis] = {
    "dtype": Axis("FP8 format", ("e4m3fn", "e5m2")),
    "granularity": Axis("how many elements share a scale", ("tensorwise", "rowwise")),
    "M": Axis("rows"),
    "K": Axis("columns"),
    "src": Axis("dtype of the input", tuple(SOURCES)),
}
ARMS: Mapping[str, ArmInfo] = extended_table(
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


def points(
    shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
) -> list[dict[str, Scalar]]:
    """No linked axes; M and K must be given.

    Raises:
        ValueError: M or K is missing, or shapes are named, which this suite has no use for.
    """
    missing = [f"axes.{name}" for name in ("M", "K") if name not in axes]
    if missing:
        raise ValueError(f"suite cast needs {' and '.join(missing)}")
    refuse_shapes("cast", shapes, "sizes by axes.M and axes.K")
    return with_defaults([{}], axes, AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Any device casts; peers must be there, compiled arms need a compiler and kernels an NVIDIA GPU."""
    peer, compiled = _parse(arm)
    if arm in MOVES:
        return None
    if arm in FUSED:
        return kernels_missing(device, "time their plain twins")
    if peer is not None and (absent := peer_missing(peer, device)):
        return absent
    return compile_missing(device) if compiled else None


def work(case: Case) -> float:
    """Bytes of the input, by which cases are ranked."""
    return float(case.integer("M") * case.integer("K") * SOURCES[str(case["src"])].itemsize)


def bytes_moved(case: Case, arm: str, cache: int) -> float:
    """See the module docstring; scales of rows are left out.

    Args:
        case: the tensor.
        arm: only `fused_both` differs.
        cache: bytes that the last cache can have kept of a first pass.
    """
    if arm in MOVES:
        return work(case) * (2 if arm == "copy" else 1)
    size, elements = work(case), case.integer("M") * case.integer("K")
    two_passes = case["granularity"] == "tensorwise" or arm == "fused_both"
    again = max(0.0, size - cache) if two_passes else 0.0
    return size + again + elements * (2 if arm == "fused_both" else 1)


def last_cache(device: str) -> int:
    """Bytes of the last cache; 0 where the system doesn't say."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    name = "SC_LEVEL3_CACHE_SIZE"
    return max(0, os.sysconf(name)) if name in os.sysconf_names else 0


def build(case: Case, arm: str, device: str) -> Workload:
    """Draws the input; the check compares what the timed function makes of it, and of special inputs."""
    dtype = as_element_format(str(case["dtype"])).dtype
    granularity: Granularity = "rowwise" if case["granularity"] == "rowwise" else "tensorwise"
    shape = (case.integer("M"), case.integer("K"))
    x = draw("randn", shape, generator(device, case.seed, 0), SOURCES[str(case["src"])])

    if arm in MOVES:
        return _move(case, arm, x, device)
    peer, compiled = _parse(arm)
    if peer is not None:
        function = _theirs(peer, dtype, granularity, compiled)
    elif arm in FUSED:
        function = _fused(Cast(as_element_format(dtype), granularity), both=arm == "fused_both")
    else:
        function = _ours(dtype, granularity, compiled)
    cache = last_cache(device)
    ours = "fp8core::* operators" if arm in FUSED else "fp8core.tensor.quantize"
    resolved: dict[str, object] = {
        "timed": "amax, scale and cast" + ("" if peer else f" ({ours})"),
        "bytes": f"input and codes once; a second read beyond the {cache / 2**20:.0f} MiB of the last cache",
        "backend": f"{peer.doc}, {ARMS[arm].arm.mode}" if peer else arm,
    }
    if peer is not None:
        resolved |= {"peer": peer.arm, "peer_version": peer.version()}
    return Workload(
        run=lambda: function(x),
        check=lambda: _check(function, x, dtype, granularity, case.seed),
        bytes_moved=bytes_moved(case, arm, cache),
        resolved=resolved,
        compiled=compiled,
        variants=Rotation(function, (x,), device),
        covering=covering(function, (x,), device),
    )


def _move(case: Case, arm: str, x: Tensor, device: str) -> Workload:
    target = (
        torch.full_like(x, float("nan")) if arm == "copy" else torch.empty((), dtype=x.dtype, device=device)
    )

    def move(source: Tensor, target: Tensor) -> Tensor:
        return target.copy_(source) if arm == "copy" else torch.amax(source, dim=(0, 1), out=target)

    # abs() of its own would be a second tensor written; the largest magnitude of |x| is found by reading alone.
    source = x.abs() if arm == "read" else x

    def check() -> Numerics:
        move(source, target)
        right = torch.equal(target, source if arm == "copy" else source.max())
        return Numerics({}, ok=right, reason="" if right else f"{arm} did not yield what it should")

    return Workload(
        run=lambda: move(source, target),
        check=check,
        bytes_moved=bytes_moved(case, arm, 0),
        resolved={"timed": ARMS[arm].doc, "backend": "torch"},
        variants=Rotation(move, (source, target), device),
        covering=covering(move, (source, target), device),
    )


def _parse(arm: str) -> tuple[Peer | None, bool]:
    """Whose cast an arm is (None for ours), and whether it is compiled."""
    record = ARMS[arm].arm
    return peer_of(record), record.mode == "compile"


def _ours(dtype: torch.dtype, granularity: Granularity, compiled: bool) -> Quantise:
    def cast(x: Tensor) -> Float8Tensor:
        return quantize(x, dtype, granularity, dim=-1)

    return fresh_compile(cast) if compiled else cast


def _fused(cast: Cast, both: bool) -> Quantise:
    if not both:
        return lambda x: _operand(cast_one(x, cast, 1, kernels="always"))

    def function(x: Tensor) -> tuple[Quantised, Quantised]:
        first, second = (_operand(q) for q in cast_both(x, cast, cast, kernels="always"))
        return first, Operand(second.qdata.t(), second.scale_inv.t())

    return function


def _operand(q: Tensor) -> Float8Tensor:
    assert isinstance(q, Float8Tensor)
    return q


def _theirs(peer: Peer, dtype: torch.dtype, granularity: Granularity, compiled: bool) -> Quantise:
    offered = peer.cast
    assert offered is not None

    def cast(x: Tensor) -> tuple[Tensor, Tensor]:
        return offered(x, dtype, granularity)

    function = fresh_compile(cast) if compiled else cast
    return lambda x: Operand(*function(x))


def _check(
    function: Quantise, x: Tensor, dtype: torch.dtype, granularity: Granularity, seed: int
) -> Numerics:
    """Codes and scales must be those of the reference, bit for bit: of the timed input and of special ones."""

    def lines(of: Tensor) -> Tensor:
        return oracle.sample_rows(of.shape[0], seed, max(CHECKED // of.shape[1], 2), str(x.device))

    wrong: dict[str, int] = {}
    for name, special in _inputs(x, dtype):
        found = zip(_layouts(function(special)), (special, special.t()), strict=False)
        wrong[name] = sum(_mismatches(q, of, lines(of), dtype, granularity) for q, of in found)
    timed, rows = _layouts(function(x))[0], lines(x)
    overflow = as_element_format(dtype).overflow_threshold
    codes = _take(timed.qdata, rows)
    scale_inv = timed.scale_inv[rows] if timed.scale_inv.dim() else timed.scale_inv
    values = metrics.figures(codes.double() * scale_inv.double(), x[rows])
    values["mismatches"] = float(sum(wrong.values()))
    values["underflow_frac"] = metrics.underflow_frac(codes, x[rows])
    values["saturated_frac"] = metrics.saturated_frac(x[rows].double() / scale_inv.double(), overflow)
    listed = ", ".join(f"{count} in {name!r}" for name, count in wrong.items() if count)
    reason = f"codes or scales differ from the reference cast: {listed}; 0 expected (docs/numerics.md)"
    return Numerics(values, ok=not listed, reason=reason if listed else "")


def _layouts(found: Quantised | tuple[Quantised, Quantised]) -> tuple[Quantised, ...]:
    return (found,) if isinstance(found, Float8Tensor | Operand) else found


def _mismatches(
    actual: Quantised, x: Tensor, rows: Tensor, dtype: torch.dtype, granularity: Granularity
) -> int:
    """Codes and scales of the chosen rows that differ from the reference; NaN is one class."""
    amax = x.abs().max() if granularity == "tensorwise" else None
    codes, scale_inv = oracle.reference_cast(x[rows], dtype, granularity, amax=amax)
    scales = actual.scale_inv[rows] if actual.scale_inv.dim() else actual.scale_inv
    same = (scales == scale_inv) | (scales.isnan() & scale_inv.isnan())
    return int(metrics.mismatches(_take(actual.qdata, rows), codes)) + int((~same).sum())


def _take(codes: Tensor, rows: Tensor) -> Tensor:
    """Rows of a float8 tensor, through its bytes: not every device indexes float8."""
    return codes.view(torch.uint8)[rows].view(codes.dtype)


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
    for name, value in SPECIAL_ROWS.items():
        special = x.clone()
        special[0] = value
        special[0, ::2] *= -1
        yield name, special
    for name, value in SPECIAL_ELEMENTS.items():
        special = x.clone()
        special[0, -1] = value
        yield name, special


SPECIAL_ROWS = {"a row of zeros": 0.0, "a row of denormals": 1e-40, "a row of large values": 3e38}
SPECIAL_ELEMENTS = {"one Inf": float("inf"), "one -Inf": -float("inf"), "one NaN": float("nan")}
