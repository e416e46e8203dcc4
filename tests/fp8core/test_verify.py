"""verify: it holds for what runs in FP8, in each way of running it, and fails for each way of only seeming to."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from recipes import ON_CPU
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8core import (
    RECIPES,
    Proof,
    convert_to_float8_training,
    update_scales,
    verify,
)
from fp8core.experts.moe import GroupedMatmul
from fp8core.proof.verify import calls, probe
from fp8core.proof.verify.oracle import TiledOperand
from fp8core.proof.verify.products import decibels, difference

Step = Callable[[], object]


class Block(nn.Module):
    """Two layers that fit FP8, one (N = 10) that does not."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 10)
        self.reentrant = reentrant

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is not None:
            return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))
        return self.head(self.body(x))


def training(model: nn.Module, x: torch.Tensor | None = None, passes: int = 1) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(16, 32) if x is None else x

    def step() -> None:
        for _ in range(passes):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)

    return step


def proof_of(model: nn.Module, step: Step | None = None, **options: object) -> Proof:
    return verify(step or training(model), model, announce=False, **options)


@pytest.mark.parametrize(("name", "backend"), [*((n, "") for n in ON_CPU), ("tensorwise", "triton")])
def test_the_count_is_that_of_the_recipe(name: str, backend: str) -> None:
    """Oracle: by hand. The input of `up` needs no gradient; only backend "torch" leaves the head alone."""
    recipe = RECIPES[name].with_backend(backend or RECIPES[name].backend)
    model = convert_to_float8_training(Block(), config=recipe)
    proof = proof_of(model, recipe=recipe)
    assert proof.ok, proof.problems
    by_torch = recipe.backend == "torch"
    expected = (3 if name == "rowwise_with_gw_hp" else 5) if by_torch else 8
    assert proof.counted == proof.predicted == expected
    assert proof.exit_code == 0
    assert proof.line.startswith(
        f"FP8 verified: {2 if by_torch else 3} of 3 Linear layers, {proof.counted} FP8 GEMMs a step as predicted"
    )
    assert [layer.reason[:4] for layer in proof.layers] == ["", "", "N=10" if by_torch else ""]
    assert json.loads(proof.to_json())["layers"][0]["saturated"].keys() == {"input", "weight", "grad_output"}


@pytest.mark.parametrize(
    # a reentrant checkpoint without an input that needs a gradient trains nothing inside
    ("needs_input_grad", "reentrant"),
    [(False, None), (False, False), (True, None), (True, True), (True, False)],
)
@pytest.mark.parametrize(("frozen", "passes"), [("", 1), ("", 3), ("up.weight", 3), ("down.weight", 3)])
def test_the_count_follows_gradients_recomputation_and_microbatches(
    needs_input_grad: bool, frozen: str, reentrant: bool | None, passes: int
) -> None:
    """Oracle: torch.profiler, inside of verify; the prediction may not know it."""
    model = convert_to_float8_training(Block(reentrant))
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    proof = proof_of(model, training(model, torch.randn(16, 32, requires_grad=needs_input_grad), passes))
    assert proof.ok, proof.problems
    per_pass = 2 + 3 + needs_input_grad + (2 if reentrant is not None else 0) - bool(frozen)
    assert proof.counted == passes * per_pass


def test_compiled_models() -> None:
    torch._dynamo.reset()
    model = convert_to_float8_training(Block())
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    step = training(compiled)
    for given in (model, compiled):
        proof = proof_of(given, step)
        assert proof.ok, proof.problems
        assert proof.counted == 5
        assert proof.compiled
        assert proof.line.startswith("FP8 verified in eager mode: ")


def test_an_output_in_high_precision_is_no_missing_gemm() -> None:
    """Oracle: the recipe, by hand: FP8 for grad_input alone, which of two layers that fit only the second computes."""
    recipe = RECIPES["rowwise_with_gw_hp"]
    recipe = dataclasses.replace(recipe, output=recipe.grad_weight)
    proof = proof_of(convert_to_float8_training(Block(), config=recipe), recipe=recipe)
    assert proof.ok, proof.problems
    assert proof.counted == proof.predicted == 1


