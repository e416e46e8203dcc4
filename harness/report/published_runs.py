"""Published training runs with their tokens/s, all measured by others, and the MFU that follows from them.

`published_runs.csv` holds one figure a line: conditions, tokens/s of one GPU, and the MFU that its authors printed.
FLOPs a token are counted from the sizes of the model, matrix products alone: 6 for each weight of a Linear layer (the head
among them, the embedding not) and 12 L Q T for attention (PaLM, arXiv:2204.02311, appendix B), of which the causal count
keeps half. In an FP8 run the Linear layers of the blocks run in FP8, head and attention in bf16.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from harness.machine.hardware import named
from harness.machine.mfu import Utilization, utilization

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.machine.hardware import Device

DATA = Path(__file__).with_name("published_runs.csv")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        layers, width, ffn, vocab: as published.
        kv: features of keys, and of values.
        gated: three matrices in the feed-forward part (SwiGLU), else two.
        positions: a learned embedding as long as the sequence, and head and embedding are one matrix.
        vectors: elements of norms and biases: of a block, of the rest.
    """

    layers: int
    width: int
    kv: int
    ffn: int
    vocab: int
    gated: bool = True
    positions: bool = False
    vectors: tuple[int, int] = (0, 0)

    @property
    def blocks(self) -> int:
        """Weights of the Linear layers of all blocks."""
        attention = 2 * self.width * (self.width + self.kv)
        return self.layers * (attention + (3 if self.gated else 2) * self.width * self.ffn)

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.width * self.vocab

    def parameters(self, seq: int) -> int:
        """All parameters, embeddings, norms and biases included; `seq` counts where positions are learned."""
        embeddings = self.width * seq if self.positions else self.head
        return self.blocks + self.head + embeddings + self.layers * self.vectors[0] + self.vectors[1]

    def attention(self, seq: int) -> float:
        """FLOPs a token, forward and backward, of the whole T x T."""
        return 12.0 * self.layers * self.width * seq


def _llama(layers: int, width: int, ffn: int) -> Shape:
    return Shape(layers, width, 1024, ffn, 128256, vectors=(2 * width, width))


def _mpt(layers: int, width: int) -> Shape:
    return Shape(
        layers, width, width, 4 * width, 50368, gated=False, positions=True, vectors=(13 * width, 2 * width)
    )


# Sizes: arXiv:2407.21783 table 3; KempnerForge, benchmarks/weak_scaling_160gpu; llm-foundry, scripts/train/yamls.
SHAPES: Mapping[str, Shape] = {
    "llama_7b": _llama(32, 4096, 14336),  # KempnerForge's 7B has the sizes of Llama 3 8B
    "llama3_8b": _llama(32, 4096, 14336),
    "llama_13b": _llama(40, 5120, 17920),
    "llama3_70b": _llama(80, 8192, 28672),
    "llama3_405b": _llama(126, 16384, 53248),
    "mpt_1b": _mpt(24, 2048),
    "mpt_3b": _mpt(32, 2560),
}

# Machine of the data -> key of the peak table, and what a reader of its shares must know.
MACHINES: Mapping[str, tuple[str, str]] = {
    "H100 500 W": (
        "H100 SXM",
        "Meta's H100 with 96 GB of HBM2e, limited to 500 W. Its own peak is not published. Its authors divide by that "
        "of the 700 W part, as here, so its shares are lower bounds",
    ),
    "H100 SXM": ("H100 SXM", ""),
    "H100 of unknown power": ("H100 SXM", "the power limit is not published"),
    "H200 SXM": ("H200 SXM", ""),
    "MI300X": ("MI300X", ""),
    "B200": ("B200", "its authors call it limited in power, without a figure"),
}

# Share of the blocks' forward pass that is run again: of its products, of attention; None: not published.
AGAIN: Mapping[str, tuple[float, float] | None] = {
    "nothing": (0.0, 0.0),
    "by operator": (0.5, 0.0),  # torchtitan: every second product, attention is kept
    "every second block": (0.5, 0.5),
    "blocks": (1.0, 1.0),
    "not published": None,
}

BLOCK_FP8: Mapping[str, float] = {  # share of the blocks' products that run in FP8, by recipe
    "bf16": 0.0,
    "tensorwise": 1.0,
    "rowwise": 1.0,
    "delayed": 1.0,
    "mxfp8": 1.0,
    "rowwise_with_gw_hp": 2 / 3,  # the weight's gradient stays in bf16
}


@dataclass(frozen=True, slots=True)
class Count:
    """How authors form the MFU that they print: 6 N + 12 L Q T over a peak.

    Attributes:
        everything: N holds the embeddings, norms and biases too.
        own_dtype: an FP8 run is divided by the FP8 peak; else by the bf16 peak.
        words: the same for a reader.
        source: where it stands.
    """

    everything: bool
    own_dtype: bool
    words: str
    source: str


COUNTS: Mapping[str, Count] = {
    "titan": Count(
        False,
        False,
        "without the embedding, over the bf16 peak",
        "pytorch/torchtitan, torchtitan/components/metrics.py",
    ),
    "foundry": Count(
        True,
        True,
        "with embeddings, over the peak of the run's dtype",
        "mosaicml/llm-foundry, scripts/train/benchmarking/README.md",
    ),
    "kempner_april": Count(
        True,
        False,
        "with the embedding, over the bf16 peak",
        "inferred: no page says it, all 14 figures of April agree with it and none without the embedding",
    ),
    "kempner_june": Count(
        False,
        False,
        "without the embedding, over the bf16 peak",
        "KempnerInstitute/KempnerForge, kempnerforge/metrics/mfu.py",
    ),
}


