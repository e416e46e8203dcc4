"""GPT-2's Conv1D and transformers' experts in FP8. Oracles: the original module, Float8Linear of the turned weight."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from client_models import Conv1D, Experts, Gpt2, Mixture
from recipes import on_cpu
from torch import Tensor, nn
from torch.nn import functional

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
    linear.fqn = "0"  # where stochastic rounding finds its random numbers
    weight = original.weight
    layer = convert_to_float8_training(nn.Sequential(original), config=on_cpu(name))[0]
    assert isinstance(layer, Float8Conv1D)
    assert layer.weight is weight
    assert (layer.in_features, layer.out_features, layer.nx, layer.nf) == (128, 256, 128, 256)
    x = torch.randn(2, 128, 128)
    x.requires_grad_()
    results = []
    for module in (layer, linear):
        out = module(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, module.bias, module.weight])])
    results[1][3] = results[1][3].t()
    assert all(map(torch.equal, *results))
    with microbatches(layer):
        assert torch.equal(layer(x), out)


def test_conv1d_keeps_checkpoints() -> None:
    """Oracle: the original's names and shapes; loading both ways, strictly; the way back to the original's class."""
    plain, tokens = Gpt2(), torch.randint(0, 256, (2, 32))
    state = copy.deepcopy(plain.state_dict())
    model = convert_to_float8_training(copy.deepcopy(plain), config="rowwise")
    assert {name: t.shape for name, t in model.state_dict().items()} == {
        name: t.shape for name, t in state.items()
    }
    model.load_state_dict(state)
    plain.load_state_dict(model.state_dict())
    proof = verify(lambda: model(tokens).backward(), model, announce=False)
    assert proof.ok, proof.line
    back = convert_to_high_precision(model)
    assert type(back.h[0]["c_fc"]) is Conv1D
    assert torch.equal(back(tokens), plain(tokens))
    assert all(isinstance(m["c_fc"], Float8Conv1D) for m in convert_to_float8_training(back).h)


def test_what_is_no_conv1d() -> None:
    """Oracle: planted. A class of that name with another forward, a patched one, and odd sizes stay, with the reason."""

    look_alike = type("Conv1D", (Conv1D,), {"forward": lambda self, x: Conv1D.forward(self, x).relu() + 1})
    patched = Conv1D(32, 32)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleDict(
        {"like": look_alike(32, 32), "patched": patched, "odd": Conv1D(30, 32), "fine": Conv1D(32, 32)}
    )
    convert_to_float8_training(model)
    assert [row.fqn for row in audit(model).converted] == ["fine"]
    rows = {row.fqn: row.reason for row in audit(model).weights}
    assert "something else" in rows["like.weight"]
    assert "replaced on the instance" in rows["patched.weight"]
    assert "multiple of 16" in rows["odd.weight"]


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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_a_float8linear_for_each(transposed: bool, bias: bool) -> None:
    """Oracle: the original forward whose products are those of Float8Linear (rowwise: each expert has scales of its own)."""
    torch.manual_seed(0)
    experts = Experts(64, 32, 4, 2, transposed, bias)
    x, weights = torch.randn(64, 64, requires_grad=True), torch.rand(64, 2, requires_grad=True)
    chosen = (torch.arange(64)[:, None] + torch.arange(2)) % 4

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layer = Float8Linear(*weight.t().shape, bias=bias is not None, config="rowwise")
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return torch.func.functional_call(layer, given, (x,))

    results = []
    for linear in (product, functional.linear):
        experts.linear = linear
        if linear is not product:
            convert_experts_to_float8(experts, config="rowwise")
        y = experts(x, chosen, weights)
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, weights, *experts.parameters()])])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_mixture_trains_in_fp8(name: str) -> None:
    """Oracle: the loss of the original; verify's proof; parameters and their names."""
    torch.manual_seed(0)
    model = Mixture(128, 128)
    x = torch.randn(96, 128)
    want = float(model(x).square().mean().detach())
    parameters = dict(model.named_parameters())
    convert_experts_to_float8(model, config=name)
    assert dict(model.named_parameters()) == parameters
    assert isinstance(model.experts, Experts)
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
