"""Conversion, audit and verification of experts. Oracles: the seeds' rule, FLOPs by hand, the profiler, planted faults."""

from __future__ import annotations

import pytest
import torch
from mixtures import Experts, Mixture, ends
from torch import nn

from fp8core import (
    RECIPES,
    GroupedMatmul,
    audit,
    convert_experts_to_float8,
    convert_to_float8_training,
    dense_layers_only,
    grouped_mm,
    verify,
)
from fp8core.proof.profiled_gemms import profiling


def test_experts_are_converted_on_request_alone() -> None:
    """Oracle: the seeds' rule. Neither conversion touches a router; parameters stay the same objects."""
    model = Mixture(experts=16)
    before = dict(model.named_parameters())
    convert_to_float8_training(model, config="tensorwise")
    report = audit(model)
    assert [layer.fqn for layer in report.converted] == ["head"]
    assert [(found.fqn, found.converted) for found in report.experts] == [
        (f"experts.{name}", False) for name in ("gate", "up", "down")
    ]
    convert_experts_to_float8(model, config="rowwise")
    report = audit(model)
    assert [found.recipe for found in report.experts] == ["rowwise"] * 3
    assert type(model.router).__name__ == "Router"
    dense, router, one = 3 * 32 * 32, 3 * 32 * 16, 2 * 3 * 3 * 32 * 48
    assert report.fp8_flop_share == pytest.approx((dense + one) / (dense + router + one))
    assert "3 of 3 stacks of experts converted" in str(report)
    assert all(dict(model.named_parameters())[name] is p for name, p in before.items())


def test_a_plain_router_is_left_out_by_name() -> None:
    """Oracle: names. A router that is exactly nn.Linear has a shape that FP8 takes; the filter keeps it."""
    model = nn.ModuleDict(
        {name: nn.Linear(32, 16) for name in ("router", "shared_expert", "router_free", "up")}
        | {"experts": nn.ModuleList([nn.Linear(32, 16)])}
    )
    convert_to_float8_training(model, module_filter_fn=dense_layers_only)
    assert [layer.fqn for layer in audit(model).converted] == ["router_free", "up"]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_verify_counts_the_gemms_of_experts(name: str) -> None:
    """Oracle: the profiler. A loop runs a GEMM for each expert that has tokens; each step is proven."""
    model = Mixture(experts=12)
    convert_experts_to_float8(model, config=name)
    x = torch.randn(6, 32)

    def step() -> None:
        model(x).square().mean().backward()

    proof = verify(step, model, announce=False)
    assert proof.ok, proof.line
    (experts,) = proof.experts
    step()  # which `verify` leaves no trace of
    used = int((model.experts.gate.grad.abs().amax((1, 2)) > 0).sum())
    assert used < 12
    # x needs no gradient, so that gate and up run no grad_input
    assert experts.predicted == used * (3 * RECIPES[name].fp8_gemms - 2)
    with profiling(on_gpu=False) as profiled:
        step()
    assert proof.counted == profiled.counted == experts.predicted
    assert experts.agreement_db is not None
    assert experts.agreement_db > 50
    assert "1 modules of experts" in proof.line


def test_verify_sees_what_is_not_fp8() -> None:
    """Oracle: planted. Emulated experts, experts that no token reaches, and a product with a wrong scale are no proof."""
    emulated, unused, wrong = Mixture(), Mixture(), Mixture()
    convert_experts_to_float8(emulated, config=RECIPES["rowwise"].emulated())
    for model in (unused, wrong):
        convert_experts_to_float8(model, config="rowwise")
    unused.experts.forward = lambda x, offsets: x
    wrong.experts.multiply.register_forward_hook(lambda module, args, output: output * 1.05)
    x = torch.randn(24, 32)
    for model, part in ((emulated, "emulated"), (unused, "never called"), (wrong, "not the recipe's")):
        proof = verify(lambda model=model: model(x).square().mean().backward(), model, announce=False)
        assert part in proof.line, proof.line


@pytest.mark.parametrize(
    ("recipe", "sizes", "part"),
    [
        ("delayed", (32, 32), "not defined for groups"),
        ("static", (32, 32), "not defined for groups"),
        ("blockwise", (32, 48), "multiple of 128"),
        ("mxfp8", (32, 32), "no kernel for 1x32"),
        ("rowwise", (32, 40), "not a multiple of 16"),
    ],
)
def test_recipes_that_are_refused(recipe: str, sizes: tuple[int, int], part: str) -> None:
    """Oracle: the message names the reason, when converting and when multiplying."""
    experts = Experts(2, *sizes)
    with pytest.raises(ValueError, match=part):
        convert_experts_to_float8(experts, config=recipe)
    kept = convert_experts_to_float8(experts, config=recipe, allow_no_conversion=True)
    assert part in audit(kept).experts[0].reason
    with pytest.raises(ValueError, match=part):
        grouped_mm(torch.randn(4, sizes[0]), experts.gate, ends(2, 2), config=recipe)


def test_conversion_refuses() -> None:
    model = Mixture()
    with pytest.raises(ValueError, match="no module with a GroupedMatmul"):
        convert_experts_to_float8(nn.Linear(16, 16))
    with pytest.raises(ValueError, match="filter"):
        convert_experts_to_float8(model, module_filter_fn=lambda module, fqn: fqn != "experts")
    assert "module_filter_fn" in audit(model).experts[0].reason
    convert_experts_to_float8(model)
    with pytest.raises(ValueError, match="already runs recipe rowwise"):
        convert_experts_to_float8(model, config="tensorwise")
    with pytest.raises(ValueError, match="at least 1"):
        GroupedMatmul(experts_per_token=0)