@dataclass(frozen=True, slots=True)
class Printed:
    """An MFU that the authors printed, in percent; a range has two ends. `digits` after the point."""

    low: float
    high: float
    digits: int
    count: Count

    @property
    def text(self) -> str:
        """The figure with its digits, "33 to 39 %" for a range."""
        ends = dict.fromkeys((f"{self.low:.{self.digits}f}", f"{self.high:.{self.digits}f}"))
        return " to ".join(ends) + " %"


@dataclass(frozen=True, slots=True)
class Run:
    """One published figure.

    Attributes:
        name: model, GPUs and arm.
        model: a key of `SHAPES`.
        machine: a key of `MACHINES`.
        gpus: how many; None where it is not known.
        seq: tokens of a sequence.
        precision: a key of `BLOCK_FP8`.
        recomputed: a key of `AGAIN`.
        tokens_per_s: of one GPU.
        printed: the MFU that its authors printed; None where they printed none.
        source: where tokens/s and MFU stand, and so who measured it.
    """

    name: str
    model: str
    machine: str
    gpus: int | None
    seq: int
    precision: str
    recomputed: str
    tokens_per_s: float
    printed: Printed | None
    source: str

    @property
    def device(self) -> Device:
        """The entry of the peak table that its shares are divided by."""
        return named(MACHINES[self.machine][0])

    @property
    def is_fp8(self) -> bool:
        """Whether its blocks run in FP8."""
        return self.precision != "bf16"

    @property
    def publisher(self) -> str:
        """Who measured it: the first word of the source's name."""
        return (
            self.source.partition(",")[0].split(" ")[0] if not self.source.startswith("IBM") else "IBM, Meta"
        )

    def flops(self, formula: str) -> dict[str, float]:
        """FLOPs a token by dtype, "palm" or "causal"."""
        shape = SHAPES[self.model]
        fp8 = 6.0 * shape.blocks * BLOCK_FP8[self.precision]
        attention = shape.attention(self.seq) * (0.5 if formula == "causal" else 1.0)
        return {"fp8": fp8, "bf16": 6.0 * (shape.blocks + shape.head) - fp8 + attention}

    def recomputed_flops(self, formula: str) -> dict[str, float] | None:
        """FLOPs a token that checkpointing runs again, by dtype; None where it is not published."""
        again = AGAIN[self.recomputed]
        if again is None:
            return None
        shape = SHAPES[self.model]
        products = 2.0 * shape.blocks * again[0]
        attention = shape.attention(self.seq) / 3 * (0.5 if formula == "causal" else 1.0) * again[1]
        # The forward product of every recipe here runs in FP8, the weight's gradient is never run again.
        return {"fp8": products, "bf16": attention} if self.is_fp8 else {"bf16": products + attention}

    def utilization(self, formula: str) -> Utilization:
        """The columns of `harness.machine.mfu`, "palm" or "causal"."""
        return utilization(
            self.flops(formula),
            1 / self.tokens_per_s,
            self.device,
            formula=formula,
            tokens=1,
            recomputed=self.recomputed_flops(formula),
        )

    def by_their_count(self) -> float | None:
        """The printed MFU formed again from tokens/s by its authors' own count, in percent; None without one."""
        if self.printed is None:
            return None
        count, shape = self.printed.count, SHAPES[self.model]
        weights = shape.parameters(self.seq) if count.everything else shape.blocks + shape.head
        per_token = 6.0 * weights + shape.attention(self.seq)
        peak = self.device.tflops["fp8" if count.own_dtype and self.is_fp8 else "bf16"]
        return 100 * per_token * self.tokens_per_s / (peak * 1e12)

    def off_by(self) -> float | None:
        """Points by which the printed MFU and tokens/s disagree beyond rounding; 0.0 where they agree."""
        formed = self.by_their_count()
        if self.printed is None or formed is None:
            return None
        # Half a unit of the last digit; 0.1 % for tokens/s that are rounded and peaks of 989 and 989.4.
        slack = 0.5 * 10.0**-self.printed.digits + 0.001 * formed
        if self.printed.low - slack <= formed <= self.printed.high + slack:
            return 0.0
        nearest = min((self.printed.low, self.printed.high), key=lambda end: abs(end - formed))
        return formed - nearest


@cache
def runs() -> tuple[Run, ...]:
    """All figures of `published_runs.csv`, in its order."""
    with DATA.open(encoding="utf-8", newline="") as file:
        return tuple(_run(row) for row in csv.DictReader(file))


def _run(row: Mapping[str, str]) -> Run:
    return Run(
        row["run"],
        row["model"],
        row["machine"],
        int(row["gpus"]) if row["gpus"] else None,
        int(row["seq"]),
        row["precision"],
        row["recomputed"],
        float(row["tokens_per_s"]),
        _printed(row["printed_percent"], row["printed_count"]),
        row["source"],
    )


def _printed(percent: str, count: str) -> Printed | None:
    if not percent:
        return None
    low, _, high = percent.partition(" to ")
    return Printed(float(low), float(high or low), len(low.partition(".")[2]), COUNTS[count])
