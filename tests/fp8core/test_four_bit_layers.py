"""Layers of four bits. Oracles: the layer in float64 from the functions of `fp8core.four_bits`, whose own oracles are in
test_four_bits.py; and a run against itself, bit for bit.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import sharding
import torch
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fp8core
from fp8core import (
    RECIPES,
    CastConfig,
    Float8Linear,
    PrecisionSchedule,
    Recipe,
    amax_state_dict,
    audit,
    cast_input,
    census,
    convert_to_float8_training,
    count_matmuls,
    load_amax_state_dict,
    microbatches,
    plain_linear,
    scaled_linear,
    update_scales,
    verify,
)
from fp8core.formats import E2M1FN, E4M3FN
from fp8core.four_bits import SIGNS, dequantize, quantize_lines
from fp8core.gemm import BACKENDS
from fp8core.gemm.layout import Operand, transposed
from fp8core.gemm.reference import Reference
from fp8core.history import AmaxesMissingWarning, SharedDrawsWarning
from fp8core.inputs.operands import cast_one
from fp8core.philox import uniform
from fp8core.plain_linear import cast_lines
from fp8core.proof.formulas import register_with_torch
from fp8core.recipe import GEMMS, Cast, Gemm

NV, MX = RECIPES["nvfp4"], RECIPES["mxfp4"]
LINE, MX_LINE = Cast(E2M1FN, "1x16"), Cast(E2M1FN, "1x32")


def with_casts(recipe: Recipe, change: Callable[[Cast], Cast]) -> Recipe:
    gemms: dict[str, Any] = {
        name: replace(gemm, a=change(gemm.a), b=change(gemm.b))
        for name, gemm in recipe.gemms.items()
        if gemm.a is not None and gemm.b is not None
    }
    return replace(recipe, **gemms)


KNOBS = {
    "nvfp4": NV,
    "to nearest": with_casts(NV, lambda cast: replace(cast, rounding="nearest")),
    "no transform": with_casts(NV, lambda cast: replace(cast, hadamard=None)),
    "weights in lines": with_casts(
        NV, lambda cast: replace(cast, granularity="1x16") if cast.granularity == "16x16" else cast
    ),
    "forward alone": NV.in_high_precision("grad_input", "grad_weight"),
    "mxfp4": MX,
    "e2m1 by e4m3": replace(MX, output=Gemm(MX_LINE, Cast(E4M3FN, "1x32"))),
    "one GEMM in FP8": replace(MX, output=RECIPES["rowwise"].output),
}
M, K, N = 64, 96, 32


def problem() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(K, N), torch.randn(M, K), torch.randn(M, N)


def run(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output, grad_input and grad_weight."""
    x = x.clone().requires_grad_()
    weight = layer.weight
    weight.grad = None
    y = layer(x)
    y.backward(grad)
    assert x.grad is not None
    return [y.detach(), x.grad, weight.grad.clone()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(one, other) for one, other in zip(a, b, strict=True)]


def by_hand(x: torch.Tensor, cast: Cast | None, dim: int, role: str, number: int, fqn: str, seed: int) -> Any:
    """The lines of an operand; its random numbers by their published address."""
    if cast is None or cast.format != E2M1FN:
        return cast_lines(x, cast, dim)
    draws = None
    if cast.rounding == "stochastic":
        stream = 2 * ("input", "weight", "grad_output").index(role) + dim
        draws = uniform(x.shape, (seed, zlib.crc32(fqn.encode()), number, stream))
    return quantize_lines(x, cast, dim, draws)


