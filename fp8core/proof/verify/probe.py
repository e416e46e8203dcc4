"""Each recipe that a model runs, on a layer of our own with operands that hold what a training step may not.

The step shows what its data show. A fault that touches NaN, subnormal codes, the sign of the largest element or the
second addition of a gradient needs operands that have them; here they go through a Float8Linear (or a grouped product)
of the model's recipe, backend, dtype and device, under the same checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8core.experts.moe import GroupedMatmul
from fp8core.history import ROLES, mark_ready
from fp8core.linear import Float8Linear
from fp8core.proof.cast_stats import reads_of
from fp8core.proof.verify import calls
from fp8core.scaling import HP_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.recipe import Recipe

TOKENS, INPUTS, OUTPUTS = 160, 240, 208  # multiples of 16 and of no block; squares of 128 lie two by two
LARGEST = 28.0  # 448 / 2**4 and 57344 / 2**11: a scale without rounding, so that ties are ties
EXPERTS, GROUP = 2, 128


def tested_recipes(watch: calls.Watch, model: nn.Module) -> tuple[tuple[str, ...], list[str], list[str]]:
    """Tests each kind of converted layer of a watched model once: (recipes, problems, what could not be tested)."""
    stacked = next((p for p in model.parameters() if p.dim() == 3), None)
    kinds: dict[tuple[Recipe, torch.dtype, torch.device, bool], None] = {}
    for _, module in watch.modules:
        of_experts = isinstance(module, GroupedMatmul)
        weight: torch.Tensor | None = stacked if of_experts else module.weight
        if module.recipe.fp8_gemms and weight is not None:
            dtype = weight.dtype if weight.dtype in HP_DTYPES else torch.bfloat16
            kinds[module.recipe, dtype, weight.device, of_experts] = None
    problems, untested = [], []
    for recipe, dtype, device, of_experts in kinds:
        if device.type == "meta" or recipe.is_four_bit:
            why = "its layers are on meta" if device.type == "meta" else "no independent cast to four bits"
            untested.append(f"recipe {recipe}: {why}")
            continue
        gpus = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(gpus), torch.autocast(device.type, enabled=False):
            faults = (_of_experts if of_experts else _of_layer)(recipe, dtype, device)
        what = "experts" if of_experts else "a layer"
        problems += [f"recipe {recipe}, tested on {what} of our own: {fault}" for fault in faults[:3]]
    return tuple(dict.fromkeys(str(recipe) for recipe, *_ in kinds)), problems, untested


def _faults(module: nn.Module, step: Callable[[], Any]) -> list[str]:
    watch = calls.Watch(nn.ModuleList([module]))
    with torch.enable_grad(), watch:
        step()
    (proof,) = watch.proofs()
    idle = [name for name, gemm in proof.gemms.items() if not gemm.calls]
    return proof.faults + [f"{name} was never compared" for name in idle]


def _of_layer(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Two microbatches; for scales of earlier steps a larger one that saturates; then one with NaN and Inf."""
    layer = Float8Linear(INPUTS, OUTPUTS, bias=True, device="meta", dtype=dtype, config=recipe)
    layer.to_empty(device=device)
    memory = layer.amaxes
    with torch.no_grad():
        layer.weight.copy_(_hard(OUTPUTS, INPUTS, 1, device, dtype) * 2.0**-4)
        layer.bias.copy_(torch.linspace(-8, 8, OUTPUTS, device=device))
    if memory is not None:
        memory.reset()
    faults: list[str] = []

    def run(seed: int, size: float, *, spoil: bool = False) -> None:
        x = _hard(TOKENS, INPUTS, seed, device, dtype) * size
        grad = _hard(TOKENS, OUTPUTS, seed + 1, device, dtype) * (size * 2.0**-10)
        if spoil:
            x[3, 4], grad[7, 8], x[11, 12] = torch.nan, torch.nan, torch.inf
        output = layer(x.requires_grad_())
        output.backward(grad.to(output.dtype))

    def advance(size: float) -> None:
        """`update_scales` of a layer that other ranks know nothing of, after which these amaxes must be in use."""
        assert memory is not None
        memory.advance()
        mark_ready(memory)
        sizes = size, 2.0**-4, size * 2.0**-10
        for role, largest in zip(ROLES, sizes, strict=True):
            amax = float(memory.in_use[ROLES.index(role)]) if role in memory.ready else 0.0
            held = any(cast is not None and cast.scaling != "dynamic" for _, cast in reads_of(recipe, role))
            if held and amax != LARGEST * largest:
                faults.append(
                    f"amax of {role} in use is {amax:g} where the largest element seen was {LARGEST * largest:g}"
                )

    def step() -> None:
        run(10, 1.0)
        run(20, 0.5)
        if memory is not None:
            advance(1.0)
            run(30, 1.5)
            advance(1.0 if recipe.scaling == "static" else 1.5)

    found = _faults(layer, step) + faults
    return found or [
        f"with NaN and Inf: {fault}" for fault in _faults(layer, lambda: run(40, 1.0, spoil=True))
    ]


def _of_experts(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Each expert has tokens."""
    product = GroupedMatmul(config=recipe)
    weight = torch.stack([_hard(256, 128, e, device, dtype) * 2.0**-4 for e in range(EXPERTS)])
    offsets = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=device) * GROUP

    def step() -> None:
        x = _hard(EXPERTS * GROUP, 128, 50, device, dtype)
        output = product(x.requires_grad_(), weight.requires_grad_(), offsets)
        output.backward(_hard(EXPERTS * GROUP, 256, 51, device, output.dtype) * 2.0**-10)

    return _faults(product, step)


def _hard(rows: int, columns: int, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Values over 2**-20 to 28, of each block the largest negative and in its second half; a row and a column of zeros;
    a row of ties between two codes of e4m3, and one of e5m2."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        x = torch.randn(rows, columns, generator=generator).clamp(-3, 3)
        spread = torch.rand(rows, columns, generator=generator) < 0.2
        x[spread] *= 2.0 ** torch.randint(-20, 1, (rows, columns), generator=generator)[spread]
        # Largest of each block of 32, and so of each row, column and square: negative, in the second half
        for matrix, size in ((x.t(), 1.0), (x, 1.5)):
            chosen = torch.arange(24, len(matrix) + 24, 32).clamp(max=len(matrix) - 1)
            matrix[chosen] = -(3 + torch.rand(matrix[chosen].shape, generator=generator)) * size
        x[: rows // 2 + 24, columns // 2 + 8 :] *= 2.0**-4  # squares of 128 that are not symmetric
        x[:, 9] *= 2.0**-6
        x[7] *= 2.0**-6
        for row, bits in ((11, 4), (12, 3)):  # one more than the format's mantissa has
            odd = 2 * torch.randint(0, 1 << (bits - 1), (columns,), generator=generator) + 1
            x[row] = 1 + odd / 2**bits
        x[rows - 3, columns - 5] = -LARGEST
        x[13], x[:, 17] = 0.0, 0.0
    return x.to(device, dtype)
