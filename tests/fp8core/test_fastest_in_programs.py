"""Backend "fastest" in layers, groups, traced code and under modes: the product of whoever was chosen, bit for bit.

The oracle of a choice is the times that the test made up. Only the test marked `gpu` looks at a real clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_clock import NAMES, SMALL, Clock, operands

from fp8core import BACKENDS, RECIPES, Float8Linear, grouped_mm, scaled_mm
from fp8core.gemm import FASTEST, fastest
from fp8core.gemm.layout import Operand
from fp8core.kernels import tuning
from fp8core.kernels.tuning import ROUNDS

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("name", ["tensorwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("winner", NAMES)
def test_a_layer_is_that_of_the_chosen_backend(
    winner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same layer with that backend, bit for bit: output and both gradients."""
    clock = Clock(**{n: 1.0 + (n != winner) for n in NAMES})
    monkeypatch.setitem(BACKENDS, "fastest", clock.choosing())
    x, g = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(32, 48, dtype=torch.bfloat16)
    recipes = [RECIPES[name].with_backend(backend) for backend in ("fastest", winner)]
    layers = [Float8Linear(64, 48, config=recipe, dtype=torch.bfloat16) for recipe in recipes]
    layers[1].load_state_dict(layers[0].state_dict())
    inputs = x.requires_grad_()
    outputs = [layer(inputs) for layer in layers]
    grads = [
        torch.autograd.grad(y, (inputs, layer.weight), g) for y, layer in zip(outputs, layers, strict=True)
    ]
    assert clock.timed == 2 * ROUNDS * RECIPES[name].fp8_gemms
    assert torch.equal(*outputs)
    assert all(map(torch.equal, *grads))


def test_groups_go_in_one_call_where_they_do_for_torch_and_else_each_as_chosen() -> None:
    """Oracle: backend "torch", whose loop this is on a CPU, bit for bit."""
    x, weight = torch.randn(48, 32), torch.randn(2, 16, 32)
    offsets = torch.tensor([16, 48], dtype=torch.int32)
    got, want = (
        grouped_mm(x, weight, offsets, config=RECIPES["rowwise"].with_backend(name))
        for name in ("fastest", "torch")
    )
    assert torch.equal(got, want)


def _traced(dynamic: bool, M: int = 32) -> tuple[set[str], torch.Tensor, tuple[Any, ...]]:
    """Operators of the one graph of a product by backend "fastest", its result and its operands."""
    found: set[str] = set()

    def noting(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        found.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def product(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
    ) -> torch.Tensor:
        return scaled_mm(Operand(a, scale_a), Operand(b, scale_b), backend="fastest")

    torch._dynamo.reset()
    given = operands(M)
    result = torch.compile(product, fullgraph=True, dynamic=dynamic, backend=noting)(*given[:4])
    return found, result, given


@pytest.mark.parametrize("winner", NAMES)
def test_traced_code_holds_the_operator_that_was_measured(
    winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the times, measured in eager mode before; "torch" for what was not, and for sizes left open. One graph each."""
    clock = Clock(**{n: 1.0 + (n != winner) for n in NAMES})
    choosing = clock.choosing()
    choosing.candidates = {name: BACKENDS[name] for name in NAMES}
    monkeypatch.setitem(BACKENDS, "fastest", choosing)
    tuning.remember(fastest._key(SMALL), winner)
    for dynamic, M, expected in ((False, 32, winner), (False, 128, "torch"), (True, 32, "torch")):
        found, result, given = _traced(dynamic, M)
        assert ("fp8core.matmul.default" in found, any("_scaled_mm" in name for name in found)) == (
            expected == "triton",
            expected == "torch",
        )
        assert torch.equal(result, BACKENDS[expected].matmul(*given))
    assert not clock.timed


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("size", [(4096, 4096, 4096), (16384, 4096, 14336), (512, 8192, 1024)], ids=str)
def test_the_choice_is_not_below_the_bar_on_a_gpu(size: tuple[int, int, int], granularity: str) -> None:
    """Oracle: `do_bench` of each library and of the choice in turn; 0.95 of the better one is the bar."""
    if torch.version.hip or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8core's matmul needs an NVIDIA GPU of compute capability 8.9")
    given = [t.cuda() if isinstance(t, torch.Tensor) else t for t in operands(*size, granularity)]
    chosen = FASTEST.choice(*given)
    times: dict[str, list[float]] = {name: [] for name in (*NAMES, "fastest")}
    for name in [*times] * 5:
        times[name].append(tuning.cuda_ms(lambda name=name: BACKENDS[name].matmul(*given)))
    medians = {name: sorted(own)[2] for name, own in times.items()}
    assert min(medians[name] for name in NAMES) / medians["fastest"] >= 0.95, (chosen, medians)
