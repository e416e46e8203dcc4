"""Whose kernels run the FP8 layers: fp8core's, torchao's or TransformerEngine's. Costs of each recipe, as plain data.

fp8core's are in `harness.advise.recipes`. The other two's bytes come from their sources, read in August and November 2026;
published speedups are held against them (reports/published/studies/speedups.md). torchao's eager casts are also counted, operator by
operator, by a test.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from harness.advise import recipes
from harness.advise.casts import ENGINE, FP8CORE, TENSORS, TORCHAO, CastCost, RecipeCost
from harness.machine.ceilings import ROWWISE
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Of one layout: what the first forward pass of a checkpoint casts, and its repetition again
FORWARD: Mapping[str, float] = {"input": 1.0, "weight": 1.0, "grad_output": 0.0}
# torchao: high-precision input and weight are saved and read again backward; compiled
TENSORWISE_AO = RecipeCost(
    "tensorwise",
    "compiler",
    {"input": CastCost(3, 3, forward=3), "weight": CastCost(5, 3, forward=5), "grad_output": CastCost(2, 4)},
    one_scale=True,
    # A shard's amax and cast, by the gather, which recomputation does not repeat; codes transposed backward
    gathered_weight=CastCost(5, 2),
)
# Along the tokens: a transposed copy in bfloat16 (4), then a cast (3), as torchao's own roofline charges the weight; the
# input's is made backward, from what was saved. An output gradient is transposed where it is made (5). Gradients' products
# are tensorwise ones, rescaled afterwards by a kernel of its own each (torchao pull request 1325, issue 2184): 4 bytes of the
# weight's gradient and of the input's. Asynchronous TP finds products before a scatter, and none behind a gather
# (pytorch issue 149990).
ROWWISE_AO = RecipeCost(
    "rowwise",
    "compiler",
    {"input": CastCost(3, 7, forward=3), "weight": CastCost(7, 7, forward=3), "grad_output": CastCost(3, 5)},
    kind=ROWWISE,
    rescaled=4.0,
    fuses_gathers=False,
    # Of three products the forward one is a rowwise kernel, at 90 to 100 % of the tensorwise one (pytorch issue 147971)
    product_share=0.98,
)
GW_HP_AO = RecipeCost(
    "rowwise_with_gw_hp",
    "compiler",
    {"input": CastCost(3, forward=3), "weight": CastCost(5, 3, forward=3), "grad_output": CastCost(3)},
    fp8_gemms=("output", "grad_input"),
    kind=ROWWISE,
    rescaled=4.0,  # the tensorwise scale of the weight is repeated into one of rows, which takes the same way
    fuses_gathers=False,
)
# TransformerEngine: cast_transpose; amax, then cast_transpose; one read of a tile, product's share as in `recipes`
DELAYED_TE = RecipeCost(
    "delayed",
    "kernels",
    {tensor: CastCost(4, kernels=1, forward=FORWARD[tensor] * 3) for tensor in TENSORS},
    one_scale=True,
    scaling="delayed",
)
CURRENT_TE = RecipeCost(
    "current",
    "kernels",
    {tensor: CastCost(6, forward=FORWARD[tensor] * 5) for tensor in TENSORS},
    one_scale=True,
)
BLOCK_TE = RecipeCost(
    "block",
    "kernels",
    {tensor: CastCost(4.1, kernels=1, forward=FORWARD[tensor] * 3.1) for tensor in TENSORS},
    product_share=0.77,
)

# Bytes of one cast by six operators of torchao 0.18: abs 4, max 2, to float32 6, times scale 8, clamp 8, to FP8 5.
EAGER_CAST_AO = 33.0
EAGER_KERNELS_AO = 6
# Casts of a tensor, and transposed copies of its codes (2 bytes): input and weight are cast in both passes, the output
# gradient once for each product. `rowwise_with_gw_hp` has no FP8 product for the weight's gradient.
_EAGER_CASTS = {
    "tensorwise": dict.fromkeys(TENSORS, (2, 1)),
    "rowwise": dict.fromkeys(TENSORS, (2, 1)),
    "rowwise_with_gw_hp": {"input": (1, 0), "weight": (2, 1), "grad_output": (1, 0)},
}
_COMPILED_AO = {recipe.name: recipe for recipe in (TENSORWISE_AO, ROWWISE_AO, GW_HP_AO)}
# Under the names that fp8core gives to the same numbers
_ENGINE = {"tensorwise": CURRENT_TE, "delayed": DELAYED_TE, "blockwise": BLOCK_TE}
_ENGINE_NEEDS = {"blockwise": ("9.0", "10.0", "10.3")}


def candidates(library: str, compiled: bool) -> dict[str, RecipeCost]:
    """The recipes of a library as they run in that mode, by fp8core's names.

    Raises:
        UsageError: TransformerEngine under torch.compile.
    """
    if library == FP8CORE:
        return recipes.candidates(compiled)
    if library == TORCHAO:
        return dict(_COMPILED_AO) if compiled else {name: _eager(name) for name in _EAGER_CASTS}
    if compiled:
        raise UsageError(
            "library=transformer_engine: its layers break the graphs of torch.compile; take mode=eager, or leave mode out"
        )
    return {name: replace(recipe, name=name) for name, recipe in _ENGINE.items()}


def unavailable(library: str, name: str, capability: str, compiled: bool) -> str:
    """Why a GPU of that architecture cannot run a recipe of a library in FP8; "" if it can."""
    if library == ENGINE:
        if capability.startswith("gfx"):
            return "TransformerEngine's kernels are for NVIDIA GPUs"
        needed = _ENGINE_NEEDS.get(name, ())
        return (
            f"needs {', '.join(needed)}, this GPU is {capability}"
            if needed and capability not in needed
            else ""
        )
    if library == TORCHAO:  # its casts are plain operators, which run everywhere
        return recipes.unavailable(name, capability, compiled=True)
    return recipes.unavailable(name, capability, compiled)


def _eager(name: str) -> RecipeCost:
    casts = {
        tensor: CastCost(
            EAGER_CAST_AO * count,
            2.0 * copies,
            kernels=EAGER_KERNELS_AO * count + copies,
            forward=EAGER_CAST_AO * FORWARD[tensor],
        )
        for tensor, (count, copies) in _EAGER_CASTS[name].items()
    }
    compiled = _COMPILED_AO[name]
    gathered = None
    if compiled.gathered_weight is not None:  # the shard by operators, its codes transposed backward
        gathered = CastCost(EAGER_CAST_AO, 2.0, kernels=EAGER_KERNELS_AO + 1)
    return replace(compiled, by="operators", casts=casts, shares_input=False, gathered_weight=gathered)
