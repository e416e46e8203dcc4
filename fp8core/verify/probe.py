"""A layer of our own with operands that hold what a training step may not: a test of each recipe that a model runs.

The step shows what its data show. A fault that touches NaN, subnormal codes, the sign of the largest element or the
second addition of a gradient needs operands that have them; here they go through a Float8Linear (or a grouped product)
of the model's recipe, backend, dtype and device, under the same checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fp8core.experts.moe import GroupedMatmul
from fp8core.history import ROLES, look
from fp8core.linear import Float8Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.recipe import Recipe

TOKENS, INPUTS, OUTPUTS = 160, 240, 208  # multiples of 16 and of no block; squares of 128 lie two by two
LARGEST = 28.0  # 448 / 2**4 and 57344 / 2**11: a scale without rounding, so that ties are ties
EXPERTS, GROUP = 2, 128


def hard(rows: int, columns: int, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Values over 2**-20 to 28, of each block the largest negative and in its second half; a row and a column of zeros;
    a row of ties between two codes of e4m3, and one of e5m2."""
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
    x[: rows // 2 + 24, columns // 2 + 8 :] *= 2.0**-4  # squares of 128 that are not symmetric
    x[:, 9] *= 2.0**-6
    x[7] *= 2.0**-6
    for row, bits in ((11, 4), (12, 3)):  # one more than the format's mantissa has
        odd = 2 * torch.randint(0, 1 << (bits - 1), (columns,), generator=generator, device="cpu") + 1
        x[row] = 1 + odd / 2**bits
    x[rows - 3, columns - 5] = -LARGEST
    x[13], x[:, 17] = 0.0, 0.0
    return x.to(device, dtype)


class LinearProbe:
    """A Float8Linear of our own and the steps that test it.

    Args:
        recipe: of the model's layers.
        dtype: of weight and input.
        device: where it runs.

    Attributes:
        layer: it.
        faults: amaxes in use that are not those of the tensors that were cast.
    """

    def __init__(self, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
        self.layer = Float8Linear(INPUTS, OUTPUTS, bias=True, device="meta", dtype=dtype, config=recipe)
        self.layer.to_empty(device=device)
        self.recipe, self.dtype, self.device = recipe, dtype, device
        self.faults: list[str] = []
        with torch.no_grad():
            self.layer.weight.copy_(hard(OUTPUTS, INPUTS, 1, device, dtype) * 2.0**-4)
            self.layer.bias.copy_(torch.linspace(-8, 8, OUTPUTS, device=device))
        if self.layer.amaxes is not None:
            self.layer.amaxes.reset()

    def step(self) -> None:
        """Two microbatches; then, for scales of earlier steps, a larger one that saturates."""
        with torch.autocast(self.device.type, enabled=False):
            self._pass(10, 1.0)
            self._pass(20, 0.5)
            if self.layer.amaxes is not None:
                self._advance(1.0)
                self._pass(30, 1.5)
                self._advance(1.0 if self.recipe.scaling == "static" else 1.5)

    def spoilt(self) -> None:
        """One with NaN and Inf."""
        with torch.autocast(self.device.type, enabled=False):
            self._pass(40, 1.0, spoil=True)

    def _pass(self, seed: int, size: float, spoil: bool = False) -> None:
        x = hard(TOKENS, INPUTS, seed, self.device, self.dtype) * size
        grad = hard(TOKENS, OUTPUTS, seed + 1, self.device, self.dtype) * (size * 2.0**-10)
        if spoil:
            x[3, 4], grad[7, 8], x[11, 12] = torch.nan, torch.nan, torch.inf
        output = self.layer(x.requires_grad_())
        output.backward(grad.to(output.dtype))

    def _advance(self, size: float) -> None:
        """`update_scales` of a layer that other ranks know nothing of, after which these amaxes must be in use."""
        memory = self.layer.amaxes
        assert memory is not None
        memory.advance()
        look(memory)
        for role, amax in (
            ("input", LARGEST * size),
            ("weight", LARGEST * 2.0**-4),
            ("grad_output", LARGEST * size * 2.0**-10),
        ):
            in_use = float(memory.in_use[ROLES.index(role)])
            if role in memory.ready and in_use != amax:
                self.faults.append(
                    f"amax of {role} in use is {in_use:g} where the largest element seen was {amax:g}"
                )
            if role not in memory.ready and _is_cast(self.recipe, role):
                self.faults.append(f"no amax of {role} is in use after a step")


def _is_cast(recipe: Recipe, role: str) -> bool:
    """By delayed or static scaling."""
    gemms = recipe.gemms
    casts = {
        "input": (gemms["output"].a, gemms["grad_weight"].b),
        "weight": (gemms["output"].b, gemms["grad_input"].b),
        "grad_output": (gemms["grad_input"].a, gemms["grad_weight"].a),
    }[role]
    return any(cast is not None and cast.scaling != "dynamic" for cast in casts)


def probe_experts(
    recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> tuple[GroupedMatmul, Callable[[], None]]:
    """(product, a step); each expert has tokens."""
    product = GroupedMatmul(config=recipe)
    weight = torch.stack([hard(256, 128, e, device, dtype) * 2.0**-4 for e in range(EXPERTS)])
    offsets = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=device) * GROUP

    def step() -> None:
        with torch.autocast(device.type, enabled=False):
            x = hard(EXPERTS * GROUP, 128, 50, device, dtype).requires_grad_()
            output = product(x, weight.requires_grad_(), offsets)
            output.backward(hard(EXPERTS * GROUP, 256, 51, device, output.dtype) * 2.0**-10)

    return product, step