def values(lines: Any) -> torch.Tensor:
    if not isinstance(lines, Operand):
        return lines.double()
    if lines.qdata.dtype == torch.uint8:
        return dequantize(lines, torch.float64)
    return fp8core.cast.dequantize(lines.qdata, lines.scale_inv, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("knob", KNOBS)
def test_a_layer_is_the_equations(knob: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands bit for bit; products in float64, of which a float32 sum of k terms is off by k roundings at most."""
    recipe = KNOBS[knob].with_seed(5)
    linear, x, grad = problem()
    linear, x, grad = linear.to(dtype), x.to(dtype), grad.to(dtype)
    linear.bias = None
    layer = convert_to_float8_training(nn.Sequential(linear), config=recipe)[0]
    received: list[tuple[Any, Any]] = []
    product = plain_linear.product
    monkeypatch.setattr(
        plain_linear, "product", lambda a, b, *rest: received.append((a, b)) or product(a, b, *rest)
    )
    for number in range(2):
        received.clear()
        found = run(layer, x, grad)
        operands = {
            "output": ((x, 1, "input"), (linear.weight, 1, "weight")),
            "grad_input": ((grad, 1, "grad_output"), (linear.weight, 0, "weight")),
            "grad_weight": ((grad, 0, "grad_output"), (x, 0, "input")),
        }
        for name, got, seen in zip(GEMMS, found, received, strict=True):
            gemm = recipe.gemms[name]
            a, b = (
                by_hand(t.detach(), cast, dim, role, number, "0", 5)
                for (t, dim, role), cast in zip(operands[name], (gemm.a, gemm.b), strict=True)
            )
            for lines, wanted in zip(seen, (a, b), strict=True):
                assert len(lines) == len(wanted)
                assert all(map(_equal, lines, wanted))
            want, room = values(a) @ values(b).T, values(a).abs() @ values(b).abs().T
            k = values(a).shape[1]
            ulp = torch.finfo(dtype).eps
            assert ((got.double() - want).abs() <= room * k * 2**-23 + want.abs() * ulp).all(), name


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def test_a_run_repeats_and_no_other_does() -> None:
    """The same seed; after resume. Another pass, seed and layer differ in what is rounded stochastically."""
    recipe, (linear, x, grad) = NV, problem()

    def passes(seed: int = 0, fqn: str = "a", state: Any = None, count: int = 3) -> list[list[torch.Tensor]]:
        model = nn.ModuleDict({fqn: copy.deepcopy(linear)})
        convert_to_float8_training(model, config=recipe.with_seed(seed))
        if state is not None:
            load_amax_state_dict(model, state)
        results = [run(model[fqn], x, grad) for _ in range(count)]
        states.append({name: value.clone() for name, value in amax_state_dict(model).items()})
        return results

    states: list[dict[str, torch.Tensor]] = []
    first = passes()
    assert all(all(same(*pair)) for pair in zip(first, passes(), strict=True))
    assert {name: int(value) for name, value in states[0].items()} == {"a.passes.count": 3}
    passes(count=2)
    assert all(same(passes(state=states[-1], count=1)[0], first[2]))
    is_same = [True, False, False]  # to nearest in the output
    assert same(first[0], first[1]) == is_same
    assert same(first[0], passes(seed=1)[0]) == is_same
    assert same(first[0], passes(fqn="b")[0]) == is_same


def test_a_pass_without_gradients_and_a_recomputation_leave_no_trace() -> None:
    linear, x, grad = problem()
    layer = Float8Linear.from_float(linear, NV)
    expected = [run(layer, x, grad) for _ in range(2)]

    class Recomputed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = Float8Linear.from_float(linear, NV), reentrant
            self.weight = self.inner.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.inner(x)
            y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
            return y

    for reentrant in (False, True):
        again = Recomputed(reentrant)
        assert all(all(same(run(again, x, grad), one)) for one in expected)


def test_draws_of_the_operands_differ() -> None:
    """The two casts of grad_output are independent: codes of zeros that round up in one need not in the other."""
    linear, x, _ = problem()
    layer = Float8Linear.from_float(linear, NV)
    passes = layer.passes
    assert passes is not None
    draws = passes.draws(0, True)
    streams = [draws.of(x, role, dim) for role in ("input", "weight", "grad_output") for dim in (0, 1)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(streams, 2))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_twice_is_the_same_and_eager(backend: str) -> None:
    """Within a mode bit for bit; and here between modes, since neither casts nor products leave a compiler anything to contract."""
    linear, x, grad = problem()

    def passes(compiled: bool) -> list[list[torch.Tensor]]:
        layer = Float8Linear.from_float(linear, NV)
        if compiled:
            torch._dynamo.reset()
            layer.compile(fullgraph=True, backend=backend)
        return [run(layer, x, grad) for _ in range(2)]

    eager, compiled, again = passes(False), passes(True), passes(True)
    for one, other, third in zip(eager, compiled, again, strict=True):
        assert all(same(other, third))
        assert all(same(one, other))
    assert not torch.equal(compiled[0][1], compiled[1][1])


SHARDED = {
    "plain": sharding.Setting("nvfp4"),
    "recomputed": sharding.Setting("nvfp4", recompute=True, reshard=False),
    "compiled": sharding.Setting("nvfp4", compiled=True),
}


@pytest.mark.parametrize("how", ["plain", "recomputed", pytest.param("compiled", marks=pytest.mark.slow)])
@on_ranks(2)
def test_sharded_runs_repeat(how: str) -> None:
    """FSDP2, the same bits twice."""
    runs = [sharding.train(SHARDED[how], fp8=False) for _ in range(2)]
    assert not runs[0].differs_from(runs[1])


@on_ranks(2)
def test_each_rank_draws_its_own() -> None:
    layer = Float8Linear(32, 32, config="nvfp4")
    assert layer.passes is not None
    mine = layer.passes.draws(0, True).of(torch.zeros(16, 16), "input", 1)
    every = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(every, mine)
    assert not torch.equal(*every)


def test_resume_without_the_count_warns() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config="nvfp4")
    state = model.state_dict()
    assert set(state) == {"0.weight", "0.bias"}
    model.load_state_dict(state)
    with pytest.warns(AmaxesMissingWarning, match="counts of passes"):
        update_scales(model)
    load_amax_state_dict(model, amax_state_dict(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update_scales(model)


def test_scaled_linear_repeats_by_torchs_generator() -> None:
    """To nearest it is the module, bit for bit; stochastic, what `torch.manual_seed` repeats, as dropout."""
    linear, x, grad = problem()
    for recipe in (MX, NV):
        module = Float8Linear.from_float(linear, recipe)
        module.bias = None

        def function(recipe: Recipe = recipe) -> list[torch.Tensor]:
            leaf, weight = x.clone().requires_grad_(), linear.weight.detach().requires_grad_()
            scaled_linear(leaf, weight, recipe).backward(grad)
            assert leaf.grad is not None
            assert weight.grad is not None
            return [scaled_linear(x, weight, recipe).detach(), leaf.grad, weight.grad]

        torch.manual_seed(1)
        first, second = function(), function()
        torch.manual_seed(1)
        assert all(same(first, function()))
        is_nearest = not recipe.is_stochastic
        assert same(first, second) == [True, is_nearest, is_nearest]
        assert same(first, run(module, x, grad)) == [True, is_nearest, is_nearest]


def test_shared_inputs_and_kept_weights_change_nothing() -> None:
    """`cast_input` passes the tensor itself on; `microbatches` keeps casts of the weight."""
    linear, x, grad = problem()
    layer = Float8Linear.from_float(linear, NV)
    expected = run(layer, x, grad)
    layer = Float8Linear.from_float(linear, NV)
    leaf = x.clone().requires_grad_()
    linear.weight.grad = None
    with microbatches(layer):
        output = layer(cast_input(leaf, layer))
        output.backward(grad)
    assert all(same(expected, [output.detach(), leaf.grad, linear.weight.grad]))


def test_a_group_with_inf_or_nan_is_nan_and_no_token_is_none() -> None:
    linear, x, _ = problem()
    for recipe in (NV, MX):
        layer = Float8Linear.from_float(linear, recipe)
        x[3, 5] = torch.inf
        is_nan = layer(x).isnan()
        assert bool(is_nan[3].all())
        assert bool(is_nan.all()) == (recipe is NV)  # where it spoils the tensor's scale
        empty = torch.randn(0, K, requires_grad=True)
        layer(empty).sum().backward()
        assert not layer.weight.grad.any()


def test_scaled_mm_multiplies_by_both_levels_of_scales() -> None:
    """Oracle: float64; what it gives in float64 is exact but for the order of the sum."""
    torch.manual_seed(0)
    a, b = (quantize_lines(torch.randn(48, K), LINE, 1) for _ in range(2))
    turned = Operand(b.qdata.t(), b.scale_inv.t(), b.tensor_scale_inv)
    want = dequantize(a, torch.float64) @ dequantize(b, torch.float64).T
    found = fp8core.scaled_mm(a, turned, torch.float64, backend="reference")
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    for wrong, words in (
        (turned._replace(qdata=turned.qdata[:-1]), "a's columns must equal b's rows"),
        (turned._replace(scale_inv=turned.scale_inv.float()), "float8_e4m3fn for blocks of 16"),
        (turned._replace(scale_inv=turned.scale_inv[:-1]), "expected"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            fp8core.scaled_mm(a, wrong, backend="reference")


BAD_CASTS = {
    "torchao's word for gradients": (
        lambda: CastConfig(target_dtype=E2M1FN.dtype),
        "two codes a byte.*quantize_lines",
    ),
    "tensorwise": (lambda: Cast(E2M1FN), "blocks of 16 or 32, not tensorwise.*'1x16'"),
    "1x128": (lambda: Cast(E2M1FN, "1x128"), "not 1x128.*'1x32'"),
    "powers of two": (lambda: Cast(E2M1FN, "1x16", power_of_two=True), "by powers of two.*'1x32'"),
    "delayed": (lambda: Cast(E2M1FN, "1x16", scaling="delayed"), "granularity='tensorwise'"),
    "a rounding": (lambda: Cast(E2M1FN, "1x16", rounding="up"), "rounding.*nearest.*stochastic"),
    "signs": (lambda: Cast(E2M1FN, "1x16", hadamard=(1, -1)), "16 signs.*SIGNS"),
    "e4m3 by 16": (lambda: Cast(E4M3FN, "1x16"), "those of e2m1.*'1x128'"),
    "e4m3, stochastic": (lambda: Cast(E4M3FN, rounding="stochastic"), "of e2m1, not e4m3"),
    "e4m3, transform": (lambda: Cast(E4M3FN, hadamard=SIGNS), "of e2m1, not e4m3"),
    "a transform alone": (lambda: Gemm(replace(LINE, hadamard=SIGNS), LINE), "the same signs, or neither"),
    "16 by 32": (lambda: Gemm(LINE, MX_LINE), "no kernel mixes.*1x16 with 16x16"),
    "16 by tensorwise": (lambda: Gemm(LINE, Cast(E4M3FN)), "no kernel mixes"),
    "by high precision": (lambda: Gemm(LINE, None), "cast both operands or neither"),
    "padding": (lambda: NV.for_ragged_batches("pad"), "no pad_inner_dim.*ragged='bf16'"),
    "kernels": (lambda: NV.with_kernels("always"), "no kernels='always'.*'auto'"),
    "a memory beside": (
        lambda: replace(NV, output=RECIPES["delayed"].output),
        "no delayed scaling.*dynamic",
    ),
    "a stochastic weight": (
        lambda: with_casts(NV, lambda cast: replace(cast, rounding="stochastic")),
        "no stochastic rounding of input or weight.*grad_output alone",
    ),
    "a seed": (lambda: NV.with_seed(-1), "seed=-1: expected a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CASTS)
def test_bad_recipes_name_the_way_out(case: str) -> None:
    make, words = BAD_CASTS[case]
    with pytest.raises(ValueError, match=words):
        make()


def test_sizes_and_devices_that_have_no_product() -> None:
    with pytest.raises(ValueError, match=r"K=72 .*not a multiple of 16.*pad the tensor"):
        Float8Linear(72, 32, config=NV)(torch.randn(16, 72))
    with pytest.raises(ValueError, match=r"K=48 .*not a multiple of 32"):
        Float8Linear(64, 48, config=MX)(torch.randn(32, 64, requires_grad=True))
    layer = Float8Linear(64, 32, config=MX)
    with pytest.raises(ValueError, match=r"grad_weight.*48 tokens.*multiple of 32.*ragged='bf16'(?!.*'pad')"):
        layer(torch.randn(48, 64))
    with pytest.raises(ValueError, match="sequences of 32 for 24"):
        layer(torch.randn(1, 24, 64))
    ragged = Float8Linear.from_float(nn.Linear(64, 32), NV.for_ragged_batches("bf16"))
    assert torch.equal(ragged(x := torch.randn(7, 64)), nn.functional.linear(x, ragged.weight, ragged.bias))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 72))
    convert_to_float8_training(model, config=NV)
    assert "multiple of 16" in str(audit(model))
    for backend in ("torch", "triton"):
        with pytest.raises(ValueError, match=r"no backend multiplies e2m1.*emulated"):
            convert_to_float8_training(nn.Linear(64, 64), config=NV.with_backend(backend))
        with pytest.raises(ValueError, match=r"GEMM output.*emulated"):
            Float8Linear(64, 64, config=NV.with_backend(backend))(torch.randn(16, 64))
    experts = nn.Module()
    experts.multiply = fp8core.GroupedMatmul(config=NV)
    with pytest.raises(ValueError, match=r"four bits are not offered for groups.*'rowwise'"):
        experts.multiply(torch.randn(16, 32), torch.randn(1, 32, 32), torch.tensor([16], dtype=torch.int32))


@on_ranks(2)
def test_tensor_parallelism_is_refused() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), config="nvfp4")
    with pytest.raises(ValueError, match=r"four bits are not offered under tensor parallelism.*'rowwise'"):
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": fp8core.Float8ColwiseParallel()})


def test_a_schedule_goes_on_in_bf16_or_in_another_recipe() -> None:
    """Oracle: layers that were converted to what is due."""
    linear, x, grad = problem()
    model = convert_to_float8_training(nn.Sequential(copy.deepcopy(linear)), config=NV)
    layer = model[0]
    want = {
        "four bits": Float8Linear.from_float(copy.deepcopy(linear), NV),
        "bf16": copy.deepcopy(linear),
        "rowwise": Float8Linear.from_float(copy.deepcopy(linear), RECIPES["rowwise"].emulated()),
    }
    want["four bits"].passes.belongs_to("0")
    for text, due in (
        ("cooldown_bf16:0.5", "bf16"),
        ("cooldown_rowwise:0.5", "rowwise"),
        ("cooldown_bf16:0.5,cooldown_rowwise:0.5", "rowwise"),
        ("keep_bf16@1,cooldown_rowwise:2@0", "rowwise"),
    ):
        schedule = PrecisionSchedule.parse(text)
        assert str(schedule) == text
        rules = replace(schedule, rules=schedule.rules[-1:]) if "@1" in text else schedule
        assert layer.passes is not None
        layer.passes.reset()
        want["four bits"].passes.reset()
        for step in range(4):
            rules.apply(model, step, 4)
            arm = want[due if step > 1 else "four bits"]
            assert all(same(run(layer, x, grad), run(arm, x, grad))), (text, step)
        assert layer.suspended_recipe is NV
    rules = PrecisionSchedule.parse("cooldown_tensorwise:1step@grad_weight")
    rules.apply(model, 3, 4)
    assert (layer.recipe.output, layer.recipe.grad_weight) == (NV.output, RECIPES["tensorwise"].grad_weight)
    for text, words in (
        ("cooldown_fp7:0.5", "fp7.*tensorwise"),
        ("cooldown_delayed:0.5", "delayed has its own memory"),
        ("cooldown_nvfp4:0.5", "convert to it and schedule the others"),
    ):
        with pytest.raises(ValueError, match=words):
            PrecisionSchedule.parse(text)


def step_of(model: nn.Module) -> Callable[[], None]:
    x = torch.randn(M, K)
    return lambda: model(x).square().mean().backward()


def mixed_model(recipe: Recipe | str) -> nn.Module:
    """A layer of four bits, and one of FP8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, 64), nn.ReLU(), nn.Linear(64, 32))
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, fqn: fqn == "0")
    return convert_to_float8_training(model, config="tensorwise", module_filter_fn=lambda _, fqn: fqn == "2")


