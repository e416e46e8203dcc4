"""The training loop: the same run gives the same curves, looking changes nothing, and what a curve holds."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import pytest
import torch
from loop_jobs import STEPS, curves, job
from recipes import changed
from tiny_lm import TinyLM, tiny_lm
from torch import Tensor, nn

from fp8core import BACKENDS, RECIPES, Float8Linear, convert_to_float8_training, quantize
from fp8core.gemm import reference
from fp8core.history import mark_ready
from harness.store.errors import UsageError
from harness.training import loop
from harness.training.diagnostics import diagnose
from harness.training.loop import perturb, reproducible, train
from harness.training.setup import Setup


@pytest.mark.parametrize(
    ("compute", "recipe"),
    [
        ("fp32", "tensorwise"), ("bf16_autocast", "delayed"), ("bf16_autocast", "static"),
    ],
)  # fmt: skip
def test_looking_changes_nothing(recipe: str, compute: str) -> None:
    """Held-out losses and diagnoses at every step, against none: the same training, bit for bit."""
    watched = job(
        recipe, "warmup_bf16:4", setup={"compute": compute}, regime={"eval_every": 1, "diagnose_every": 1}
    )
    blind = job(recipe, "warmup_bf16:4", setup={"compute": compute}, regime={"eval_every": 0}, heldout=[])
    seen = train(watched, "cpu")
    assert curves(seen, looked_at=False) == curves(train(blind, "cpu"), looked_at=False)
    parts = {part for metric, part in seen.curves.points if metric == "sqnr_db"}
    assert parts == {
        f"{layer}:{role}" for layer in ("up", "down") for role in ("input", "weight", "grad_output")
    }
    assert seen.curves.points["sqnr_db", "up:input"][0][0] == 4  # held back before: nothing was cast
    assert seen.curves.points["amax", "up:input"][0][0] == 0


@pytest.mark.parametrize("recipe", ["delayed", "rowwise_with_gw_hp"])
def test_fp8_is_proved_before_the_first_step_and_leaves_no_trace(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the count by hand, two layers in two microbatches; the run without a proof, bit for bit."""
    proved = train(job(recipe, "warmup_bf16:4"), "cpu")
    of_a_layer = RECIPES[recipe].fp8_gemms
    assert proved.facts["fp8_gemms"] == proved.facts["fp8_gemms_expected"] == 2 * 2 * of_a_layer
    assert str(proved.facts["verify"]).startswith("FP8 verified: 2 of 3 Linear layers")
    assert (proved.facts["verify_outcome"], proved.facts["verify_layers"]) == ("proved", {recipe: 2})
    monkeypatch.setattr(loop.TrainingRun, "_prove", lambda self: None)
    assert curves(proved) == curves(train(job(recipe, "warmup_bf16:4"), "cpu"))


def test_a_proof_that_fails_or_finds_no_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        planted.setitem(BACKENDS, "torch", changed(BACKENDS["torch"], matmul=reference.matmul))
        facts = train(job("rowwise"), "cpu").facts
        assert str(facts["verify"]).startswith("FP8 NOT verified: no FP8 GEMM ran")
        assert facts["verify_outcome"] == "disproved"
    emulated = train(job("rowwise", setup={"recipe": RECIPES["rowwise"].emulated()}), "cpu").facts
    assert emulated["emulated"] is True
    assert "verify" not in emulated
    assert "verify" not in train(job(""), "cpu").facts

    def full(*_: object) -> None:
        raise MemoryError("of the proof")

    monkeypatch.setattr(loop, "prove", full)
    result = train(job("rowwise"), "cpu")
    assert result.facts["verify"] == "not verified: out of memory: of the proof"
    assert result.facts["verify_outcome"] == "unproven"
    assert len(result.curves.points["loss", ""]) == STEPS


