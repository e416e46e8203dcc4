"""torch.compile: one graph without breaks, and the numbers of eager."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from recipes import on_cpu
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from fp8core import (
    E4M3FN,
    RECIPES,
    Float8Linear,
    Recipe,
    convert_to_float8_training,
    quantize,
    update_scales,
)

pytestmark = [  # both are torch's own, raised while it compiles anything at all
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    counters.clear()


def step(model: nn.Module, parameters: list[nn.Parameter], x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    x = x.detach().requires_grad_()
    output = model(x)
    return [output.detach(), *torch.autograd.grad(output.square().mean(), [x, *parameters])]


def assert_one_graph() -> None:
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", ["aot", pytest.param("inductor", marks=pytest.mark.slow)])
def test_every_recipe_is_one_graph_and_equals_eager(backend: str) -> None:
    """Oracle: eager, bitwise: casts are bit-equal and both run the same products. float32, because fusion skips roundings
    of bfloat16 intermediates. Only Inductor's bias gradients, plain sums, add in another order. The graph calls the fused
    casts and our matmul, each once a use."""
    recipes = [
        *(
            on_cpu(name) for name in RECIPES if name not in ("static", "mxfp8", "mxfp4")
        ),  # torch 2.13's CPU code generator has no float8_e8m0fnu
        *(RECIPES[name].with_kernels("always") for name in ("rowwise", "blockwise", "delayed")),
    ]
    padded = Float8Linear(64, 40, config=dataclasses.replace(RECIPES["rowwise"], pad_inner_dim=True))
    model = nn.Sequential(*(Float8Linear(64, 64, config=recipe) for recipe in recipes), padded)
    x, parameters = torch.randn(2, 16, 64), list(model.parameters())
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    by = (
        aot_autograd(
            fw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        if backend == "aot"
        else backend
    )
    results = step(torch.compile(model, fullgraph=True, dynamic=False, backend=by), parameters, x)
    assert_one_graph()
    for layer in model:
        if layer.passes is not None:
            layer.passes.reset()  # else eager's would be the second one
    for got, want in zip(results, step(model, parameters, x), strict=True):
        if backend == "inductor" and want.dim() == 1:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(got, want)
    if backend == "inductor":
        return  # from torch 2.14 on no profiler sees an operator of tensors alone, such as amax
    targets = (str(node.target) for graph in graphs for node in graph.graph.nodes)
    ran = Counter(target.removesuffix(".default") for target in targets if target.startswith("fp8core."))
    assert ran == {
        "fp8core.cast_rowwise_both": 3,
        "fp8core.cast_1x128_both": 2,
        "fp8core.cast_128x128_both": 1,
        "fp8core.matmul": 3 * sum(recipe.backend == "triton" for recipe in recipes),
        "fp8core.amax": 3,  # delayed scales have not moved yet
        "fp8core.cast_both": 3,
        "fp8core.four_bit_mm": 3,
    }


class Side(nn.Module):
    """Layers that read one tensor, each under its recipe."""

    def __init__(self, recipes: list[Recipe]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Float8Linear(64, 48, bias=False, config=recipe) for recipe in recipes)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.layers]


def test_emulation_and_gradients_in_another_layout_than_traced_are_one_graph() -> None:
    """Oracle: eager; aot_eager runs the traced graph without code generation, so it is cheap and bitwise. Each kind of scale, by
    operators and, emulated, plain. Dynamo traces the backward pass before it has seen a gradient's strides."""
    recipes = [RECIPES[name].emulated() for name in ("tensorwise", "rowwise", "blockwise", "mxfp8")]
    recipes += [on_cpu(name).with_kernels("always") for name in ("delayed", "rowwise", "blockwise", "mxfp8")]
    model = Side(recipes)
    x = torch.randn(16, 64, requires_grad=True)
    gradients = [torch.randn(48, 16).t() for _ in model.layers]
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    got, want = (
        [*outputs, *torch.autograd.grad(outputs, [x, *model.parameters()], gradients)]
        for outputs in (run(x) for run in (compiled, model))
    )
    assert all(map(torch.equal, got, want))
    assert_one_graph()
    one = Side(recipes[:1])
    compiled = torch.compile(one, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert all(map(torch.equal, compiled(x), one(x)))


@pytest.mark.parametrize(
    "name", ["tensorwise", *(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES if n != "tensorwise")]
)
def test_open_sizes_of_several_layers(name: str) -> None:
    """Oracle: eager, bitwise, with dynamic and then, where the recipe has any, with delayed scales. A number that Dynamo takes
    for a variable of the first layer fails at the second: "lift_tracked_freevar_to_input" (torch 2.13)."""
    torch.manual_seed(0)
    model = convert_to_float8_training(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), config=on_cpu(name)
    )
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (160, 192):
        x = torch.randn(2, tokens, 64)
        got = step(compiled, list(model.parameters()), x)
        assert all(map(torch.equal, got, step(model, list(model.parameters()), x)))
        update_scales(model)
    assert not counters["graph_break"]


def test_a_matrix_of_open_size_has_its_own_grad_weight() -> None:
    """Oracle: eager, bitwise. Of a graph's own argument without a view, rowwise's was another (12 dB, torch 2.13)."""
    layer = Float8Linear(64, 48, bias=False, config=on_cpu("rowwise"))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(160, 64)
    got = step(compiled, list(layer.parameters()), x)
    assert all(map(torch.equal, got, step(layer, list(layer.parameters()), x)))


def test_float8_tensor_crosses_the_graph_boundary_both_ways() -> None:
    """Oracle: eager; the subclass is an output of one graph and an input of the next."""
    make = torch.compile(
        lambda x: quantize(x, E4M3FN, "rowwise", dim=1), fullgraph=True, dynamic=False, backend="aot_eager"
    )
    back = torch.compile(lambda q: q.t().dequantize(), fullgraph=True, dynamic=False, backend="aot_eager")
    x = torch.randn(16, 48, dtype=torch.bfloat16)
    got, want = make(x), quantize(x, E4M3FN, "rowwise", dim=1)
    assert torch.equal(got.dequantize(), want.dequantize())
    assert torch.equal(back(got), want.t().dequantize())