@pytest.mark.parametrize(
    ("name", "weight", "granularity"), [("nvfp4", "16x16", "1x16"), ("mxfp4", "1x32", "1x32")]
)
def test_census_names_what_the_products_received(name: str, weight: str, granularity: str) -> None:
    """By hand; what no independent cast has compared is not said to be right."""
    model = mixed_model(name)
    proof = verify(step_of(model), model, announce=False)
    found = census(proof)
    rows = {(row.layer, row.gemm, row.role): row for row in found.rows}
    four = {key: row for key, row in rows.items() if key[0] == "0" and key[1] != "grad_input"}
    assert {row.format for row in four.values()} == {"float4_e2m1fn_x2"}
    assert {row.backend for row in four.values()} == {"reference"}
    assert {row.accumulate for row in four.values()} == {"float32"}
    assert {row.rounding for row in four.values()} == {"not compared"}
    assert {key[1:]: row.granularity for key, row in four.items()} == {
        ("output", "input"): granularity,
        ("output", "weight"): weight,
        ("grad_weight", "grad_output"): granularity,
        ("grad_weight", "input"): granularity,
    }
    assert rows["0", "grad_input", "weight"].format == "did not run"  # its input needs no gradient
    asked = four["0", "grad_weight", "grad_output"].asked
    stochastic = {"nvfp4": "e2m1_1x16_stochastic_hadamard", "mxfp4": "e2m1_1x32_rceil"}
    assert asked == stochastic[name]
    assert {row.format[:6] for key, row in rows.items() if key[0] == "2"} == {"float8"}
    assert found.findings == ()
    for pins in ({"fp8": ["0"]}, {"high_precision": ["0"]}):
        findings = census(proof, **pins).findings
        assert [(each.code, each.layer) for each in findings] == [("ran in four bits", "0")]


