"""What other libraries' FP8 layers cost, as plain data: the recipes behind published speedups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.advise.casts import TENSORS, Cast, Recipe
from harness.machine.ceilings import ROWWISE

if TYPE_CHECKING:
    from collections.abc import Mapping

# Implementations that others measured. Bytes from their sources, read in August and November 2026.
# Of one layout: what the first forward pass of a checkpoint casts, and its repetition again
_FORWARD: Mapping[str, float] = {"input": 1.0, "weight": 1.0, "grad_output": 0.0}
_TORCHAO = "torchao: high-precision input and weight are saved and read again backward; compiled"
TENSORWISE_AO = Recipe(
    "tensorwise",
    "compiler",
    {"input": Cast(3, 3, forward=3), "weight": Cast(5, 3, forward=5), "grad_output": Cast(2, 4)},
    # A shard's amax and cast, by the gather, which recomputation does not repeat; codes transposed backward
    gathered_weight=Cast(5, 2),
    source=_TORCHAO,
)
# Along the tokens: a transposed copy in bfloat16 (4), then a cast (3), as torchao's own roofline charges the weight; the
# input's is made backward, from what was saved. An output gradient is transposed where it is made (5). Gradients' products
# are tensorwise ones, rescaled afterwards by a kernel of its own each (torchao pull request 1325, issue 2184): 4 bytes of the
# weight's gradient and of the input's. Asynchronous TP finds products before a scatter, and none behind a gather
# (pytorch issue 149990).
ROWWISE_AO = Recipe(
    "rowwise",
    "compiler",
    {"input": Cast(3, 7, forward=3), "weight": Cast(7, 7, forward=3), "grad_output": Cast(3, 5)},
    kind=ROWWISE,
    rescaled=4.0,
    fuses_gathers=False,
    # Of three products the forward one is a rowwise kernel, at 90 to 100 % of the tensorwise one (pytorch issue 147971)
    product_share=0.98,
    source=_TORCHAO,
)
GW_HP_AO = Recipe(
    "rowwise_with_gw_hp",
    "compiler",
    {"input": Cast(3, forward=3), "weight": Cast(5, 3, forward=3), "grad_output": Cast(3)},
    fp8_gemms=("output", "grad_input"),
    kind=ROWWISE,
    rescaled=4.0,  # the tensorwise scale of the weight is repeated into one of rows, which takes the same way
    fuses_gathers=False,
    source=_TORCHAO,
)
NOCOMPILE_AO = Recipe(
    "nocompile",
    "compiler",
    {tensor: Cast(2, 4, forward=_FORWARD[tensor] * 5) for tensor in TENSORS},
    shares_input=False,
    source="torchao.prototype.float8nocompile: amax, then both layouts from one read",
)
EXPERIMENTAL_EAGER = Recipe(
    "tensorwise, operators of 2023",
    "compiler",
    {tensor: Cast(17, 2, forward=_FORWARD[tensor] * 17) for tensor in TENSORS},
    shares_input=False,
    source="float8_experimental: three casts in bfloat16, one operator each",
)
DELAYED_TE = Recipe(
    "delayed",
    "kernels",
    {tensor: Cast(4, kernels=1, forward=_FORWARD[tensor] * 3) for tensor in TENSORS},
    source="TransformerEngine: cast_transpose",
)
CURRENT_TE = Recipe(
    "current",
    "kernels",
    {tensor: Cast(6, forward=_FORWARD[tensor] * 5) for tensor in TENSORS},
    source="TransformerEngine: amax, cast_transpose",
)
# Blocks of 32 with a scale each, no amax of the whole: each layout is one pass (torchao, prototype/mx_formats/README, 2025-08:
# 5.5 TB/s in order, 3.9 TB/s across on a B200). rceil rounds its scales otherwise, in the same bytes.
MXFP8_AO = Recipe(
    "mxfp8",
    "compiler",
    {
        "input": Cast(3.03, 3.03, forward=3.03),
        "weight": Cast(3.03, 3.03, forward=3.03),
        "grad_output": Cast(3.03, 3.03),
    },
    fuses_gathers=False,
    source="torchao: prototype/mx_formats, compiled",
)
BLOCK_TE = Recipe(
    "block",
    "kernels",
    {tensor: Cast(4.1, kernels=1, forward=_FORWARD[tensor] * 3.1) for tensor in TENSORS},
    product_share=0.77,
    source="TransformerEngine: one read of a tile; product's share as in harness.advise.recipes",
)
