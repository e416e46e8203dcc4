"""census: what each operand of each GEMM was, seen where it ran. Oracle: recipes by hand, and layers that were pinned."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from fp8core import RECIPES, Recipe, census, convert_to_float8_training, scaled_mm, verify
from fp8core.cast import scale_and_cast
from fp8core.gemm.layout import Operand

if TYPE_CHECKING:
    from fp8core.proof.verify import Census


def of(config: Recipe | str, only: str = "", **pins: Any) -> Census:
    """Census of a step of three layers, whose last one (N = 10) no FP8 GEMM takes."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 10)).bfloat16()
    model = convert_to_float8_training(
        model, config=config, module_filter_fn=(lambda _, fqn: fqn == only) if only else None
    )
    x = torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True)
    return census(verify(lambda: model(x).square().mean().backward(), model, announce=False), **pins)


def seen(found: Census, *fields: str) -> dict[tuple[str, str, str], tuple[str, ...]]:
    return {
        (row.layer, row.gemm, row.role): tuple(getattr(row, name) for name in fields) for row in found.rows
    }


def test_a_tensorwise_layer() -> None:
    """By hand: e4m3, but for gradients in e5m2; the last layer in bfloat16. A CPU adds in float32."""
    found = of("tensorwise")
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    formats = {
        ("output", "input"): e4m3, ("output", "weight"): e4m3, ("grad_input", "grad_output"): e5m2,
        ("grad_input", "weight"): e4m3, ("grad_weight", "grad_output"): e5m2, ("grad_weight", "input"): e4m3,
    }  # fmt: skip
    got = seen(found, "format", "granularity", "rounding", "transform", "accumulate", "backend")
    for (gemm, role), dtype in formats.items():
        want = (dtype, "tensorwise", "nearest even", "none", "float32", "torch")
        assert got["0", gemm, role] == got["2", gemm, role] == want
        assert got["3", gemm, role] == ("bfloat16", "", "", "", "", "")
    assert len(found.rows) == 18
    assert found.findings == ()


@pytest.mark.parametrize(
    ("name", "granularities"), [("rowwise", {"rowwise"}), ("blockwise", {"1x128", "128x128"})]
)
def test_granularities(name: str, granularities: set[str]) -> None:
    """Sizes of several blocks, or a block of 128 is a row."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(256, 384)), config=name)
    x = torch.randn(256, 256, requires_grad=True)
    found = census(verify(lambda: model(x).sum().backward(), model, announce=False))
    assert {row.granularity for row in found.rows} == granularities
    assert {row.backend for row in found.rows} == {RECIPES[name].backend}


def test_a_gemm_in_high_precision_is_told_from_the_others() -> None:
    """rowwise_with_gw_hp: grad_weight alone."""
    got = seen(of("rowwise_with_gw_hp"), "format")
    assert {gemm for (layer, gemm, _), (dtype,) in got.items() if layer == "0" and dtype == "bfloat16"} == {
        "grad_weight"
    }


def codes(found: Census) -> set[tuple[str, str]]:
    return {(finding.code, finding.layer) for finding in found.findings}


def test_pinned_layers_are_found_in_the_other_precision() -> None:
    """A filter that ignored a pin; a layer that should have been FP8 and no filter took; a name that is none."""
    assert codes(of("tensorwise", high_precision=("0",))) == {("ran in FP8", "0")}
    assert codes(of("tensorwise", fp8=("3",))) == {("ran in high precision", "3")}
    assert codes(of("tensorwise", only="0", fp8=("*",))) == {("ran in high precision", name) for name in "23"}
    assert codes(of("tensorwise", high_precision=("head",))) == {("no such layer", "head")}
    assert codes(of("tensorwise", high_precision=("3",), fp8=("0", "2"))) == set()


class Hidden(nn.Linear):
    """Says that it is an nn.Linear, and multiplies in FP8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = Operand(*scale_and_cast(x.detach(), "e4m3fn", "tensorwise", dim=1))
        b = Operand(*scale_and_cast(self.weight.detach().t(), "e4m3fn", "tensorwise", dim=0))
        return scaled_mm(a, b, torch.bfloat16) + x @ self.weight.t() * 0


def test_a_layer_that_is_not_converted_and_runs_in_fp8_is_found() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Hidden(32, 32, bias=False)).bfloat16()
    model = convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn == "0")
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    proof = verify(lambda: model(x).square().mean().backward(), model, announce=False)
    assert not proof.ok
    assert ("ran in FP8", "1") in codes(census(proof))


def test_a_recipe_s_fp8_gemm_that_ran_in_high_precision_is_found() -> None:
    """Too few tokens for FP8: the recipe runs such calls in bfloat16, and the census says of which layer."""
    recipe = dataclasses.replace(RECIPES["tensorwise"], min_tokens="bf16")
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)).bfloat16(), config=recipe)
    x = torch.randn(40, 32, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        (model(x[:32]).sum() + model(x[32:]).sum()).backward()

    found = census(verify(step, model, announce=False))
    assert codes(found) == {("ran in high precision", "0")}
    assert found.findings[0].gemms == ("output", "grad_input", "grad_weight")


def test_the_table_has_a_line_for_each_row_and_finding() -> None:
    found = of("tensorwise", high_precision=("0",))
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(found.rows) + len(found.findings)
    assert lines[0].split() == [field.name for field in dataclasses.fields(found.rows[0])]
    assert lines[-1].startswith("ran in FP8: 0 output")
