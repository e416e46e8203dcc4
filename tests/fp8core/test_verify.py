"""verify: it holds for what runs in FP8, in each way of running it, and fails for each way of only seeming to."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recipes import ON_CPU
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fp8core import (
    RECIPES,
    Proof,
    convert_to_float8_training,
    update_scales,
    verify,
)
from fp8core.experts.moe import GroupedMatmul
from fp8core.proof.verify import calls, oracle, probe, sums
from fp8core.proof.verify.oracle import TiledOperand
from fp8core.proof.verify.products import Sketch, decibels, difference

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
    assert str(proof) == proof.line
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


def test_a_layer_that_is_never_called_is_no_proof() -> None:
    model = convert_to_float8_training(Block())
    proof = proof_of(model, lambda: model.up(torch.randn(16, 32)).sum().backward())
    assert not proof.ok
    assert [text.partition(":")[0] for text in proof.problems] == ["down"]


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


def test_a_bias_is_summed_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "tiles", partial(oracle.tiles, limit=40))
    proof = proof_of(convert_to_float8_training(nn.Sequential(nn.Linear(32, 48))))
    assert proof.ok
    assert proof.compared["grad_bias"] == 1


def test_losses_of_a_cast_are_shown() -> None:
    """Oracle: data made to lose them: one huge element underflows the rest; a stale amax saturates."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 64)), config="delayed")
    x = torch.randn(16, 32)
    step = training(model, x)
    step()
    x *= 100
    proof = proof_of(model, step)
    assert proof.layers[0].saturated["input"] > 0.5
    spiked = torch.full((16, 32), 1e-4)
    spiked[0, 0] = 1e3
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 64)))
    proof = proof_of(model, training(model, spiked))
    assert proof.ok
    assert proof.layers[0].underflowed["input"] == pytest.approx(511 / 512)
    assert any("of input underflows to zero" in warning for warning in proof.warnings)


def test_results_kept_by_selective_checkpointing() -> None:
    """An honest step, two of whose results are kept and not computed again, is verified."""
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten._scaled_mm.default])

    class Selective(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=False, context_fn=keep))

    proof = proof_of(convert_to_float8_training(Selective(), config="tensorwise"))
    assert proof.ok, proof.line


@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_a_layer_that_shows_nothing_is_named(gate: float) -> None:
    """Oracle: by hand: behind a gate of 0 every gradient is 0, right or wrong, whatever the other layer shows."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 64), nn.Linear(32, 64)))
    x = torch.randn(16, 32)
    proof = proof_of(model, lambda: (gate * model[0](x) + model[1](x)).square().mean().backward())
    assert proof.ok == bool(gate)
    assert not proof.problems
    assert [line.partition(": every")[0] for line in proof.not_checked] == (
        [] if gate else ["0: grad_weight"]
    )


def test_a_weight_that_is_computed_is_compared_as_it_is_multiplied() -> None:
    """`weight_norm` after conversion: the weight is no leaf of autograd."""
    model = convert_to_float8_training(Block())
    nn.utils.parametrizations.weight_norm(model.up)
    proof = proof_of(model)
    assert proof.ok, proof.line
    assert proof.layers[0].gemms["grad_weight"].calls == 1


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


@pytest.mark.parametrize(("factor", "beyond"), [(0.97, 0), (1.05, 1)])
def test_on_a_gpu_a_row_of_grad_weight_may_be_16_db_away_and_2_11_of_its_operands(
    factor: float, beyond: int
) -> None:
    """By hand: the two limits add as squares. Both are made equal, as in a row whose products cancel; then their sum would be
    1.41 times their root of squares."""
    tokens, columns, directions = 64, 8, 8
    x = torch.linalg.qr(torch.randn(tokens, columns, dtype=torch.float64))[0]
    sketch = Sketch.of_input(TiledOperand(x.t()))
    signs = sketch.directions.double()
    grad = torch.linalg.qr(torch.cat((x, torch.randn(tokens, 1, dtype=torch.float64)), 1))[0][:, -1]
    slack = 2.0**-11 * math.sqrt(columns * directions)
    along = torch.randn(columns, dtype=torch.float64)
    grad = grad + x @ along * (slack / 10 ** (-16 / 20) / (along @ signs).norm())
    push = torch.randn(columns, dtype=torch.float64)
    push *= factor * math.sqrt(2) * slack * float(grad.norm()) / (push @ signs).norm()
    result = (grad @ x + push)[None]
    found = difference(TiledOperand(grad[None]), sketch, result, (torch.float64,), registers=None)
    assert found.beyond == beyond


@pytest.mark.parametrize(
    ("want", "got", "beyond"),
    [
        (0.995, 0.995, 0),
        (0.995, 0.990, 1),
        (0.995, math.inf, 1),
        (0.995, math.nan, 1),
        (1.005, math.inf, 0),
        (1.005, 0.9, 1),
        (1.02, math.inf, 0),
        (1.02, 0.995, 1),
        (math.nan, math.nan, 0),
        (math.nan, 1.0, 1),
    ],
)
def test_where_the_dtype_ends_a_result_is_right_or_overflows(want: float, got: float, beyond: int) -> None:
    """By hand, as shares of the largest number of float16: there is no other slack than rounding."""
    largest = torch.finfo(torch.float16).max
    a = TiledOperand(torch.tensor([[want * largest]], dtype=torch.float64))
    result = torch.tensor([[got * largest]], dtype=torch.float64).half()
    found = difference(a, TiledOperand(torch.ones(1, 1)), result, (torch.float16,))
    assert found.beyond == beyond


@pytest.mark.parametrize("sketched", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_on_a_gpu_too_a_value_that_is_no_number_is_a_fault(value: float, sketched: bool) -> None:
    """Whatever the decibels of the others."""
    a, b = torch.randn(16, 64), torch.randn(32, 64)
    result = a.double() @ b.double().t()
    other = Sketch.of_input(TiledOperand(b)) if sketched else TiledOperand(b)
    assert not difference(TiledOperand(a), other, result, (torch.bfloat16,), registers=None).fault
    result[3, 5] = value
    assert difference(TiledOperand(a), other, result, (torch.bfloat16,), registers=None).beyond == 1


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


def test_grad_input_of_experts_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: bfloat16 everywhere, so each result is rounded to it and no more."""
    rounded = []

    def noted(a: TiledOperand, b: TiledOperand, result: Any, dtypes: Any, *args: Any, **options: Any) -> Any:
        rounded.append(dtypes)
        return difference(a, b, result, dtypes, *args, **options)

    monkeypatch.setattr(calls, "difference", noted)
    product = GroupedMatmul(config="tensorwise")
    x = torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1, 64, 32, dtype=torch.bfloat16, requires_grad=True)
    with calls.Watch(nn.ModuleList([product])) as watch:
        product(x, weight, torch.tensor([32], dtype=torch.int32)).square().sum().backward()
    (proof,) = watch.proofs()
    assert not proof.faults
    assert rounded == [[torch.bfloat16]] * 3


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
