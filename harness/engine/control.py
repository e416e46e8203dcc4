"""Control: a case that no change of ours can make slower. A bf16 product of fixed size, by PyTorch alone, as a suite of one arm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.store.case import Case
from harness.timing.workload import ArmInfo, Axis, Numerics, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

SUITE = "control"
ARMS = {"bf16_mm": ArmInfo("a bf16 product of fixed size, by PyTorch alone")}
AXES: Mapping[str, Axis] = {}
CASE = Case.of(SUITE, {"what": "bf16_mm"})
SIZE = {"cpu": 128, "cuda": 4096}


def build(case: Case, arm: str, device: str) -> Workload:
    """The product."""
    import torch

    size = SIZE[device]
    random = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=random).to(torch.bfloat16) for _ in range(2))
    return Workload(
        run=lambda: torch.mm(a, b),
        check=lambda: Numerics({}),
        resolved={"timed": ARMS[arm].doc},
    )


def points(shapes: object, axes: object, model: object) -> list[dict[str, Any]]:
    """One case."""
    return [{}]


def unsupported(case: Case, arm: str, device: str) -> None:
    """Return None: the control case runs anywhere."""


def work(case: Case) -> float:
    """The least: it is never measured under sustained load."""
    return 0.0