def test_no_proof_calls_four_bits_fp8() -> None:
    """Emulation is no FP8, and what nobody compared is no proof."""
    model = mixed_model("nvfp4")
    proof = verify(step_of(model), model, announce=False)
    assert not proof.ok
    assert any("1 of 2 converted layers are emulated" in text and "e2m1" in text for text in proof.problems)
    assert (proof.counted, proof.predicted) == (3, 3)  # of the other layer
    assert {text.partition(":")[0] for text in proof.not_checked} >= {"0"}
    flops = proof.matmuls.by_dtype()
    assert flops["e2m1"] == 2 * 2 * M * K * 64
    assert flops["e4m3"] + flops["e5m2"] == 3 * 2 * M * 64 * 32
    assert proof.matmuls.fp8_share == pytest.approx(1 - flops["e2m1"] / sum(flops.values()))
    assert list(proof.matmuls.not_in_fp8) == ["0 (e2m1, emulated)"]
    whole = audit(model, step=step_of(model))
    assert [(layer.fp8_gemms, layer.four_bit_gemms) for layer in whole.layers] == [(0, 3), (3, 0)]
    assert "3 GEMMs of four bits, emulated" in str(whole)
    assert whole.layers[0].casts.startswith("plain PyTorch: no kernel casts to four bits")
    before = int(amax_state_dict(model)["0.passes.count"])
    verify(step_of(model), model, announce=False)
    assert int(amax_state_dict(model)["0.passes.count"]) == before


