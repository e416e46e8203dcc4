"""Published FP8 speedups with their conditions: what the prediction is held against. Plain data.

Nothing in the prediction is fitted to these. `known` is False where a condition that the prediction needs was not
published; then only the sign is held against it. Measured are ratios of tokens/s (FP8 over bf16) of whole training steps,
or of single layers (`layer`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.advise.casts import TENSORS, Cast, Recipe
from harness.advise.step import Again
from harness.ceilings import ROWWISE

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
    gathered_weight=Cast(0.6, 2),
    source=_TORCHAO,
)
# Along the tokens: a transposed copy in bfloat16 (4), then a cast (3), as torchao's own roofline charges the weight; the
# input's is made backward, from what was saved. An output gradient is transposed where it is made (5). Gradients' products
# are tensorwise ones, rescaled afterwards (torchao pull request 1325): 4 bytes of the weight's gradient, while the input's
# is rescaled where it is used.
ROWWISE_AO = Recipe(
    "rowwise",
    "compiler",
    {"input": Cast(3, 7, forward=3), "weight": Cast(7, 7, forward=3), "grad_output": Cast(3, 5)},
    kind=ROWWISE,
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
BLOCK_TE = Recipe(
    "block",
    "kernels",
    {tensor: Cast(4.1, kernels=1, forward=_FORWARD[tensor] * 3.1) for tensor in TENSORS},
    product_share=0.77,
    source="TransformerEngine: one read of a tile; product's share as in harness.advise.recipes",
)

# Every second product of a block is run again, attention is kept (torchtitan, selective activation checkpointing by op).
BY_OP = Again(products=0.5, between=1.0)
FULL = Again(1.0, 1.0, 1.0)
EVERY_SECOND = Again(0.5, 0.5, 0.5)

META_H100 = "H100 500 W, HBM2e"  # Meta's own, in which most published runs were made
_TITAN_TP = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06"
_AO_DOCS = "torchao docs, training workflow"


@dataclass(frozen=True, slots=True)
class Case:
    """One published ratio.

    Attributes:
        key: short name.
        model: a name of `harness.models.MODELS` or of `harness.advise.published.OTHER_MODELS`; "" for a single layer.
        machine: `META_H100`, or a key of the peak table.
        recipe: what ran.
        measured: FP8 over bf16.
        source: where it stands.
        batch, seq: of one GPU's forward pass, of a tensor-parallel group's.
        bf16: published tokens/s of a GPU in bf16; None where it is not.
        plan: arguments of `harness.advise.step.Plan`; "tp" is split off first.
        left_out: last words of names that stayed in bf16.
        layer: tokens, K and N of a single layer.
        known: all conditions that the prediction needs are published.
        note: what is not.
    """

    key: str
    model: str
    machine: str
    recipe: Recipe
    measured: float
    source: str
    batch: int = 1
    seq: int = 8192
    bf16: float | None = None
    plan: Mapping[str, object] = field(default_factory=dict)
    left_out: tuple[str, ...] = ("head",)
    layer: tuple[int, int, int] | None = None
    known: bool = True
    note: str = ""


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
        plan={"dp": 8},
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

# Looked at only when the prediction was done: another library, another model family, the same GPU at 700 W.
_LLM_FOUNDRY = "llm-foundry, scripts/train/benchmarking/README"
HELD_OUT: tuple[Case, ...] = tuple(
    Case(
        f"MPT {size}, length {seq}",
        f"mpt_{size}",
        "H100 SXM",
        DELAYED_TE,
        fp8 / bf16,
        _LLM_FOUNDRY,
        batch=batch,
        seq=seq,
        bf16=bf16,
        plan={"compiled": False, "dp": 8, "accumulation": accumulation, "again": again, "gather_fp8": False},
    )
    for size, seq, batch, accumulation, again, fp8, bf16 in (
        ("3b", 512, 40, 6, Again(), 36527, 27965),
        ("3b", 8192, 3, 6, Again(), 19146, 16578),
        ("3b", 32768, 3, 6, FULL, 5856, 5873),
        ("1b", 512, 56, 4, Again(), 70315, 52275),
        ("1b", 32768, 1, 4, Again(), 12580, 12025),
    )
)
