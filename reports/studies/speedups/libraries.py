"""What other libraries' FP8 layers cost, as plain data: the recipes behind published speedups that advise does not offer."""

from __future__ import annotations

from harness.advise.casts import TENSORS, CastCost, RecipeCost
from harness.advise.libraries import (
    BLOCK_TE,
    CURRENT_TE,
    DELAYED_TE,
    FORWARD,
    GW_HP_AO,
    ROWWISE_AO,
    TENSORWISE_AO,
)

__all__ = [
    "BLOCK_TE",
    "CURRENT_TE",
    "DELAYED_TE",
    "EXPERIMENTAL_EAGER",
    "GW_HP_AO",
    "MXFP8_AO",
    "NOCOMPILE_AO",
    "ROWWISE_AO",
    "TENSORWISE_AO",
]

NOCOMPILE_AO = RecipeCost(
    "nocompile",
    "compiler",
    {tensor: CastCost(2, 4, forward=FORWARD[tensor] * 5) for tensor in TENSORS},
    shares_input=False,
    # torchao.prototype.float8nocompile: amax, then both layouts from one read
)
EXPERIMENTAL_EAGER = RecipeCost(
    "tensorwise, operators of 2023",
    "compiler",
    {tensor: CastCost(17, 2, forward=FORWARD[tensor] * 17) for tensor in TENSORS},
    shares_input=False,
    # float8_experimental: three casts in bfloat16, one operator each
)
# Blocks of 32 with a scale each, no amax of the whole: each layout is one pass (torchao, prototype/mx_formats/README, 2025-08:
# 5.5 TB/s in order, 3.9 TB/s across on a B200). rceil rounds its scales otherwise, in the same bytes.
MXFP8_AO = RecipeCost(
    "mxfp8",
    "compiler",
    {
        "input": CastCost(3.03, 3.03, forward=3.03),
        "weight": CastCost(3.03, 3.03, forward=3.03),
        "grad_output": CastCost(3.03, 3.03),
    },
    fuses_gathers=False,
    # torchao: prototype/mx_formats, compiled
)