def test_a_four_bit_gemm_that_does_not_run_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the product of dequantised operands, which no operator shows."""
    model = mixed_model("nvfp4")

    def silent(a: Any, b: Any, *_: Any) -> torch.Tensor:
        return dequantize(a) @ dequantize(b).T

    product = plain_linear.product
    monkeypatch.setattr(
        plain_linear,
        "product",
        lambda a, b, gemm, *rest: (silent if gemm.is_four_bit else product)(a, b, *([gemm, *rest])),
    )
    proof = verify(step_of(model), model, announce=False)
    assert any("GEMM of output did not run" in text for text in proof.problems)


def test_flop_counters_count_packed_operands() -> None:
    register_with_torch()
    model = convert_to_float8_training(nn.Sequential(nn.Linear(K, 64)), config="nvfp4")
    with FlopCounterMode(display=False) as counter:
        step_of(model)()
    assert counter.get_total_flops() == 2 * 2 * M * K * 64
    assert count_matmuls(step_of(model), model).flops == 2 * 2 * M * K * 64


@pytest.mark.parametrize("recipe", [NV, MX, KNOBS["forward alone"]], ids=str)
def test_watch_sees_the_casts(recipe: Recipe) -> None:
    """Oracle: float64 from the operand's functions. Of Gaussians at least 13 dB (docs/numerics.md)."""
    linear, x, grad = problem()
    layer = convert_to_float8_training(nn.Sequential(copy.deepcopy(linear)), config=recipe)[0]
    model = nn.Sequential(layer)
    with fp8core.watch(model, every=1, samples=1 << 20) as watcher:
        run(layer, x, grad)
        watcher.step()
        assert not watcher.problem
    records = {(r.operand, gemm): r for r in watcher.latest for gemm in r.gemms}
    tensors = {"input": x, "weight": linear.weight.detach(), "grad_output": grad}
    for (role, name), record in records.items():
        dim = {"output": 1, "grad_weight": 0}.get(name, 1 if role == "grad_output" else 0)
        gemm = recipe.gemms[name]
        cast = gemm.b if role == "weight" or (role, name) == ("input", "grad_weight") else gemm.a
        if cast is None:
            assert record.status == "high precision"
            continue
        assert (record.dtype, record.granularity) == ("float4_e2m1fn_x2", cast.granularity)
        lines = by_hand(tensors[role], cast, dim, role, 0, "0", 0)
        wide = tensors[role] if dim else tensors[role].T
        if cast.hadamard is not None:
            wide = fp8core.four_bits.hadamard(wide, 1, cast.hadamard)
        error = wide.double() - dequantize(lines, torch.float64)
        sqnr = 10 * math.log10(float(wide.double().square().sum() / error.square().sum()))
        assert record.sqnr_db == pytest.approx(sqnr, abs=1e-3)
        assert record.amax == pytest.approx(float(tensors[role].abs().max()))
        assert sqnr > 13


