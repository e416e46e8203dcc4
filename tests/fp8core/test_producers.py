"""producers: what layers compute from a fused norm or activation is what they compute from its plain result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from producer_block import DTYPES, Block
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core import (
    RECIPES,
    update_scales,
)

HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def trained(block: Block, dtype: torch.dtype, autocast: bool = False) -> list[torch.Tensor]:
    """Outputs, gradients and amaxes of three steps."""
    torch.manual_seed(1)
    seen: list[torch.Tensor] = []
    for index in range(3):
        x = (torch.randn(2, 8, 32) * (1 + index)).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = block(x)
        block.zero_grad()
        y.float().square().mean().backward()
        assert x.grad is not None
        seen += [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]
        update_scales(block)
        seen += [b.clone() for b in block.buffers()]
    return seen


@DTYPES
@pytest.mark.parametrize("kernels", ["never", "always"])
@pytest.mark.parametrize("name", RECIPES)
def test_layers_compute_the_same(name: str, kernels: str, dtype: torch.dtype) -> None:
    """Oracle: the same block that gives its layers plain tensors; bitwise, amaxes too."""
    want, got = (trained(Block(name, fused, kernels, dtype), dtype) for fused in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Names(TorchDispatchMode):
    """Operators of ours that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(op).startswith("fp8core."):
            self.seen.append(str(op).split(".")[1])
        return op(*args, **(kwargs or {}))


AFTER = {  # operators after the name of the producer: of itself and the cast of its result, training
    "tensorwise": ["_amax", "cast_both"],
    "delayed": ["_amax", "cast_delayed_both"],
    "rowwise": ["_amax", "cast_rowwise_both"],
}


def expected(name: str, producer: str) -> list[str]:
    first, *rest = AFTER[name]
    return [producer + first, *rest]


def test_compiled_is_one_graph() -> None:
    """Oracle: eager of the plain block, but for the rounding of its formulas; fullgraph refuses breaks."""
    torch._dynamo.reset()
    block, x = Block("rowwise", True, "auto"), torch.randn(16, 32)
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.equal(compiled(x), block(x))


@DTYPES
@pytest.mark.parametrize("name", AFTER)
def test_an_addition_in_the_norm(name: str, dtype: torch.dtype) -> None:
    """Oracle: the addition before the norm. What does not depend on the sum of two gradients, bit for bit; that sum is
    rounded once where autograd rounds three times: an ulp before a cast is a step of its code at most, rarely."""
    block = Block(name, True, "always", dtype)
    trained(block, dtype)
    x, delta = (torch.randn(16, 32, dtype=dtype, requires_grad=True) for _ in range(2))
    results = []
    for fused in (True, False):
        block.zero_grad()
        with Names() as forward:
            total = x + delta
            h = block.norm(total, block.gate, block.up)
            if fused:
                forward.seen.clear()
                total, h = block.norm.add(x, delta, block.gate, block.up)
                assert forward.seen == expected(name, "add_rms_norm")
        outputs = total, block.gate(h), block.up(h)
        gradients = torch.autograd.grad(
            sum(y.float().square().sum() for y in outputs), [x, *block.parameters()][:4]
        )
        results.append([*gradients, *outputs])
    (got, *others), (want, *wanted) = results
    assert all(torch.equal(a, b) for a, b in zip(others, wanted, strict=True))
    assert (got.double() - want.double()).norm() < (
        2e-2 if dtype == torch.bfloat16 else 1e-3
    ) * want.double().norm()