def test_figures_of_a_layer_are_those_of_its_tensors() -> None:
    """By hand from the tensors of one product: y = x @ w.T, loss = sum(y * c), so grad_output is c."""
    torch.manual_seed(0)
    layer = convert_to_float8_training(nn.Linear(32, 16, bias=False), config="tensorwise")
    assert isinstance(layer, Float8Linear)
    x, c = torch.randn(16, 32) * torch.logspace(-6, 2, 16)[:, None], torch.randn(16, 16) * 1e-3
    x[0, 0] = 0.0
    model = _Weighted(layer)
    figures = diagnose(model, Setup("toy", 1, 1, compute="fp32", recipe=layer.recipe), (x, c), "cpu")
    for role, tensor, fmt, largest in (
        ("input", x, torch.float8_e4m3fn, 448.0),
        ("weight", layer.weight.detach(), torch.float8_e4m3fn, 448.0),
        ("grad_output", c, torch.float8_e5m2, 57344.0),
    ):
        part, codes = f"layer:{role}", quantize(tensor, fmt)
        values = codes.qdata.double() * codes.scale_inv.double()
        noise = (values - tensor.double()).norm()
        smallest_normal = 2.0**-6 if fmt == torch.float8_e4m3fn else 2.0**-14
        magnitude = codes.qdata.double().abs()
        assert figures["amax", part] == float(tensor.abs().max())
        assert figures["scale_log2", part] == pytest.approx(
            math.log2(largest / figures["amax", part]), abs=1e-6
        )
        assert figures["sqnr_db", part] == pytest.approx(
            20 * math.log10(tensor.double().norm() / noise), abs=1e-4
        )
        nonzero = tensor != 0
        assert figures["underflow_frac", part] == int(((values == 0) & nonzero).sum()) / int(nonzero.sum())
        assert figures["subnormal_frac", part] == pytest.approx(
            float(((magnitude > 0) & (magnitude < smallest_normal)).double().mean())
        )
        assert figures["saturated_frac", part] == 0.0
    assert figures["underflow_frac", "layer:input"] > 0.1
    assert figures["subnormal_frac", "layer:input"] > 0.05


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_of_a_cast_to_four_bits_the_amax_alone_is_known(recipe: str) -> None:
    """The alarms are bounds of eight bits. Oracle: the tensors, of which one product y = x @ w.T with loss sum(y * c) is made."""
    layer = convert_to_float8_training(nn.Linear(64, 32, bias=False), config=recipe)
    assert isinstance(layer, Float8Linear)
    x, c = torch.randn(32, 64), torch.randn(32, 32)
    setup = Setup("toy", 1, 1, compute="fp32", recipe=layer.recipe)
    figures = diagnose(_Weighted(layer), setup, (x, c), "cpu")
    tensors = {"input": x, "weight": layer.weight.detach(), "grad_output": c}
    assert figures == {("amax", f"layer:{role}"): float(of.abs().max()) for role, of in tensors.items()}


