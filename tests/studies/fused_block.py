"""Predicted speedup of one eager Llama-3-8B block with fp8core's fused norm and SwiGLU, by recipe.

    python tests/studies/fused_block.py [gpu]

A prediction from the rates of the peak table, never measured here. Products and casts are those of `harness.advise.step`;
the casts know which producer leaves an amax or codes behind. "Before": producers serve their forward pass alone, as in the
last release. "After": SwiGLU's and the added norm's backward passes hand on their amaxes, the addition behind attention is in
the norm's kernel, and delayed codes leave the norms directly.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.advise.gemm import BF16, product_seconds
from harness.advise.model import Linear
from harness.advise.rates import rates_of
from harness.advise.recipes import candidates
from harness.advise.step import gemm_sizes
from harness.machine.hardware import named

if TYPE_CHECKING:
    from harness.advise.casts import RecipeCost
    from harness.advise.rates import Rates

TOKENS, WIDTH, KV, FFN = 16384, 4096, 1024, 14336
SEQUENCE = 4096
BETWEEN_S = 4.1e-3  # norms, additions, rotations and SwiGLU of the bf16 block, eager: estimate for an H200
RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
_LAYERS = {  # K, N, and who reads the same input
    "q": (WIDTH, WIDTH, "attention_norm"),
    "k": (WIDTH, KV, "attention_norm"),
    "v": (WIDTH, KV, "attention_norm"),
    "o": (WIDTH, WIDTH, "attention"),
    "gate": (WIDTH, FFN, "ffn_norm"),
    "up": (WIDTH, FFN, "ffn_norm"),
    "down": (FFN, WIDTH, "swiglu"),
}
_AMAX = 2.0  # bytes of a pass that finds one
_PRODUCERS = ("attention_norm", "ffn_norm", "swiglu")  # of an input, that leave an amax behind
_BACKWARD = (
    "gate",
    "up",
    "o",
)  # whose output's gradient comes from a backward pass that leaves an amax behind
# Bytes for an element of the residual stream that the addition in the norm's kernel saves in every arm: 6 + 4 become 8
# forward, 6 + 6 become 8 backward (`fp8core.kernels.traffic`)
_ADDITION = 6.0
# What codes from the norm's own kernel save under delayed scaling, per element: 4 + 4 become 6, and 8 + 4 become 10
_CODES = 2.0 + 2.0
# SwiGLU's codes, which the last release had: 6 + 4 become 6
_SWIGLU_CODES = 4.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """bf16 over FP8, before and after."""

    recipe: str
    before: float
    after: float


def predictions(rates: Rates) -> list[Prediction]:
    """One for each recipe."""
    table = candidates(compiled=False)
    found = []
    for name in RECIPES:
        ratios = [seconds(rates, None, after) / seconds(rates, table[name], after) for after in (False, True)]
        found.append(Prediction(name, *ratios))
    return found


def seconds(rates: Rates, recipe: RecipeCost | None, after: bool) -> float:
    """Forward and backward pass of the block; recipe None: in bf16."""
    linear, moved, read = 0.0, 0.0, set()
    for name, (K, N, producer) in _LAYERS.items():
        for role, size in gemm_sizes(Linear(name, K, N, TOKENS, 0)).items():
            fp8 = recipe is not None and role in recipe.fp8_gemms
            once = product_seconds(rates, recipe.kind if recipe is not None and fp8 else BF16, role, *size)
            linear += once / (recipe.product_share if recipe is not None and fp8 else 1.0)
        if recipe is None:
            continue
        dynamic = recipe.name == "tensorwise"
        if producer not in read:
            read.add(producer)
            moved += TOKENS * K * (recipe.casts["input"].total - _AMAX * (dynamic and producer in _PRODUCERS))
        moved += K * N * recipe.casts["weight"].total
        moved += (
            TOKENS
            * N
            * (recipe.casts["grad_output"].total - _AMAX * (dynamic and after and name in _BACKWARD))
        )
    if recipe is not None and recipe.name == "delayed":
        moved -= TOKENS * FFN * _SWIGLU_CODES + after * TOKENS * WIDTH * _CODES
    casts = moved / (rates["bandwidth"] * rates["casts"])
    between = BETWEEN_S - after * _ADDITION * TOKENS * WIDTH / rates["bandwidth"]
    causal = 2.0 * TOKENS * SEQUENCE * WIDTH  # two products of T x T / 2
    return linear + casts + between + 3 * causal / rates["attention"]


def cautious_rates(rates: Rates) -> Rates:
    """780 and 1300 TFLOP/s for long products, 4.0 TB/s: what an H200 is expected to sustain, not its best published run."""
    figures = dict(rates.figures)
    for name, value in (("bf16", 780e12), ("fp8", 1300e12), ("bandwidth", 4.0e12)):
        figures[name] = replace(figures[name], value=value, source="round numbers for one H200 under load")
    return replace(rates, figures=figures)


def main(words: list[str]) -> int:
    """Prints the table for a GPU of the peak table, by default an H200."""
    device = named(words[0] if words else "h200")
    rates = rates_of(device)
    lines = [f"{device.key}, one Llama-3-8B block, {TOKENS} tokens, eager, predicted", ""]
    lines += [
        "| recipe | before | after | before, cautious rates | after, cautious rates |",
        "| --- |" + " ---: |" * 4,
    ]
    for table, cautious in zip(predictions(rates), predictions(cautious_rates(rates)), strict=True):
        ratios = (table.before, table.after, cautious.before, cautious.after)
        lines.append(f"| {table.recipe} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
