"""Situations of `fp8core.verify`: steps that run no FP8, other FP8 than asked for, or show nothing of it."""

from __future__ import annotations

import copy
from functools import partial

import torch
from recipes import changed
from situations import Place, situation
from torch import nn

from fp8core import (
    BACKENDS,
    RECIPES,
    PrecisionSchedule,
    Proof,
    convert_to_float8_training,
    count_matmuls,
    update_scales,
    verify,
)
from fp8core.gemm import reference

of_verify = partial(situation, "verify", word="Proof.ok", positive=True, instead=False)


class Mlp(nn.Module):
    """Two layers that fit every recipe."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.kept = [self.up, self.down]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def batch(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()


def loss(model: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    return model(batch() if x is None else x).square().mean()


def proof(model: nn.Module, step: object = None, **options: object) -> Proof:
    return verify(step or (lambda: loss(model).backward()), model, announce=False, **options)  # type: ignore[arg-type]


@of_verify(what="the step runs under `no_grad`")
def no_gradient(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())

    def step() -> None:
        with torch.set_grad_enabled(not planted):
            found = loss(model)
        if found.requires_grad:
            found.backward()

    return proof(model, step).ok


@of_verify(what="the step computes a loss and no gradient of it")
def no_backward(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    return proof(model, lambda: loss(model) if planted else loss(model).backward()).ok


@of_verify(what="the batch holds NaN: every product is NaN, right or wrong")
def nan_batch(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    x = (batch().detach() * (float("nan") if planted else 1.0)).requires_grad_()
    return proof(model, lambda: loss(model, x).backward()).ok


@of_verify(what="the loss is scaled by 0: every gradient is 0, right or wrong")
def zero_loss_scale(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    return proof(model, lambda: (loss(model) * (0.0 if planted else 1.0)).backward()).ok


@of_verify(what="the batch has no tokens")
def no_tokens(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    x = batch(0 if planted else 16)
    return proof(model, lambda: model(x).square().sum().backward()).ok


@of_verify(what="the filter matches no layer")
def nothing_converted(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(
        Mlp(), module_filter_fn=lambda *_: not planted, allow_no_conversion=True
    )
    return proof(model).ok


@of_verify(what="`forward` calls layers that it kept from before the conversion")
def other_objects(_: Place, planted: bool) -> object:
    model = Mlp()
    before = list(model.kept)
    model = convert_to_float8_training(model)
    if planted:
        model.forward = lambda x: before[1](torch.relu(before[0](x)))
    return proof(model).ok


@of_verify(what="the step trains a copy of the model")
def another_model(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    trained = copy.deepcopy(model) if planted else model
    return proof(model, lambda: loss(trained).backward()).ok


@of_verify(what="`forward` takes a layer's weight and multiplies by itself")
def weight_alone(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    if planted:
        up = model.up
        model.forward = lambda x: model.down(torch.relu(nn.functional.linear(x, up.weight, up.bias)))
    return proof(model).ok


@of_verify(what="a `detach` between the layers cuts the backward pass")
def detached(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())

    def step() -> None:
        hidden = torch.relu(model.up(batch()))
        model.down(hidden.detach() if planted else hidden).square().mean().backward()

    return proof(model, step).ok


@of_verify(what="the layers emulate FP8 in high precision")
def emulated(_: Place, planted: bool) -> object:
    recipe = RECIPES["rowwise"]
    return proof(convert_to_float8_training(Mlp(), config=recipe.emulated() if planted else recipe)).ok


@of_verify(what="another recipe runs than was asked for")
def another_recipe(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp(), config="tensorwise" if planted else "rowwise")
    return proof(model, recipe="rowwise").ok


@of_verify(what="the kernel behind the recipe's name multiplies in high precision")
def kernel_in_high_precision(place: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    if planted:
        place.patch.setitem(BACKENDS, "torch", changed(BACKENDS["torch"], matmul=reference.matmul))
    return proof(model).ok


@of_verify(what="the device has no FP8 matrix units")
def device_without_fp8(place: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    if planted:
        refusing = changed(BACKENDS["torch"], device_reason=lambda *_: "compute capability 8.0")
        place.patch.setitem(BACKENDS, "torch", refusing)
    return proof(model).ok


@of_verify(what="the schedule keeps the step in bf16")
def schedule_off(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    schedule = PrecisionSchedule.parse("warmup_bf16:10")
    schedule.apply(model, 0 if planted else 10, 20)
    return proof(model).ok


@of_verify(what="delayed scales are never updated")
def delayed_scales(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp(), config="delayed")

    def step() -> None:
        loss(model).backward()
        if not planted:
            update_scales(model)

    return proof(model, step).ok


@situation(
    "verify",
    "`torch.compile` is switched off and runs the step in eager mode",
    word="Proof.compiled",
    positive=True,
    instead=False,
)
def compile_fell_back(_: Place, planted: bool) -> object:
    torch._dynamo.reset()
    model = convert_to_float8_training(Mlp())

    compiled = torch.compile(model, backend="aot_eager", dynamic=False, disable=planted)
    return proof(model, lambda: loss(compiled).backward()).compiled


@situation(
    "count_matmuls",
    "the step has no matrix product: 100 % of nothing",
    word="MatmulCount.fp8_share",
    positive=1.0,
    instead=0.0,
)
def share_of_nothing(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    counted = count_matmuls(lambda: batch().sum() if planted else loss(model).backward(), model)
    return counted.fp8_share
