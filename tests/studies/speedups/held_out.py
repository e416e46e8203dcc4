"""Published FP8 speedups that were looked at only when the prediction was done. Plain data, as `speedups.cases`."""

from __future__ import annotations

from dataclasses import replace

from harness.advise.step import Again
from speedups.case import FULL, META_H100, Case
from speedups.libraries import DELAYED_TE, ROWWISE_AO, TENSORWISE_AO

# Another library, another model family, the same GPU at 700 W.
_LLM_FOUNDRY = "llm-foundry, scripts/train/benchmarking/README"
_FOUNDRY = tuple(
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
        plan={
            "compiled": False,
            "dp": 8,
            "accumulation": accumulation,
            "again": again,
            "gather_fp8": False,
            "copied": False,
        },
    )
    for size, seq, batch, accumulation, again, fp8, bf16 in (
        ("3b", 512, 40, 6, Again(), 36527, 27965),
        ("3b", 8192, 3, 6, Again(), 19146, 16578),
        ("3b", 32768, 3, 6, FULL, 5856, 5873),
        ("1b", 512, 56, 4, Again(), 70315, 52275),
        ("1b", 32768, 1, 4, Again(), 12580, 12025),
    )
)

# The same model and GPUs as in `speedups.cases`, three months and many commits earlier.
_ISSUE = "pytorch issue 149990, 2025-03"
_TP = {"dp": 16, "tp": 8, "again": FULL, "gather_fp8": False}
_MARCH = tuple(
    Case(
        f"70B, 128 H100, TP8{words}, {recipe.name}",
        "llama3_70b",
        META_H100,
        recipe,
        fp8 / bf16,
        _ISSUE,
        batch=16,
        bf16=bf16,
        plan=_TP | more,
        known=False,
        note="batch",
    )
    for words, recipe, fp8, bf16, more in (
        ("", TENSORWISE_AO, 820, 598, {"tp_gather_fp8": True}),
        (" async", TENSORWISE_AO, 950, 673, {"tp_gather_fp8": True, "tp_overlap": True}),
        ("", replace(ROWWISE_AO, shares_input=False), 540, 598, {}),
    )
)

HELD_OUT: tuple[Case, ...] = (*_FOUNDRY, *_MARCH)
