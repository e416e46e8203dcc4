"""Suite `ceilings`: what this device reaches at best, the denominators of every other suite.

Bandwidth counts bytes read and written. The matrix products are those of the suite `gemm` on cubes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.store.case import Case, Scalar
from harness.suites import gemm
from harness.suites.common import Rotation, covering, draw, generator, refuse_shapes
from harness.suites.shapes import CUSTOM
from harness.timing.workload import ArmInfo, Axis, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MATMULS = {  # value of the axis, which stored cases hold -> arm of suite gemm
    "mm_bf16": "bf16_eager",
    "mm_fp8_tensorwise": "tensorwise_eager",
    "mm_fp8_rowwise": "rowwise_eager",
}
MOVES = {
    "copy": "read and write once, in order",
    "read": "read once: the largest magnitude, as a tensorwise cast needs it",
    "transpose": "read in order, write across: as a second layout of an operand needs it",
}
WHAT = (*MOVES, *MATMULS, "launch")
AXES: Mapping[str, Axis] = {
    "what": Axis("; ".join(f"{name}: {doc}" for name, doc in MOVES.items()), WHAT, linked=True),
    "mib": Axis("MiB (2**20 bytes) of the bfloat16 tensor that is moved", linked=True),
    "cube": Axis("M = K = N of a product", linked=True),
}
ARMS: Mapping[str, ArmInfo] = {"torch": ArmInfo("PyTorch's own operators, eager")}
LAUNCHES = 1000  # kernels in one call of the launch case: milliseconds of a call are microseconds of a kernel


def points(
    shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
) -> list[dict[str, Scalar]]:
    """Each kind with the sizes that belong to it.

    Raises:
        ValueError: a kind without its sizes, or shapes are named, which this suite has no use for.
    """
    refuse_shapes("ceilings", shapes, "sizes by axes.mib and axes.cube")
    found: list[dict[str, Scalar]] = []
    for what in axes.get("what", WHAT):
        name = str(what)
        if name == "launch":
            found.append({"what": name})
            continue
        axis = "cube" if name in MATMULS else "mib"
        if not axes.get(axis):
            raise ValueError(f"ceiling {name!r} needs axes.{axis}=[...]")
        found += [{"what": name, axis: size} for size in axes[axis]]
    return found


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Answer of the suite gemm for a product; everything else runs on any device."""
    what = str(case["what"])
    return gemm.unsupported(_gemm_case(case), MATMULS[what], device) if what in MATMULS else None


def work(case: Case) -> float:
    """FLOPs of a product, bytes of a move; 0 for launches, which are no load."""
    what = str(case["what"])
    if what in MATMULS:
        return gemm.work(_gemm_case(case))
    return 0.0 if what == "launch" else float(_bytes(case))


def build(case: Case, arm: str, device: str) -> Workload:
    """One ceiling."""
    what = str(case["what"])
    if what in MATMULS:
        return gemm.build(_gemm_case(case), MATMULS[what], device)
    if what == "launch":
        return _launch(device)
    return _move(case, what, device)


def _gemm_case(case: Case) -> Case:
    """The same product as a case of the suite gemm."""
    n = case.integer("cube")
    own: dict[str, Scalar] = {
        "shape_set": CUSTOM,
        "layer": CUSTOM,
        "role": "output",
        "data": "randn",
        "M": n,
        "K": n,
        "N": n,
    }
    return Case.of("gemm", own, case.seed)


def _bytes(case: Case) -> int:
    size = case.integer("mib") * 2**20
    return size if case["what"] == "read" else 2 * size


def _move(case: Case, what: str, device: str) -> Workload:
    # Two bytes an element; 2^19 elements a MiB as rows of 1024, so that a transposed copy has both sides long.
    source = draw("randn", (case.integer("mib") * 512, 1024), generator(device, case.seed, 0))
    if what == "read":
        target = torch.empty((), dtype=source.dtype, device=device)
    else:
        target = torch.empty_like(source if what == "copy" else source.t().contiguous())
    target.fill_(float("nan"))

    def copy(source: Tensor, target: Tensor) -> Tensor:
        return target.copy_(source)

    def read(source: Tensor, target: Tensor) -> Tensor:
        return torch.amax(source, dim=(0, 1), out=target)

    def transpose(source: Tensor, target: Tensor) -> Tensor:
        return target.copy_(source.t())

    function = {"copy": copy, "read": read, "transpose": transpose}[what]

    def check() -> Numerics:
        if what == "read":
            right = _reads_all(source, target, read)
        else:
            function(source, target)
            right = torch.equal(target, source if what == "copy" else source.t())
        return Numerics({}, ok=right, reason="" if right else f"{what} did not yield what it should")

    return Workload(
        run=lambda: function(source, target),
        check=check,
        bytes_moved=float(_bytes(case)),
        resolved={"timed": MOVES[what], "dtype": "bfloat16", "backend": "torch"},
        variants=Rotation(function, (source, target), device),
        covering=covering(function, (source, target), device),
    )


def _reads_all(source: Tensor, target: Tensor, read: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether the reduction finds a largest value put first, in the middle or last."""
    flat, found = source.view(-1), []
    for place in (0, flat.numel() // 2, -1):
        before = flat[place].clone()
        flat[place] = 2.0**14
        found.append(float(read(source, target)) == 2.0**14)
        flat[place] = before
    return all(found)


def _launch(device: str) -> Workload:
    counter = torch.zeros((), device=device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            counter.add_(1)
        if counter.is_cuda:
            torch.cuda.synchronize()

    def check() -> Numerics:
        before = int(counter)
        launch()
        ran = int(counter) - before
        return Numerics(
            {}, ok=ran == LAUNCHES, reason="" if ran == LAUNCHES else f"{ran} of {LAUNCHES} kernels ran"
        )

    return Workload(
        run=launch,
        check=check,
        resolved={
            "timed": f"{LAUNCHES} additions to one number, back to back, until done",
            "backend": "torch",
        },
        metric="launch_us",
        on_host=True,
    )


__all__ = ["ARMS", "AXES", "build", "points", "unsupported", "work"]
