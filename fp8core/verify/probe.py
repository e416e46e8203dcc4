"""A layer of our own with operands that hold what a training step may not: a test of each recipe that a model runs.

The step shows what its data show. A fault that touches NaN, subnormal codes, the sign of the largest element or the
second addition of a gradient needs operands that have them; here they go through a Float8Linear (or a grouped product)
of the model's recipe, backend, dtype and device, under the same checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fp8core.history import look
from fp8core.linear import Float8Linear
from fp8core.moe import GroupedMatmul

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.recipe import Recipe

TOKENS, INPUTS, OUTPUTS = 160, 288, 208  # multiples of 16, and of no block of 128
EXPERTS, GROUP = 2, 128


def hard(rows: int, columns: int, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Values over 2**-20 to 2**4, of each block the largest negative and in its second half; zeros; ties."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device="cpu").clamp(-3, 3)
    exponents = torch.randint(-20, 1, (rows, columns), generator=generator, device="cpu")
    spread = torch.rand(rows, columns, generator=generator, device="cpu") < 0.2
    x = torch.where(spread, x * 2.0**exponents, x)
    # Largest of each block of 32, and so of each row, column and square: negative, in the second half
    for first in range(0, columns, 32):
        place = min(first + 24, columns - 1)
        x[:, place] = -(3 + torch.rand(rows, generator=generator, device="cpu"))
    for first in range(0, rows, 32):
        place = min(first + 24, rows - 1)
        x[place] = -(3 + torch.rand(columns, generator=generator, device="cpu")) * 1.5
    x[rows - 3, columns - 5] = -16.0
    x[5, ::7] = 0.0
    x[:, 9] *= 2.0**-6
    x[7] *= 2.0**-6
    return x.to(device, dtype)


def probe_linear(recipe: Recipe, dtype: torch.dtype, input_dtype: torch.dtype, device: torch.device) -> tuple[
    Float8Linear, Callable[[], None], Callable[[], None]
]:
    """(layer, a step of two microbatches, one with NaN and Inf).

    Args:
        recipe: of the model's layers.
        dtype: of the weight.
        input_dtype: of the input.
        device: where it runs.
    """
    layer = Float8Linear(INPUTS, OUTPUTS, bias=True, device="meta", dtype=dtype, config=recipe)
    layer.to_empty(device=device)
    with torch.no_grad():
        layer.weight.copy_(hard(OUTPUTS, INPUTS, 1, device, dtype) * 0.05)
        layer.bias.copy_(torch.linspace(-8, 8, OUTPUTS, device=device))
    if layer.amaxes is not None:
        layer.amaxes.reset()

    def once(seed: int, size: float, spoil: bool = False) -> None:
        x = hard(TOKENS, INPUTS, seed, device, input_dtype) * size
        grad = hard(TOKENS, OUTPUTS, seed + 1, device, input_dtype) * 2.0**-10
        if spoil:
            x[3, 4], grad[7, 8], x[11, 12] = torch.nan, torch.nan, torch.inf
        output = layer(x.requires_grad_())
        output.backward(grad.to(output.dtype))

    def step() -> None:
        with torch.autocast(device.type, enabled=False):
            for seed in (10, 20):
                once(seed, 1.0)
            if layer.amaxes is not None:  # by the amax of earlier steps, beyond which larger ones saturate
                update_scales_of(layer)
                once(30, 1.5)

    def spoilt() -> None:
        with torch.autocast(device.type, enabled=False):
            once(40, 1.0, spoil=True)

    return layer, step, spoilt


def update_scales_of(layer: Float8Linear) -> None:
    """`update_scales` of a layer that other ranks know nothing of."""
    assert layer.amaxes is not None
    layer.amaxes.advance()
    look(layer.amaxes)


def probe_experts(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> tuple[
    GroupedMatmul, Callable[[], None]
]:
    """(product, a step); each expert has tokens."""
    product = GroupedMatmul(config=recipe)
    weight = torch.stack([hard(256, 128, e, device, dtype) * 0.05 for e in range(EXPERTS)])
    offsets = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=device) * GROUP

    def step() -> None:
        with torch.autocast(device.type, enabled=False):
            x = hard(EXPERTS * GROUP, 128, 50, device, dtype).requires_grad_()
            output = product(x, weight.requires_grad_(), offsets)
            output.backward(hard(EXPERTS * GROUP, 256, 51, device, output.dtype) * 2.0**-10)

    return product, step
