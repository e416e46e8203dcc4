"""Suite `ceilings`: what this device reaches at best, the denominators of every other suite.

Bandwidth counts bytes read and written. The matrix products are those of the suite `gemm` on cubes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.store.case import Case
from harness.suites import axes_of, gemm
from harness.suites.common import draw, generator, moved, outcome, refuse_shapes
from harness.suites.shapes import CUSTOM
from harness.timing.workload import ArmInfo, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.suites.shapes import Axes, Point

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
AXES = axes_of("ceilings", what=WHAT)
ARMS = {"torch": ArmInfo("PyTorch's own operators, eager")}
LAUNCHES = 1000  # kernels in one call of the launch case: milliseconds of a call are microseconds of a kernel


def points(shapes: Sequence[str], axes: Axes, model: Any) -> list[Point]:
    """Each kind with the sizes that belong to it.

    Raises:
        ValueError: a kind without its sizes, or shapes are named, which this suite has no use for.
    """
    refuse_shapes("ceilings", shapes, "sizes by axes.mib and axes.cube")
    found: list[Point] = []
    for what in axes.get("what", WHAT):
        if what == "launch":
            found.append({"what": what})
            continue
        axis = "cube" if what in MATMULS else "mib"
        if not axes.get(axis):
            raise ValueError(f"ceiling {what!r} needs axes.{axis}=[...]")
        found += [{"what": what, axis: size} for size in axes[axis]]
    return found


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Answer of the suite gemm for a product; everything else runs on any device."""
    product = MATMULS.get(str(case["what"]))
    return gemm.unsupported(_gemm_case(case), product, device) if product else None


def work(case: Case) -> float:
    """FLOPs of a product, bytes of a move; 0 for launches, which are no load."""
    what = str(case["what"])
    if what in MATMULS:
        return gemm.work(_gemm_case(case))
    return 0.0 if what == "launch" else case.integer("mib") * 2.0**20 * (1 if what == "read" else 2)


def build(case: Case, arm: str, device: str) -> Workload:
    """One ceiling."""
    what = str(case["what"])
    if what in MATMULS:
        return gemm.build(_gemm_case(case), MATMULS[what], device)
    if what == "launch":
        return _launch(device)
    # Two bytes an element; 2^19 elements a MiB as rows of 1024, so that a transposed copy has both sides long.
    source = draw("randn", (case.integer("mib") * 512, 1024), generator(device, case.seed, 0))
    return moved(what, source, timed=MOVES[what], dtype="bfloat16")


def _gemm_case(case: Case) -> Case:
    """The product of a ceiling as a case of the suite gemm."""
    named = {"shape_set": CUSTOM, "layer": CUSTOM, "role": "output", "data": "randn"}
    return Case.of("gemm", {**named, **dict.fromkeys("MKN", case.integer("cube"))}, case.seed)


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
        return outcome({}, "" if ran == LAUNCHES else f"{ran} of {LAUNCHES} kernels ran")

    timed = f"{LAUNCHES} additions to one number, back to back, until done"
    return Workload(
        run=launch,
        check=check,
        resolved={"timed": timed, "backend": "torch"},
        metric="launch_us",
        on_host=True,
    )
