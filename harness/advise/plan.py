"""Plan: how a model is trained: what is run twice, how many GPUs share it and how, what goes around in FP8. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.advise.model import Exchange


GIB = 2**30
# The step may take so much more than predicted: the largest shortfall among the published figures of
# docs/advise-accuracy.md, which a test recomputes. Up to there it is "tight".
MARGIN = 1.17
FITS, TIGHT, TOO_LARGE, UNKNOWN = "fits", "tight", "does not fit", "not predicted"


@dataclass(frozen=True, slots=True)
class Memory:
    """What a step takes.

    Attributes:
        bf16, fp8: bytes by part; `fp8` is None where nothing is converted.
        device: bytes of the GPU.
        whole: every part is predicted; False: a lower bound.
        ways: changes of the question, each of which makes it fit by the model, with the bytes that it then takes.
        unknown: whose activations are not predicted, where `whole` is False.
    """

    bf16: Mapping[str, int]
    fp8: Mapping[str, int] | None
    device: int
    whole: bool
    ways: Mapping[str, int]
    unknown: str = "this model"

    @property
    def needed(self) -> int:
        """Bytes of the step that is advised."""
        return sum((self.bf16 if self.fp8 is None else self.fp8).values())

    @property
    def word(self) -> str:
        """ "fits", "tight", "does not fit", or "not predicted" where a lower bound leaves room."""
        if self.needed > self.device:
            return TOO_LARGE
        if not self.whole:
            return UNKNOWN
        return FITS if self.needed * MARGIN <= self.device else TIGHT


BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}  # of an element
# Bytes that the update of a parameter moves, by the masters' dtype. float32: AdamW reads 16 and writes 12, clipping reads 4,
# reads 4 and writes 4
UPDATE_BYTES: Mapping[str, float] = {"fp32": 40.0, "bf16": 20.0}


@dataclass(frozen=True, slots=True)
class Recompute:
    """What activation checkpointing runs a second time: shares of the forward pass."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0


CHECKPOINTING: Mapping[str, Recompute] = {
    "none": Recompute(),
    "selective": Recompute(elementwise=1.0),
    "full": Recompute(1.0, 1.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How the model is trained.

    Attributes:
        compiled: by torch.compile.
        again: what is run twice.
        accumulation: microbatches of an optimizer step, also those of a pipeline.
        dp: GPUs that have each their own data; 1: one alone.
        replicas: copies of the weights, each over `dp / replicas` GPUs (HSDP); 1: FSDP shards over all.
        tp: GPUs that share each layer; the model given to `step_cost` is then one GPU's part
            (`harness.advise.model.split`), and `exchanges` what it sends.
        pp: stages of a pipeline, each on GPUs of its own (`harness.advise.model.slowest_stage`).
        virtual: parts of the model that a GPU of a pipeline holds: 1 is the schedule 1F1B, more are interleaved.
        exchanges: activations that tensor parallelism gathers and scatters in one pass.
        node: GPUs of a node.
        gather_fp8: FSDP gathers weights in FP8 where the recipe can.
        copied: FSDP2, which copies what it gathers and reduces; FSDP1 works in place.
        reduce_each: gradients are reduced after every microbatch, and not only after the last.
        tp_gather_fp8: tensor parallelism gathers activations in FP8.
        tp_overlap: each of its exchanges runs beside the products that it belongs to (asynchronous tensor parallelism).
        update_bytes: of weights, gradients and optimizer states that an update moves, for a parameter.
        gradient_bytes: of a gradient that is reduced.
        bf16_step_s: seconds of a bf16 step, measured: what the parts leave unexplained is kept in FP8 too. None: nothing
            is known.
    """

    compiled: bool = True
    again: Recompute = Recompute()
    accumulation: int = 1
    dp: int = 1
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    exchanges: tuple[Exchange, ...] = ()
    node: int = 8
    gather_fp8: bool = True
    copied: bool = True
    reduce_each: bool = False
    tp_gather_fp8: bool = False
    tp_overlap: bool = False
    update_bytes: float = UPDATE_BYTES["fp32"]
    gradient_bytes: float = float(BYTES["fp32"])
    bf16_step_s: float | None = None

    @property
    def shards(self) -> int:
        """GPUs over which one copy of a weight lies."""
        return self.dp // self.replicas
