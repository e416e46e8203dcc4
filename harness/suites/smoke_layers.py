"""Suite `smoke_layers`: one FP8 layer by recipe, forward and backward once, and `fp8core.verify`.

Each recipe's results must lie within `BOUND_DB` of those of the same layer without FP8, and the proof must hold. What
operators of fp8core ran is in `resolved.operators`: a recipe depends on those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core.convert import convert_to_float8_training
from fp8core.history import update_scales
from fp8core.recipe import RECIPES
from fp8core.verify import verify
from harness.store.arm import Arm
from harness.store.cause import Cause
from harness.suites.common import crossed_points, generator, recipe_unsupported
from harness.suites.extended import extended_table
from harness.timing import metrics
from harness.timing.workload import ArmInfo, Axis, Series, Trial, Unsupported
from harness.training.steps import cause_of_fault, facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from harness.store.case import Case

METRIC = "sqnr_db"  # of a row that says why there is no figure
BOUND_DB = 15.0  # E5M2 has 2 bits: a product of operands so rounded lies at some 20 dB
AXES: Mapping[str, Axis] = {
    "M": Axis("tokens", default=4096),
    "K": Axis("inputs", default=4096),
    "N": Axis("outputs", default=4096),
}
ARMS: Mapping[str, ArmInfo] = extended_table(
    {Arm(name): ArmInfo(f"a layer of recipe {name}", recipe=name) for name in RECIPES},
    RECIPES,
)


points = crossed_points("smoke_layers", "sizes by axes.M, axes.K and axes.N", AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """A layer of that recipe."""
    return recipe_unsupported(RECIPES[arm], case.integer("M"), device)


def work(case: Case) -> float:
    """FLOPs of the three products."""
    return 6.0 * case.integer("M") * case.integer("K") * case.integer("N")


def trial(case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]) -> Trial:
    """One layer."""
    M, K, N = (case.integer(name) for name in "MKN")
    random = generator(device, case.seed, 0)
    x = torch.randn(M, K, generator=random, device=device).bfloat16()
    grad = torch.randn(M, N, generator=random, device=device).bfloat16()
    plain = nn.Linear(K, N, bias=False, device="meta", dtype=torch.bfloat16).to_empty(device=device)
    with torch.no_grad():
        plain.weight.normal_(std=0.02, generator=random)
    layer = nn.Sequential(nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16))
    layer.load_state_dict({"0.weight": plain.weight.detach()})
    convert_to_float8_training(layer, config=RECIPES[arm])
    with _Operators() as seen:
        mine = _passes(layer, x, grad)
    on_step(1, 2)
    worst = min(
        float(metrics.figures(a.double(), b.double())["sqnr_db"])
        for a, b in zip(mine, _passes(plain, x, grad), strict=True)
    )

    def step() -> None:
        _passes(layer, x, grad)
        update_scales(layer)

    proof = verify(step, layer, recipe=RECIPES[arm], announce=False)
    on_step(2, 2)
    resolved: dict[str, object] = {
        "recipe": arm, "operators": sorted(seen.names), **facts_of(proof)
    }  # fmt: skip
    fault, cause = ("", Cause.NONE) if proof.ok else (proof.line, cause_of_fault(resolved))
    if not worst >= BOUND_DB:
        fault = f"{worst:.1f} dB from the layer without FP8, {BOUND_DB:g} expected"
        cause = Cause.NUMERICS
    series, failure = (Series(METRIC, (worst,), (0,)),), fault and f"a layer of recipe {arm}: {fault}"
    return Trial(series, resolved, failure=failure, cause=cause)


def _passes(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Output, gradient of the input and of the weight."""
    x = x.detach().requires_grad_()
    (weight,) = layer.parameters()
    y = layer(x)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), grad))


class _Operators(TorchDispatchMode):
    """Collects the operators of fp8core that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fp8core":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))