class _Weighted(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return (self.layer(x) * c).sum()


def test_saturation_shows_where_a_delayed_scale_is_too_large() -> None:
    layer = convert_to_float8_training(nn.Linear(32, 16, bias=False), config="delayed")
    assert isinstance(layer, Float8Linear)
    assert layer.amaxes is not None
    layer.amaxes.in_use.copy_(torch.tensor([0.5, 1.0, 1.0]))
    mark_ready(layer.amaxes)
    x = torch.linspace(-1, 1, 16 * 32).reshape(16, 32)
    setup = Setup("toy", 1, 1, compute="fp32", recipe=layer.recipe)
    figures = diagnose(_Weighted(layer), setup, (x, torch.ones(16, 16)), "cpu")
    assert figures["saturated_frac", "layer:input"] == float((x.abs() * 448 / 0.5 > 464).double().mean())
    assert torch.equal(layer.amaxes.pending, torch.zeros(3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "lr=0.0: expected a number above 0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"min_lr": 1.0}, "min_lr=1.0: expected a number from 0 to lr=0.01"),
        ({"warmup": STEPS}, "lr_warmup=12: expected an integer from 0 to steps - 1 = 11; give axes"),
    ],
)
def test_a_regime_that_is_none_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        job(regime=changes)


def test_the_noise_on_the_weights_has_the_size_it_is_said_to_have() -> None:
    one, two = tiny_lm(), tiny_lm()
    perturb(one, 7)
    again = tiny_lm()
    perturb(again, 7)
    relative = torch.cat(
        [
            ((p - q) / q).detach().flatten()
            for p, q in zip(one.parameters(), two.parameters(), strict=True)
            if q.dim() > 1
        ]
    )
    # 12,000 draws: the standard error of their standard deviation is 0.65 %.
    assert float(relative.std()) == pytest.approx(1e-4, rel=0.03)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), again.parameters(), strict=True))
    perturb(two, 8)
    assert not torch.equal(one.up.weight, two.up.weight)


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_what_is_not_deterministic_on_a_gpu_is_named(
    before: bool, warn_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that torch has no deterministic kernel for, also on a CPU; the caller's settings come back."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(before, warn_only=warn_only)

    def watched() -> list[str]:
        with reproducible("cuda") as found:
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            for _ in range(2):
                torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
            warnings.warn("the attention is non-deterministic", UserWarning, stacklevel=1)
            warnings.warn("another matter", UserWarning, stacklevel=1)
        return found

    try:
        with pytest.warns(UserWarning, match="another matter") as others:
            found = watched()
        assert found == ["put_", "the attention is non-deterministic"]
        assert len(others) == 1
        assert torch.are_deterministic_algorithms_enabled() == before
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with reproducible("cuda"):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "the user's own"


class _Breaking(TinyLM):
    """Its loss, or one gradient, is no number from some step on."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__()
        self.at, self.what = at, what
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))  # put back by whoever only looks

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        loss = super().forward(words, targets)
        if int(self.calls) <= self.at:
            return loss
        if self.what == "loss":
            return loss * math.nan
        return loss + torch.sqrt(self.norm.weight[0] * 0.0)  # finite, with an infinite slope


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
@pytest.mark.parametrize("at", [0, 5])
def test_a_curve_ends_where_it_is_no_number(what: str, at: int) -> None:
    made = job("tensorwise", setup={"accumulation": 1}, heldout=[], model=_Breaking(at, what))
    result = train(made, "cpu")
    assert result.nonfinite_step == at
    assert result.stopped.startswith(f"{what} is ")
    assert result.stopped.endswith(f"at step {at}")
    assert len(result.curves.points.get(("grad_norm", ""), [])) == at
    assert len(result.curves.points.get(("loss", ""), [])) == at + (what == "grad_norm")


@pytest.mark.parametrize("recipe", ["", "tensorwise"])
def test_the_norm_of_the_fp8_layers_is_that_of_their_weights_before_clipping(recipe: str) -> None:
    """Oracle: the gradients of the first step, taken by hand from a model with the same weights; clipping leaves none of them."""
    made = job(recipe, setup={"grad_clip": 1e-3, "accumulation": 1}, heldout=[], model=tiny_lm())
    by_hand = tiny_lm()
    if recipe:
        by_hand = convert_to_float8_training(by_hand, config=RECIPES[recipe])
    layers = [m for m in by_hand.modules() if isinstance(m, Float8Linear)]
    by_hand(*made.batches(0)[0]).backward()
    points = train(made, "cpu").curves.points
    assert (("fp8_grad_norm", "") in points) == bool(layers) == bool(recipe)
    if recipe:
        norm = math.sqrt(sum(float(m.weight.grad.double().square().sum()) for m in layers))
        assert points["fp8_grad_norm", ""][0] == (0, pytest.approx(norm, rel=1e-5))
        assert points["fp8_grad_norm", ""][0][1] < points["grad_norm", ""][0][1]
        assert len(points["fp8_grad_norm", ""]) == STEPS