def test_a_model_that_was_loaded_without_its_counts_says_so_once() -> None:
    """Its next pass draws numbers of a run that is not resumed; `update_scales` is no call that such a model needs."""
    linear, x, grad = problem()
    first, second = (nn.Sequential(Float8Linear.from_float(copy.deepcopy(linear), NV)) for _ in range(2))
    run(first[0], x, grad)
    second.load_state_dict(first.state_dict())
    with pytest.warns(AmaxesMissingWarning, match="load_amax_state_dict"):
        run(second[0], x, grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmaxesMissingWarning)
        run(second[0], x, grad)


def test_a_function_in_four_bits_is_no_high_precision() -> None:
    """The census of a layer that calls `scaled_linear` itself: what it ran in is found under a pin to bf16."""

    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return scaled_linear(input, self.weight, "nvfp4")

    _linear, x, grad = problem()
    own = nn.Sequential(Own(K, N))
    proof = verify(lambda: own(x.clone().requires_grad_()).backward(grad), own)
    assert [finding.code for finding in census(proof, high_precision=["0"]).findings] == ["ran in four bits"]


@pytest.mark.parametrize("held", ["blockwise", "mxfp8", "nvfp4", "delayed"])
def test_a_schedule_goes_on_in_no_recipe_that_the_layers_backend_may_lack(held: str) -> None:
    with pytest.raises(ValueError, match="take tensorwise or rowwise"):
        PrecisionSchedule.parse(f"cooldown_{held}:0.5")


