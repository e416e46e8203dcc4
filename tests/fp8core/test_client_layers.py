"""GPT-2's Conv1D and transformers' experts in FP8. Oracles: the original module, Float8Linear of the turned weight."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from client_models import Conv1D, Experts, Gpt2, Mixture
from recipes import ON_CPU, on_cpu
from torch import Tensor, nn

from fp8core import (
    RECIPES,
    Float8Conv1D,
    Float8Linear,
    Float8LinearConfig,
    audit,
    convert_experts_to_float8,
    convert_to_float8_training,
    convert_to_high_precision,
    microbatches,
    verify,
)


def turned(layer: Conv1D) -> nn.Linear:
    linear = nn.Linear(layer.nx, layer.nf)
    with torch.no_grad():
        linear.weight.copy_(layer.weight.t())
        linear.bias.copy_(layer.bias)
    return linear


@pytest.mark.parametrize("name", RECIPES)
def test_conv1d_is_float8linear_of_the_turned_weight(name: str) -> None:
    """Oracle: Float8Linear of nn.Linear with the turned weight, bit for bit, with gradients."""
    torch.manual_seed(0)
    original = Conv1D(256, 128)
    nn.init.normal_(original.bias)
    linear = Float8Linear.from_float(turned(original), on_cpu(name))
    weight = original.weight
    layer = convert_to_float8_training(nn.Sequential(original), config=on_cpu(name))[0]
    assert isinstance(layer, Float8Conv1D)
    assert layer.weight is weight
    assert (layer.in_features, layer.out_features, layer.nx, layer.nf) == (128, 256, 128, 256)
    x = torch.randn(2, 128, 128)
    grads = []
    for module in (layer, linear):
        given = x.clone().requires_grad_()
        out = module(given)
        out.square().sum().backward()
        assert module.bias.grad is not None
        assert module.weight.grad is not None
        grads.append((out, given.grad, module.bias.grad, module.weight.grad))
    ours, want = grads
    for got, expected in zip(ours[:3], want[:3], strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(ours[3], want[3].t())
    with microbatches(layer):
        assert torch.equal(layer(x), out)


def test_conv1d_keeps_checkpoints() -> None:
    """Oracle: the original's names and shapes; loading both ways, strictly; the way back to the original's class."""
    plain = Gpt2()
    state = copy.deepcopy(plain.state_dict())
    model = convert_to_float8_training(copy.deepcopy(plain), config="rowwise")
    assert {name: t.shape for name, t in model.state_dict().items()} == {
        name: t.shape for name, t in state.items()
    }
    model.load_state_dict(state)
    plain.load_state_dict(model.state_dict())
    assert "Float8Conv1D" in repr(model)
    back = convert_to_high_precision(model)
    assert type(back.h[0]["c_fc"]) is Conv1D
    tokens = torch.randint(0, 256, (2, 32))
    assert torch.equal(back(tokens), plain(tokens))
    assert all(isinstance(m["c_fc"], Float8Conv1D) for m in convert_to_float8_training(back).h)


def test_conv1d_is_proven() -> None:
    model = convert_to_float8_training(Gpt2(), config="rowwise")
    tokens = torch.randint(0, 256, (2, 32))
    proof = verify(lambda: model(tokens).backward(), model, announce=False)
    assert proof.ok, proof.line


def test_what_is_no_conv1d() -> None:
    """Oracle: planted. A class of that name with another forward, a patched one, and odd sizes stay, with the reason."""

    class Other(nn.Module):
        pass

    look_alike = type("Conv1D", (Conv1D,), {"forward": lambda self, x: Conv1D.forward(self, x).relu() + 1})
    patched = Conv1D(32, 32)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleDict(
        {"like": look_alike(32, 32), "patched": patched, "odd": Conv1D(30, 32), "fine": Conv1D(32, 32)}
    )
    convert_to_float8_training(model)
    assert [row.fqn for row in audit(model).converted] == ["fine"]
    rows = {row.fqn: row.reason for row in audit(model).weights}
    assert "something else than x @ weight + bias" in rows["like.weight"]
    assert "was replaced on the instance" in rows["patched.weight"]
    assert "multiple of 16" in rows["odd.weight"]
    with pytest.raises(TypeError, match=r"Conv1D with weight \[in, nf\], got Other"):
        Float8Conv1D.from_float(Other())


def test_conv1d_made_from_scratch_and_gathers() -> None:
    """Oracle: the original's layout and initialisation; the FP8 all-gather is refused with the reason."""
    layer = Float8Conv1D(64, 32)
    assert layer.weight.shape == (32, 64)
    layer.reset_parameters()
    assert float(layer.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    model = convert_to_float8_training(nn.Sequential(Conv1D(32, 32), nn.Linear(32, 32)), config=config)
    assert [row.all_gather for row in audit(model).layers] == [
        "high precision: its weight lies as [in, out]",
        "fp8",
    ]


def routed(tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    weights, chosen = torch.randn(tokens, experts).softmax(-1).topk(top_k, -1)
    return chosen, weights


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_with_high_precision_products_are_the_original(transposed: bool, bias: bool) -> None:
    """Oracle: the original forward in float64-like agreement: a recipe without FP8 GEMMs changes nothing but the order of sums."""
    torch.manual_seed(0)
    experts = Experts(64, 32, 4, 2, transposed, bias)
    x = torch.randn(45, 64)
    chosen, weights = routed(45, 4, 2)
    want = experts(x, chosen, weights)
    grads = torch.autograd.grad(want.square().sum(), list(experts.parameters()))
    converted = convert_experts_to_float8(experts, config="rowwise")
    for module in converted.children():
        if hasattr(module, "recipe"):
            module.recipe = None
    got = converted(x, chosen, weights)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    again = torch.autograd.grad(got.square().sum(), list(converted.parameters()))
    for one, other in zip(again, grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_a_float8linear_for_each(transposed: bool, bias: bool) -> None:
    """Oracle: Float8Linear for each expert, bit for bit before tokens are weighted and added (rowwise: scales of their own)."""
    torch.manual_seed(0)
    experts = Experts(64, 32, 4, 1, transposed, bias)
    x = torch.randn(64, 64)
    chosen, weights = torch.arange(64)[:, None] % 4, torch.ones(64, 1)
    want = torch.empty(64, 64)
    for e in range(4):
        up, down = experts.gate_up_proj[e].detach(), experts.down_proj[e].detach()
        up, down = (up.t(), down.t()) if transposed else (up, down)
        layers = []
        for weight, name in ((up, "gate_up_proj_bias"), (down, "down_proj_bias")):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias)
            linear.weight.data = weight
            if bias:
                linear.bias.data = getattr(experts, name)[e].detach()
            layers.append(Float8Linear.from_float(linear, "rowwise"))
        rows = chosen[:, 0] == e
        want[rows] = layers[1](experts._apply_gate(layers[0](x[rows]))).detach()
    convert_experts_to_float8(experts, config="rowwise")
    assert torch.equal(experts(x, chosen, weights).detach(), want)


@pytest.mark.parametrize("name", [name for name in ON_CPU if RECIPES[name].scaling == "dynamic"])
def test_a_mixture_trains_in_fp8(name: str) -> None:
    """Oracle: the loss of the original; verify's proof; parameters and their names."""
    torch.manual_seed(0)
    model = Mixture(128, 128)
    x = torch.randn(96, 128)
    want = float(model(x).square().mean().detach())
    parameters = dict(model.named_parameters())
    try:
        convert_experts_to_float8(model, config=name)
    except ValueError as error:
        assert "no kernel" in str(error)  # noqa: PT017  # recipes that no grouped product takes
        return
    assert dict(model.named_parameters()) == parameters
    assert isinstance(model.experts, Experts)
    assert type(model.experts).__name__ == "Float8Experts"
    proof = verify(lambda: model(x).square().mean().backward(), model, announce=False)
    assert proof.ok, proof.line
    assert float(model(x).square().mean().detach()) == pytest.approx(want, rel=0.02)
    model(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_copies_pickles_and_the_way_back() -> None:
    """Oracle: the same output from a copy and a pickle, bit for bit; the original's class and output afterwards."""
    model = Mixture()
    x = torch.randn(32, 64)
    plain = model(x)
    convert_experts_to_float8(model, config="rowwise")
    want = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), want)
        assert type(other.experts) is type(model.experts)
    back = convert_to_high_precision(model)
    assert type(back.experts) is Experts
    assert torch.equal(back(x), plain)


def test_experts_that_stay() -> None:
    """Oracle: filtered and refused ones keep class, children and the reason; expert parallelism of transformers is refused."""
    model = Mixture()
    with pytest.raises(ValueError, match="no experts were converted"):
        convert_experts_to_float8(model, module_filter_fn=lambda module, fqn: False)
    assert type(model.experts) is Experts
    assert [name for name, _ in model.experts.named_children()] == ["act_fn"]
    assert {row.reason for row in audit(model).weights if "experts" in row.fqn} == {
        "left out by module_filter_fn"
    }
    odd = Experts(40, 32, 2, 1)
    convert_experts_to_float8(odd, allow_no_conversion=True)
    assert type(odd) is Experts
    assert "multiple of 16" in audit(odd).weights[0].reason
    convert_experts_to_float8(model)
    model.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="expert parallelism"):
        model(torch.randn(8, 64))
