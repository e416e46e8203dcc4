"""Situations of `fp8core.verify`: steps that run no FP8, other FP8 than asked for, or show nothing of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from recipes import changed
from situations import Place, situation
from torch import nn
from torch.library import custom_op

from fp8core import (
    BACKENDS,
    RECIPES,
    Float8Linear,
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


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is a third too large."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return 1.3 * grad


def bias_gradient(
    place: Place,
    planted: bool,
    change: Callable[[torch.Tensor], torch.Tensor],
    *frozen: str,
    x: torch.Tensor | None = None,
) -> object:
    """Each bias goes through a function on its way into its layer; these weights are frozen."""
    model, run = convert_to_float8_training(Mlp()), Float8Linear._run
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if planted:
        changed = lambda self, x, weight, bias, tp: run(self, x, weight, change(bias), tp)  # noqa: E731
        place.patch.setattr(Float8Linear, "_run", changed)
    return proof(model, lambda: loss(model, x).backward()).ok


@of_verify(what="gradients of biases are a third too large")
def bias_gradient_scaled(place: Place, planted: bool) -> object:
    return bias_gradient(place, planted, Scaled.apply)


@of_verify(what="gradients of biases do not arrive")
def bias_gradient_dropped(place: Place, planted: bool) -> object:
    return bias_gradient(place, planted, torch.Tensor.detach)


@of_verify(what="gradients of biases do not arrive, and all weights are frozen")
def bias_gradient_of_frozen_layers(place: Place, planted: bool) -> object:
    return bias_gradient(place, planted, torch.Tensor.detach, "up.weight", "down.weight")


@of_verify(what="the first layer trains its bias alone, whose gradient is a third too large")
def bias_gradient_alone(place: Place, planted: bool) -> object:
    return bias_gradient(place, planted, Scaled.apply, "up.weight", "down.bias", x=batch().detach())


@situation(
    "verify",
    "a weight is frozen, and has no gradient to compare",
    word='Proof.compared["grad_weight"]',
    positive=2,
    instead=1,
)
def frozen_weight(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    model.up.weight.requires_grad_(not planted)
    return proof(model).compared["grad_weight"]


of_compiled = partial(situation, "verify", word="Proof.compiled", positive=6, instead=0)


def compiled_gemms(model: nn.Module, step: Callable[[nn.Module], torch.Tensor]) -> object:
    torch._dynamo.reset()
    return proof(model, lambda: step(model).backward()).compiled


def compiled_by(backend: str | Callable[..., object], disable: bool = False) -> Any:
    return torch.compile(convert_to_float8_training(Mlp()), backend=backend, dynamic=False, disable=disable)


@of_compiled(what="`torch.compile` is switched off and runs the step in eager mode")
def compile_off(_: Place, planted: bool) -> object:
    return compiled_gemms(compiled_by("aot_eager", disable=planted), loss)


@of_compiled(what="the compiler fails, and `suppress_errors` falls back to eager mode")
def compile_failed(_: Place, planted: bool) -> object:
    def fails(*given: object) -> object:
        raise NotImplementedError

    with torch._dynamo.config.patch(suppress_errors=True):
        return compiled_gemms(compiled_by(fails if planted else "aot_eager"), loss)


@of_compiled(what="only the loss is compiled")
def loss_alone_compiled(_: Place, planted: bool) -> object:
    square = torch.compile(lambda y: y.square().mean(), backend="aot_eager", dynamic=False)
    model = convert_to_float8_training(Mlp()) if planted else compiled_by("aot_eager")
    return compiled_gemms(model, lambda model: square(model(batch())))


@situation("verify", "one of two layers is compiled", word="Proof.compiled", positive=6, instead=3)
def one_layer_compiled(_: Place, planted: bool) -> object:
    model = convert_to_float8_training(Mlp())
    model.up.compile(backend="aot_eager", dynamic=False)
    if not planted:
        model.down.compile(backend="aot_eager", dynamic=False)
    return compiled_gemms(model, loss)


class Hidden(torch.autograd.Function):
    """A product that PyTorch sees nothing of."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy())

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


of_count = partial(situation, "count_matmuls", word="not MatmulCount.uncounted", positive=True, instead=False)


def nothing_uncounted(step: Callable[[nn.Module], torch.Tensor]) -> object:
    model = convert_to_float8_training(Mlp())
    return not count_matmuls(lambda: step(model).sum().backward(), model).uncounted


@of_count(what="an `autograd.Function` multiplies in NumPy")
def product_in_numpy(_: Place, planted: bool) -> object:
    square = torch.eye(32)
    return nothing_uncounted(
        lambda model: Hidden.apply(model(batch()), square) if planted else model(batch()) @ square
    )


@custom_op("image::product_of_a_test", mutates_args=())
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A product in a namespace that vision packages use."""
    return torch.mm(x, y)


@of_count(what="an operator of somebody's namespace multiplies")
def product_in_a_namespace(_: Place, planted: bool) -> object:
    def step(model: nn.Module) -> torch.Tensor:
        y = model(batch())
        with torch.no_grad():
            more = (product if planted else torch.mm)(y, y.t())
        return y.sum() + more.sum()

    return nothing_uncounted(step)