def test_a_float8_tensor_of_four_bits_is_refused() -> None:
    """It would hold packed codes and one of their two levels of scales."""
    with pytest.raises(ValueError, match=r"four_bits\.quantize_lines"):
        cast_one(torch.randn(32, 32), LINE, 1)


def test_a_backend_that_says_it_is_fp8_makes_no_fp8_of_four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One from outside may multiply four bits; what it does is no product of FP8, for audit and for verify."""

    class Claims(Reference):
        is_fp8 = True

    monkeypatch.setitem(BACKENDS, "claims", Claims("claims"))
    linear, x, grad = problem()
    model = convert_to_float8_training(nn.Sequential(linear), config=NV.with_backend("claims"))
    assert [layer.fp8_gemms for layer in audit(model).layers] == [0]
    proof = verify(lambda: model(x.clone().requires_grad_()).backward(grad), model)
    assert not proof.ok
    assert [layer.predicted for layer in proof.layers] == [0]


@pytest.mark.parametrize("count", [torch.tensor(-5), torch.tensor(2**32), torch.tensor(3.0)], ids=str)
def test_a_count_that_no_run_saved_is_refused(count: torch.Tensor) -> None:
    """Addresses are whole numbers of 32 bits (`fp8core.philox`); what the layer had stays."""
    model = nn.Sequential(Float8Linear(32, 32, config=NV))
    load_amax_state_dict(model, {"0.passes.count": torch.tensor(7, dtype=torch.int32)})
    with pytest.raises(ValueError, match=r"0\.passes\.count"):
        load_amax_state_dict(model, {"0.passes.count": count})
    assert int(amax_state_dict(model)["0.passes.count"]) == 7


@pytest.mark.parametrize("saved", [None, 2])
def test_a_running_model_that_loads_weights_repeats(saved: int | None) -> None:
    """Oracle: a new model that loads the same; without a count it starts anew, with one it goes on there."""
    linear, x, grad = problem()
    ran, new = (nn.Sequential(Float8Linear.from_float(copy.deepcopy(linear), NV)) for _ in range(2))
    for _ in range(3):
        run(ran[0], x, grad)
    for model in (ran, new):
        model.load_state_dict(nn.Sequential(linear).state_dict())
        if saved is not None:
            load_amax_state_dict(model, {"0.passes.count": torch.tensor(saved)})
    with pytest.warns(AmaxesMissingWarning) if saved is None else nullcontext():
        wanted = run(new[0], x, grad)
    with pytest.warns(AmaxesMissingWarning) if saved is None else nullcontext():
        assert all(same(run(ran[0], x, grad), wanted))


@pytest.mark.parametrize("call", [update_scales, amax_state_dict])
def test_layers_that_share_random_numbers_are_named(call: Any) -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(2)))
    whole = convert_to_float8_training(copy.deepcopy(blocks), config=NV)
    for block in blocks:
        convert_to_float8_training(block, config=NV)
    with pytest.warns(SharedDrawsWarning, match=r"0\.0.* and 1\.0"):
        call(blocks)
    for fqn in ("0.0", "1.0"):
        blocks.get_submodule(fqn).passes.belongs_to(fqn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(blocks)
        call(whole)


def test_views_of_an_operand_keep_both_levels_of_its_scale() -> None:
    lines = quantize_lines(torch.randn(32, 64), LINE, 1)
    turned = transposed(lines)
    assert torch.equal(turned.qdata, lines.qdata.t())
    assert turned.tensor_scale_inv is lines.tensor_scale_inv is not None


def test_a_pickle_of_other_fields_is_refused() -> None:
    """Fields are pickled by place, and those of four bits came in between: the format's flag would be a rounding."""
    things: tuple[Any, ...] = (NV, NV.output, NV.output.a, NV.history)
    for thing in things:
        assert pickle.loads(pickle.dumps(thing)) == thing
        empty, state = object.__new__(type(thing)), thing.__getstate__()
        with pytest.raises(ValueError, match="state_dict"):
            empty.__setstate__(state[:-1])
