"""producers: what layers compute from a fused norm or activation is what they compute from its plain result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from producer_block import DTYPES, Block
from recipes import FP8
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core import (
    RECIPES,
    Float8Linear,
    RMSNorm,
    SwiGLU,
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
@pytest.mark.parametrize("name", FP8)
def test_layers_compute_the_same(name: str, kernels: str, dtype: torch.dtype) -> None:
    """Oracle: the same block that gives its layers plain tensors; bitwise, amaxes too."""
    want, got = (trained(Block(name, fused, kernels, dtype), dtype) for fused in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise"])
def test_autocast_and_inference_too(name: str) -> None:
    """Oracle: as above. Autocast rounds between producer and cast, which an amax from before would miss."""
    plain, fused = Block(name, False, "always"), Block(name, True, "always")
    want, got = (trained(block, torch.float32, autocast=True) for block in (plain, fused))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with torch.no_grad():
        x = torch.randn(5, 32)
        assert torch.equal(fused(x), plain(x))
        assert fused(x[:0]).shape == (0, 32)


@DTYPES
def test_against_torch(dtype: torch.dtype) -> None:
    """Oracle: torch's rms_norm, silu(gate) * up, and an addition before the norm, by autograd in float64. Half an ulp of the
    output, and 80 float32 roundings of the largest: rows of 64 elements, and some steps."""
    norm, wide = RMSNorm(64, dtype=dtype), nn.RMSNorm(64, eps=1e-6, dtype=torch.float64)
    norm.weight.data.uniform_(0.5, 2)
    wide.weight.data.copy_(norm.weight)

    def rounded(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        exact = x + delta  # which autograd passes through the rounding to the dtype of the sum
        return exact + (exact.to(dtype).double() - exact).detach()

    for ours, theirs, count in (
        (lambda x: (norm(x),), lambda x: (wide(x),), 1),
        (lambda g, u: (SwiGLU()(g, u),), lambda g, u: (functional.silu(g) * u,), 2),
        (norm.add, lambda x, delta: (rounded(x, delta), wide(rounded(x, delta))), 2),
    ):
        norm.weight.grad = wide.weight.grad = None
        low = [(torch.randn(4, 6, 64) * 3).to(dtype).requires_grad_() for _ in range(count)]
        high = [t.detach().double().requires_grad_() for t in low]
        got, want = ours(*low), theirs(*high)
        grads = [torch.randn(4, 6, 64).to(dtype) for _ in got]
        torch.autograd.backward(got, grads)
        torch.autograd.backward(want, [g.double() for g in grads])
        pairs = [*zip(got, want, strict=True), *((a.grad, b.grad) for a, b in zip(low, high, strict=True))]
        if norm.weight.grad is not None:
            pairs.append((norm.weight.grad, wide.weight.grad))
        for a, b in pairs:
            bound = HALF_ULP[dtype] * b.abs() + 80 * 2.0**-24 * b.abs().max()
            assert ((a.double() - b).abs() <= 1.01 * bound).all()


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


@pytest.mark.parametrize("name", AFTER)
def test_no_amax_is_found_twice(name: str) -> None:
    """Oracle: the operators by hand; no `amax` pass."""
    block = Block(name, True, "always")
    trained(block, torch.float32)
    x, gate = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48, requires_grad=True)
    with Names() as norm:
        block.norm(x, block.gate, block.up)
    with Names() as act:
        block.act(gate, gate, block.down)
    assert (norm.seen, act.seen) == (expected(name, "rms_norm"), expected(name, "swiglu"))


def test_an_infinity_of_the_producer_stays_loud() -> None:
    """Oracle: the definition: it turns up as NaN, also where a stale scale would saturate it."""
    for name in ("tensorwise", "delayed"):
        block = Block(name, True, "always")
        trained(block, torch.float32)
        gate = torch.randn(16, 48)
        gate[3, 3] = torch.inf
        assert block.down(block.act(gate, torch.ones_like(gate), block.down))[3].isnan().all()


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
def test_a_gain_alone_trains(name: str) -> None:
    """Oracle: the same through the norm's plain result. Frozen layers and an input without gradient ask for codes alone."""
    torch.manual_seed(0)
    norm = RMSNorm(32)
    layer = Float8Linear(32, 48, config=RECIPES[name]).requires_grad_(False)
    x, grads = torch.randn(16, 32), []
    if name == "delayed":
        layer(norm(x)).sum().backward()
        layer.amaxes.record("grad_output", torch.tensor(1.0))
        update_scales(layer)
    for call in (lambda: layer(norm(x, layer)), lambda: layer(norm(x))):
        norm.weight.grad = None
        call().square().sum().backward()
        grads.append(norm.weight.grad)
    assert torch.equal(*grads)


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
