"""Published FP8 speedups with their conditions: what the prediction is held against. Plain data.

Nothing in the prediction is fitted to these. `known` is False where a condition that the prediction needs was not
published; then only the sign is held against it. Measured are ratios of tokens/s (FP8 over bf16) of whole training steps,
or of single layers (`layer`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from harness.advise.step import Again
from speedups.case import BY_OP, EVERY_SECOND, FULL, META_H100, Case
from speedups.libraries import (
    BLOCK_TE,
    CURRENT_TE,
    DELAYED_TE,
    EXPERIMENTAL_EAGER,
    GW_HP_AO,
    NOCOMPILE_AO,
    ROWWISE_AO,
    TENSORWISE_AO,
)

if TYPE_CHECKING:
    from harness.advise.casts import Recipe

_TITAN_TP = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06"
_AO_DOCS = "torchao docs, training workflow"


def _unshared(recipe: Recipe) -> Recipe:
    """Under plain tensor parallelism each layer casts its gathered input by itself."""
    return replace(recipe, shares_input=False)


_FSDP8 = {"dp": 8, "again": BY_OP}
_TP_70B = {"dp": 32, "tp": 8, "again": FULL, "gather_fp8": False}
_TP_8B = {"dp": 8, "tp": 8, "again": BY_OP, "gather_fp8": False}
_TENSORWISE_TP = {"tp_gather_fp8": True}
_ASYNC = {"tp_overlap": True}
_ROWWISE_TP = _unshared(ROWWISE_AO)

CASES: tuple[Case, ...] = (
    Case(
        "8B, 8 H100, tensorwise",
        "llama3_8b",
        META_H100,
        TENSORWISE_AO,
        7689.5 / 6150,
        _AO_DOCS,
        bf16=6150,
        plan=_FSDP8,
    ),
    Case(
        "8B, 8 H100, rowwise",
        "llama3_8b",
        META_H100,
        ROWWISE_AO,
        6768 / 6150,
        _AO_DOCS,
        bf16=6150,
        plan=_FSDP8,
    ),
    Case(
        "8B, 8 H100, tensorwise, Feb 2025",
        "llama3_8b",
        META_H100,
        TENSORWISE_AO,
        7186 / 5760,
        "torchtitan pull request 808",
        bf16=5760,
        plan=_FSDP8,
    ),
    Case(
        "8B, 8 H100, rowwise, Feb 2025",
        "llama3_8b",
        META_H100,
        ROWWISE_AO,
        6412 / 5760,
        "torchtitan pull request 808",
        bf16=5760,
        plan=_FSDP8,
    ),
    Case(
        "8B, 8 H100, batch 2, tensorwise",
        "llama3_8b",
        META_H100,
        TENSORWISE_AO,
        8532 / 6667,
        "torchtitan, benchmarks/llama3_h100_202412",
        batch=2,
        bf16=6667,
        plan=_FSDP8,
    ),
    Case(
        "8B, 128 H100, batch 2, tensorwise",
        "llama3_8b",
        META_H100,
        TENSORWISE_AO,
        8380 / 6514,
        "torchtitan, benchmarks/llama3_h100_202412",
        batch=2,
        bf16=6514,
        plan={"dp": 128, "again": BY_OP},
    ),
    Case(
        "70B, TP8, tensorwise",
        "llama3_70b",
        META_H100,
        TENSORWISE_AO,
        809.8 / 597.3,
        _TITAN_TP,
        batch=16,
        bf16=597.3,
        plan=_TP_70B | _TENSORWISE_TP,
    ),
    Case(
        "70B, TP8, rowwise",
        "llama3_70b",
        META_H100,
        _ROWWISE_TP,
        599.6 / 597.3,
        _TITAN_TP,
        batch=16,
        bf16=597.3,
        plan=_TP_70B,
    ),
    Case(
        "70B, TP8, rowwise without k and v",
        "llama3_70b",
        META_H100,
        _ROWWISE_TP,
        1.10,
        "torchtitan pull request 1319, 'about 10 %'",
        batch=16,
        bf16=597.3,
        plan=_TP_70B,
        left_out=("head", "k", "v"),
    ),
    Case(
        "70B, TP8 async, tensorwise",
        "llama3_70b",
        META_H100,
        TENSORWISE_AO,
        942 / 652,
        _TITAN_TP,
        batch=16,
        bf16=652,
        plan=_TP_70B | _TENSORWISE_TP | _ASYNC,
    ),
    Case(
        "70B, TP8 async, rowwise",
        "llama3_70b",
        META_H100,
        _ROWWISE_TP,
        625 / 652,
        _TITAN_TP,
        batch=16,
        bf16=652,
        plan=_TP_70B | _ASYNC,
    ),
    Case(
        "8B, TP8, tensorwise",
        "llama3_8b",
        META_H100,
        TENSORWISE_AO,
        5078 / 4378,
        _TITAN_TP,
        batch=12,
        bf16=4378,
        plan=_TP_8B | _TENSORWISE_TP,
    ),
    Case(
        "8B, TP8, rowwise",
        "llama3_8b",
        META_H100,
        _ROWWISE_TP,
        3708.5 / 4378,
        _TITAN_TP,
        batch=12,
        bf16=4378,
        plan=_TP_8B,
    ),
    Case(
        "8B, TP8 async, tensorwise",
        "llama3_8b",
        META_H100,
        TENSORWISE_AO,
        5570 / 4809,
        _TITAN_TP,
        batch=12,
        bf16=4809,
        plan=_TP_8B | _TENSORWISE_TP | _ASYNC,
    ),
    Case(
        "8B, TP8 async, rowwise",
        "llama3_8b",
        META_H100,
        _ROWWISE_TP,
        3915 / 4809,
        _TITAN_TP,
        batch=12,
        bf16=4809,
        plan=_TP_8B | _ASYNC,
    ),
    Case(
        "8B, TP2 and FSDP2, rowwise",
        "llama3_8b",
        META_H100,
        _ROWWISE_TP,
        5189 / 5378,
        "torchtitan issue 1207",
        bf16=5378,
        plan={"dp": 2, "tp": 2, "again": BY_OP, "gather_fp8": False},
    ),
    Case(
        "8B, 8 MI300X, tensorwise",
        "llama3_8b",
        "MI300X",
        TENSORWISE_AO,
        1.1468,
        _AO_DOCS,
        bf16=5376.5,
        plan=_FSDP8,
    ),
    Case(
        "8B, 8 MI300X, rowwise_with_gw_hp",
        "llama3_8b",
        "MI300X",
        GW_HP_AO,
        1.1346,
        _AO_DOCS,
        bf16=5376.5,
        plan=_FSDP8,
    ),
    Case(
        "8B, 8 MI300X, rowwise", "llama3_8b", "MI300X", ROWWISE_AO, 1.0957, _AO_DOCS, bf16=5376.5, plan=_FSDP8
    ),
    Case(
        "8B, 8 B200, tensorwise",
        "llama3_8b",
        "B200",
        TENSORWISE_AO,
        1.254,
        _AO_DOCS,
        bf16=8307.5,
        plan=_FSDP8,
    ),
    Case("8B, 8 B200, rowwise", "llama3_8b", "B200", ROWWISE_AO, 1.04, _AO_DOCS, bf16=8307.5, plan=_FSDP8),
    *(
        Case(
            f"8B, 8 H100, eager, {name}",
            "llama3_8b",
            META_H100,
            NOCOMPILE_AO,
            fp8 / bf16,
            "torchao, prototype/float8nocompile/README",
            seq=4096,
            bf16=bf16,
            plan={"dp": 8, "compiled": False, "again": again, "gather_fp8": False},
        )
        for name, fp8, bf16, again in (
            ("nothing recomputed", 5871.4, 5339, Again()),
            ("every second block recomputed", 5302, 4882, EVERY_SECOND),
            ("all recomputed", 4773, 4502, FULL),
        )
    ),
    Case(
        "8B, 8 H100, only Linears compiled",
        "llama3_8b",
        META_H100,
        _unshared(TENSORWISE_AO),
        4726 / 4495,
        "torchao pull request 1489",
        seq=4096,
        bf16=4495,
        plan={"dp": 8, "compiled": False, "again": FULL, "gather_fp8": False},
    ),
    Case(
        "7B, eager, operators of 2023",
        "llama2_7b",
        META_H100,
        EXPERIMENTAL_EAGER,
        0.81,
        "RFC of 2023",
        seq=4096,
        plan={"compiled": False},
        known=False,
        note="GPUs, batch and length",
    ),
    Case(
        "7B, compiled, 2023",
        "llama2_7b",
        META_H100,
        TENSORWISE_AO,
        1.22,
        "RFC of 2023",
        seq=4096,
        plan={"dp": 8, "copied": False},
        known=False,
        note="GPUs, batch and length",
    ),
    Case(
        "70B, 1600 to 1920 H200, rowwise",
        "llama3_70b",
        "H200 SXM",
        ROWWISE_AO,
        1.385,
        "Crusoe, 2025-04: 1.34 to 1.43",
        plan={"dp": 1600, "again": FULL},
        known=False,
        note="batch, length, context parallelism",
    ),
    Case(
        "GPT-2 scale, 8 H100, tensorwise",
        "nanochat_d24",
        "H100 SXM",
        TENSORWISE_AO,
        1.073,
        "nanochat, its author on FP8",
        batch=16,
        seq=2048,
        plan={"dp": 1},
        known=False,
        note="depth and batch of the run",
    ),
    Case(
        "GPT-2 scale, 8 H100, rowwise",
        "nanochat_d24",
        "H100 SXM",
        ROWWISE_AO,
        0.95,
        "nanochat, its author on FP8: net slower",
        batch=16,
        seq=2048,
        plan={"dp": 1},
        known=False,
        note="by how much, depth and batch of the run",
    ),
    Case(
        "k or v of 70B at TP8, rowwise",
        "",
        META_H100,
        ROWWISE_AO,
        0.6,
        "torchtitan pull request 1319: 'about 40 % slower'",
        layer=(16 * 8192, 8192, 128),
        known=False,
        note="40 % of what",
    ),
    *(
        Case(
            f"5B layer, H200 NVL, {recipe.name}",
            "te_5b_layer",
            "H200 NVL",
            recipe,
            measured,
            "TransformerEngine, docs, speedups",
            batch=31,
            seq=512,
            plan={"compiled": False},
            note="products and casts alone",
        )
        for recipe, measured in ((CURRENT_TE, 1.57), (DELAYED_TE, 1.69), (BLOCK_TE, 1.41))
    ),
)
