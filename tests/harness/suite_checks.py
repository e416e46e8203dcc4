"""Cases of the suites, built and checked as the executor does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.store.case import Case
from harness.store.measurement import METRICS

if TYPE_CHECKING:
    from harness.timing.workload import Numerics, Workload

CAST = {"dtype": "e4m3fn", "granularity": "rowwise", "src": "bf16", "M": 33, "K": 48}


GEMM = {
    "shape_set": "custom",
    "layer": "custom",
    "role": "output",
    "data": "randn",
    "M": 33,
    "K": 64,
    "N": 48,
}


LINEAR = {"shape_set": "custom", "layer": "custom", "M": 48, "K": 64, "N": 80}


def case(suite: str, axes: dict[str, Any], seed: int = 0, **changed: Any) -> Case:
    return Case.of(suite, {**axes, **changed}, seed)


def checked(
    suite: Any, which: Case, arm: str, device: str = "cpu", twins: bool = False
) -> tuple[Workload, Numerics]:
    """Do what the executor does: build, first call, check; with `twins` also of kernels that a CPU skips."""
    why = suite.unsupported(which, arm, device)
    assert why is None or (twins and "kernels run on NVIDIA GPUs" in why.reason)
    workload = suite.build(which, arm, device)
    workload.run()
    return workload, workload.check()


def runnable(suite: Any, which: Case, device: str = "cpu") -> list[str]:
    return [arm for arm in suite.ARMS if suite.unsupported(which, arm, device) is None]


# What is right is accepted


def assert_right(workload: Workload, numerics: Numerics) -> None:
    assert numerics.ok, numerics.reason
    assert numerics.reason == ""
    assert set(numerics.values) <= set(METRICS)
    assert workload.resolved["timed"]
    assert all(flops > 0 for flops in workload.flops.values())
