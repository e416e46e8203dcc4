"""Published MFU figures that mislead, reproduced from their inputs and read again with every denominator named.

Each literal holds what was printed and what it was made of; `read_again` forms the printed figure anew, but for the one
whose inputs nobody published, and the columns of `harness.machine.mfu` beside it. They are tests of the rule, and a page of the report: what is wrong with a single number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.machine.hardware import named
from harness.machine.mfu import Utilization, utilization

if TYPE_CHECKING:
    from collections.abc import Mapping

# llm-foundry's MPT-3b: 32 blocks of width 2560; 6 N + 12 L d T FLOPs a token at T = 2048, N = 2,651,837,440.
_MPT_3B = 6 * 2_651_837_440 + 12 * 32 * 2560 * 2048
_MPT_3B_BLOCKS = (
    6 * 32 * 12 * 2560**2
)  # the block's Linear layers, which run in FP8; head and attention do not
_LLM_FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md, H100 80GB FP8 and BF16, 3b 2048"
# torchtitan's Llama 3 8B: 6 (parameters without the embedding) + 12 L d T FLOPs a token at T = 8192.
_LLAMA_8B = 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192
_LLAMA_8B_BLOCKS = 6 * 32 * 218_103_808  # without the head, which that configuration leaves in bf16


NOT_FORMED = "taken back, not formed"  # the inputs come from the printed figure


@dataclass(frozen=True, slots=True)
class Example:
    """A printed MFU and its inputs, of one GPU.

    Attributes:
        key: short name.
        printed: the figure as published, in percent.
        tflops: model TFLOP/s by dtype.
        taken_back: they are not published but the printed figure times what it was divided by: nothing is formed again.
        denominator_tflops: what was divided by.
        device: key of the peak table: where it ran.
        reads_as: what a reader takes from it.
        reason: why that is wrong.
        source, date: where it stands and when that was read.
        tokens_per_s: of one GPU; None where it is not published.
    """

    key: str
    printed: float
    tflops: Mapping[str, float]
    denominator_tflops: float
    device: str
    reads_as: str
    reason: str
    source: str
    date: str = "2026-11"
    tokens_per_s: float | None = field(default=None)
    taken_back: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """An example read again.

    Attributes:
        example: what was printed.
        reproduced: the printed figure formed from the inputs, in percent; None where these were taken back from it.
        columns: all figures with the right peaks.
        impossible: the printed figure is above 100 % of what it claims to be a share of.
    """

    example: Example
    reproduced: float | None
    columns: Utilization
    impossible: bool


def _tflops(tokens_per_s: float, per_token: float, blocks_in_fp8: float = 0.0) -> dict[str, float]:
    """1e12 FLOP/s by dtype."""
    fp8, rest = blocks_in_fp8 * tokens_per_s / 1e12, (per_token - blocks_in_fp8) * tokens_per_s / 1e12
    return {"fp8": fp8, "bf16": rest} if fp8 else {"bf16": rest}


EXAMPLES: tuple[Example, ...] = (
    Example(
        "152 %",
        152.0,
        {"bf16": 0.205 * 2300},
        312.0,
        "MI350X",
        "faster than the GPU can be",
        "an unknown device fell back to the peak of an A100, without a word",
        "pytorch/torchtitan pull request 4779: 20.5 % once the peak was known",
    ),
    Example(
        "563 %",
        563.0,
        {"bf16": 5.63 * 312},
        312.0,
        "MI355X",
        "faster than the GPU can be",
        "an unknown device fell back to the peak of an A100; the TFLOP/s were right. Neither these nor their dtype "
        "are said: taken back from the printed figure, all in bf16, which gives the highest share",
        "AMD-AGI/Primus pull request 772",
        taken_back=True,
    ),
    Example(
        "27.7 %",
        27.7,
        _tflops(30586, _MPT_3B, _MPT_3B_BLOCKS),
        1979.0,
        "H100 SXM",
        "slower than bf16, which prints 40.8 %",
        "all FLOPs are divided by the FP8 peak, though attention and head ran in bf16, and the peak is twice the one that "
        "the bf16 row is divided by; tokens/s say that it is faster",
        _LLM_FOUNDRY,
        tokens_per_s=30586,
    ),
    Example(
        "40.8 %",
        40.8,
        _tflops(22525, _MPT_3B),
        989.0,
        "H100 SXM",
        "the bf16 row beside 27.7 %, on 64 GPUs where that had 8",
        "right for bf16",
        _LLM_FOUNDRY,
        tokens_per_s=22525,
    ),
    Example(
        "42.08 %",
        42.08,
        _tflops(7186, _LLAMA_8B, _LLAMA_8B_BLOCKS),
        989.0,
        "H100 SXM",
        "42 % of what the GPU can do",
        "the FP8 run is divided by the bf16 peak: comparable with bf16 runs, no share of what FP8 could reach",
        "pytorch/torchtitan pull request 808, Llama 3 8B on 8 H100",
        tokens_per_s=7186,
    ),
)


def read_again(example: Example) -> Reading:
    """The printed figure from its inputs, and all columns with the right peaks."""
    flops = {dtype: rate * 1e12 for dtype, rate in example.tflops.items()}
    columns = utilization(flops, 1.0, named(example.device), tokens=example.tokens_per_s, recomputed={})
    formed = 100 * sum(example.tflops.values()) / example.denominator_tflops
    return Reading(example, None if example.taken_back else formed, columns, example.printed > 100)
