"""verify: it holds for what runs in FP8, in each way of running it, and fails for each way of only seeming to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recipes import ON_CPU, changed, on_cpu
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _VersionWrapper,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fp8core import (
    BACKENDS,
    E4M3FN,
    RECIPES,
    Proof,
    convert_to_float8_training,
    microbatches,
    quantize,
    scaled_mm,
    update_scales,
    verify,
)

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


@pytest.mark.parametrize(
    ("name", "backend"), [*((n, "") for n in ON_CPU), ("tensorwise", "triton"), ("tensorwise", "fastest")]
)
def test_the_count_is_that_of_the_recipe(name: str, backend: str) -> None:
    """Oracle: by hand. The input of `up` needs no gradient; only backend "torch" leaves the head alone;
    "fastest" multiplies by both operators."""
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


@pytest.mark.parametrize("wrapped", [False, True], ids=["inner model", "compiled model"])
def test_compiled_models(wrapped: bool) -> None:
    torch._dynamo.reset()
    model = convert_to_float8_training(Block())
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    step = training(compiled)
    proof = proof_of(compiled if wrapped else model, step)
    assert proof.ok, proof.problems
    assert proof.counted == 5
    assert proof.compiled
    assert proof.line.startswith("FP8 verified in eager mode: ")


def test_inside_a_microbatches_scope() -> None:
    model = convert_to_float8_training(Block())
    inner = training(model, passes=2)

    def step() -> None:
        with microbatches(model):
            inner()

    assert proof_of(model, step).ok


# ---------------------------------------------------------------- silent failures


def disproved(proof: Proof, *reasons: str) -> None:
    assert not proof.ok
    assert proof.exit_code == 1
    assert not proof.line.startswith("FP8 verified")
    for reason in reasons:
        assert any(reason in problem for problem in proof.problems), proof.problems


def test_a_filter_that_matches_nothing() -> None:
    model = convert_to_float8_training(Block(), module_filter_fn=lambda m, n: False, allow_no_conversion=True)
    disproved(proof_of(model), "no layer is converted", "no FP8 GEMM ran")


def test_emulation_taken_for_the_real_thing() -> None:
    """Oracle: by hand: that is all that is wrong, and no GEMM is missed that such a backend never runs."""
    proof = proof_of(convert_to_float8_training(Block(), config=RECIPES["rowwise"].emulated()))
    disproved(proof, "are emulated")
    assert proof.problems == (
        "3 of 3 converted layers are emulated in high precision",
        "no FP8 GEMM ran",
    )


def test_an_output_in_high_precision_is_no_missing_gemm() -> None:
    """Oracle: the recipe, by hand: FP8 for grad_input alone, which of two layers that fit only the second computes."""
    recipe = RECIPES["rowwise_with_gw_hp"]
    recipe = dataclasses.replace(recipe, output=recipe.grad_weight)
    proof = proof_of(convert_to_float8_training(Block(), config=recipe), recipe=recipe)
    assert proof.ok, proof.problems
    assert proof.counted == proof.predicted == 1


def test_another_recipe_than_the_one_asked_for() -> None:
    model = convert_to_float8_training(Block(), config="tensorwise")
    disproved(proof_of(model, recipe="rowwise"), "recipe rowwise was asked for, tensorwise runs")


def test_autocast_to_a_float8_dtype_is_no_fp8_path() -> None:
    model = Block()
    inner = training(model)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.float8_e4m3fn, enabled=False):
            inner()

    disproved(proof_of(model, step), "no layer is converted")


def test_hardware_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert_to_float8_training(Block())
    refusing = changed(BACKENDS["torch"], device_reason=lambda *_: "A100 has compute capability 8.0")
    monkeypatch.setitem(BACKENDS, "torch", refusing)
    disproved(proof_of(model), "A100 has compute capability 8.0")


def test_a_layer_that_is_never_called_and_a_step_that_never_goes_backward() -> None:
    model = convert_to_float8_training(Block())
    disproved(
        proof_of(model, lambda: model.up(torch.randn(16, 32)).sum().backward()), "down: converted, but never"
    )
    disproved(proof_of(model, lambda: model(torch.randn(16, 32))), "2 FP8 GEMMs ran in a step where 5")


def test_the_product_runs_in_high_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that says it is FP8 and is not."""
    from fp8core.gemm import reference

    model = convert_to_float8_training(Block())
    fake = changed(BACKENDS["torch"], matmul=reference.matmul)
    monkeypatch.setitem(BACKENDS, "torch", fake)
    disproved(proof_of(model), "no FP8 GEMM ran")