@pytest.mark.parametrize(("dtype", "ok"), [(torch.bfloat16, False), (torch.uint8, True), (None, False)])
def test_an_all_gather_in_bfloat16(dtype: torch.dtype | None, ok: bool) -> None:
    """A real collective of one rank; nothing gathered at all fails too."""
    model = convert_to_float8_training(Block(), config=RECIPES["tensorwise"].with_fp8_all_gather())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed by torch 2.13
    inner = training(model)

    def step() -> None:
        inner()
        if dtype is not None:
            gather(torch.empty(8, dtype=dtype), torch.ones(8, dtype=dtype))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        proof = proof_of(model, step, fp8_all_gather=True)
    finally:
        dist.destroy_process_group()
    assert proof.ok == ok
    if dtype is not None:
        assert proof.all_gathers == {str(dtype).removeprefix("torch."): 8 * dtype.itemsize}


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_cpu_says_that_it_emulates(backend: str) -> None:
    proof = proof_of(convert_to_float8_training(Block(), config=RECIPES["rowwise"].with_backend(backend)))
    assert proof.ok
    assert proof.emulated_in == proof.to_dict()["emulated_in"] == "float32"
    assert "emulated: it multiplies FP8 codes in float32" in proof.line


@pytest.mark.parametrize(("apart_db", "beyond"), [(30.0, 0), (26.0, 0), (24.0, 1), (20.0, 1)])
def test_a_row_on_a_gpu_may_be_25_db_away_and_no_further(apart_db: float, beyond: int) -> None:
    """One row of the result is moved by a vector of a known length; the others are exact."""
    a, b = torch.randn(16, 64), torch.randn(32, 64)
    result = a.double() @ b.double().t()
    push = torch.randn(32, dtype=torch.float64)
    result[3] += push * (10 ** (-apart_db / 20) * result[3].norm() / push.norm())
    sides = [TiledOperand(x) for x in (a, b)]
    assert difference(*sides, result, (torch.bfloat16,), registers=None).beyond == beyond


def test_scales_of_mx_are_told_by_their_type() -> None:
    """Oracle: OCP MX, where a block of 32 has a scale in E8M0."""
    codes, scale = torch.ones(256, 256), torch.ones(256, 8)
    seen = [calls.granularity_seen(codes, s) for s in (scale, scale.to(torch.float8_e8m0fnu))]
    assert seen == ["1x128", "1x32"]


@pytest.mark.parametrize("name", ["delayed", "static"])
def test_an_amax_that_no_cast_goes_by_is_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers hold it and Python does not know: each cast stays dynamic, as all comparisons then expect."""
    model = convert_to_float8_training(Block(), config=name)
    assert not probe.tested_recipes(calls.Watch(model), model)[1]
    monkeypatch.setattr(probe, "mark_ready", lambda memory: None)
    problems = probe.tested_recipes(calls.Watch(model), model)[1]
    assert any("amax of input in use is 0 " in text for text in problems), problems


def test_experts_without_tokens_are_not_proven() -> None:
    """Their GEMMs have nothing to compare, whatever another layer shows."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 64, 32))
            self.product = GroupedMatmul(config="rowwise")
            self.head = nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            none = self.product(x[:0], self.weight, torch.zeros(2, dtype=torch.int32))
            return self.head(x) + none.sum()

    model = convert_to_float8_training(Model())
    proof = proof_of(model, lambda: model(torch.randn(16, 32)).square().mean().backward())
    assert not proof.ok
    assert not proof.problems
    assert [line.partition(": every")[0] for line in proof.not_checked] == ["product: output"]


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [
        (100.0, 1.0, 20.0),
        (1.0, 0.0, math.inf),
        (0.0, 1.0, -math.inf),
        (math.nan, 0.0, math.nan),
        (1.0, math.nan, math.nan),
        (0.0, math.nan, math.nan),
    ],
)
def test_decibels_of_what_is_no_number_are_none(signal: float, noise: float, expected: float) -> None:
    """Oracle: the definition, 10 log10 of the ratio, by hand; a NaN among the energies is neither the best nor the worst."""
    assert decibels(signal, noise) == pytest.approx(expected, nan_ok=True)