def test_delayed_scales_that_never_move() -> None:
    model = convert_to_float8_training(Block(), config="delayed")
    disproved(
        proof_of(model, lambda: model(torch.randn(16, 32)).sum().backward()), "up: delayed scales never moved"
    )


def test_an_all_gather_in_bfloat16() -> None:
    """A real collective of one rank; nothing gathered at all fails too, and layers that do not ask for it."""
    model = convert_to_float8_training(Block(), config=RECIPES["tensorwise"].with_fp8_all_gather())
    not_asked = convert_to_float8_training(Block())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed by torch 2.13
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for dtype, ok in ((torch.bfloat16, False), (torch.uint8, True), (None, False)):
            inner = training(model)

            def step(dtype: torch.dtype | None = dtype, inner: Step = inner) -> None:
                inner()
                if dtype is not None:
                    gather(torch.empty(8, dtype=dtype), torch.ones(8, dtype=dtype))

            proof = proof_of(model, step, fp8_all_gather=True)
            assert proof.ok == ok
            if dtype is not None:
                assert proof.all_gathers == {str(dtype).removeprefix("torch."): 8 * dtype.itemsize}
        disproved(
            proof_of(not_asked, training(not_asked), fp8_all_gather=True),
            "the all-gather is not in FP8: up, down: high precision: enable_fsdp_float8_all_gather is off",
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_cpu_says_that_it_emulates(backend: str) -> None:
    """Oracle: the float32 product of the codes, which is what either backend gives there, bit for bit."""
    a, b = (quantize(torch.randn(n, 64), E4M3FN, "rowwise", dim=-1) for n in (16, 32))
    operands = a.qdata.float(), b.qdata.float().t()
    want = ((operands[0] @ operands[1]) * a.scale_inv * b.scale_inv.t()).bfloat16()
    assert torch.equal(scaled_mm(a, b.t(), torch.bfloat16, backend=backend), want)
    recipe = RECIPES["rowwise"].with_backend(backend)
    proof = proof_of(convert_to_float8_training(Block(), config=recipe))
    assert proof.ok
    assert proof.emulated_in == proof.to_dict()["emulated_in"] == "float32"
    assert proof.line.endswith(
        "on cpu, whose arithmetic is emulated: it multiplies FP8 codes in float32. Casts and "
        "calls are FP8's, speed is not"
    )
    assert dataclasses.replace(proof, device="cuda:0", emulated_in="").line.endswith(", on cuda:0")


def test_misuse_is_refused_before_the_step_runs() -> None:
    model = convert_to_float8_training(Block())

    def never() -> None:
        raise AssertionError

    with pytest.raises(TypeError, match=r"model is a function; expected Module; verify\(step_fn, model\)"):
        verify(model, never)
    with pytest.raises(
        TypeError, match="step_fn is a Tensor; expected a function that runs one training step"
    ):
        verify(torch.zeros(()), model)
    with pytest.raises(TypeError, match="config is a int"):
        verify(never, model, recipe=3)
    with pytest.raises(ValueError, match=r"recipe 'rowise' is unknown .nearest: rowwise"):
        verify(never, model, recipe="rowise")


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


def test_on_cpu_names_are_those_with_a_kernel() -> None:
    assert set(RECIPES) - set(ON_CPU) == {"mxfp8"}
    assert on_cpu("mxfp8").backend == "reference"


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_results_kept_by_selective_checkpointing(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand: an honest step is verified; results that are handed out 1.3 times too large are not."""
    kept = {torch.ops.aten._scaled_mm.default}

    class Selective(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts = partial(create_selective_checkpoint_contexts, _keep)
            return self.head(checkpoint(self.body, x, use_reentrant=False, context_fn=contexts))

    def _keep(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    right = _VersionWrapper.get_val

    def handed_out(self: Any, *args: Any) -> Any:
        value = right(self, *args)
        return value * factor if torch.is_tensor(value) and value.is_floating_point() else value

    monkeypatch.setattr(_VersionWrapper, "get_val", handed_out)
    model = convert_to_float8_training(Selective(), config=on_cpu("tensorwise"))
    x = torch.randn(64, 32)
    proof = verify(lambda: model(x).square().mean().backward(), model, announce=False)
    assert proof.ok == (factor == 1), proof.line
    if factor != 1:
        assert proof.problems[0].startswith("up: output is not the recipe's")
