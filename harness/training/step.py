"""Step: one description of an optimizer step: of what model, in what precision, on how many GPUs. Plain data, checked; no torch.

The advice predicts time and memory from it; `harness.training.setup.Setup` adds what a step that is really run needs besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.machine.communication import GpuGroup
from harness.store.errors import UsageError, unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPUTE = ("fp32", "bf16_autocast", "bf16")
CHECKPOINTING = ("none", "selective", "full")
BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}  # of an element
# Bytes that the update of a parameter moves, by the masters' dtype. float32: AdamW reads 16 and writes 12, clipping reads 4,
# reads 4 and writes 4
_UPDATE_BYTES: Mapping[str, float] = {"fp32": 40.0, "bf16": 20.0}
_COUNTS = ("batch", "seq", "accumulation", "dp", "replicas", "tp", "pp", "virtual", "node")


@dataclass(frozen=True, slots=True)
class Recompute:
    """What activation checkpointing runs a second time: shares of the forward pass."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0


# Also those of others: every second product, with what is elementwise (torchtitan, by operator), and every second block
_AGAIN: Mapping[str, Recompute] = {
    "none": Recompute(),
    "selective": Recompute(elementwise=1.0),
    "full": Recompute(1.0, 1.0, 1.0),
    "by_op": Recompute(matmul=0.5, elementwise=1.0),
    "every_second": Recompute(0.5, 0.5, 0.5),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: FSDP2 over all GPUs that tensor and pipeline parallelism leave, or over one of `replicas` of them.

    GPUs are counted along tensor parallelism first, then along the shards of one copy of the weights, then along
    copies, then along the stages of a pipeline; `node` neighbours share NVLink.

    Attributes:
        model: what is trained: a name of `harness.training.models.MODELS`, or a user's model as JSON.
        batch: sequences of one forward pass of one data-parallel GPU (with `tp`: of the group).
        seq: tokens of a sequence.
        compute: one of `COMPUTE`, see `harness.training.setup`.
        checkpointing: activations that are recomputed: one of `CHECKPOINTING`, or another that is predicted.
        accumulation: microbatches of a step, also those of a pipeline. A step sees `batch * accumulation` sequences.
        compiled: the forward pass, and with it the backward pass, under torch.compile as one graph.
        dp: GPUs, or tensor-parallel groups, that have each their own data; 1: one alone.
        replicas: copies of the weights, each over `dp / replicas` GPUs (HSDP); 1: FSDP shards over all.
        tp: GPUs that share each layer (`harness.advise.model.split`).
        pp: stages of a pipeline, each on GPUs of its own (`harness.advise.model.slowest_stage`).
        virtual: parts of the model that a GPU of a pipeline holds: 1 is the schedule 1F1B, more are interleaved.
        node: GPUs of a node.
        gather_fp8: FSDP gathers weights in FP8 where the recipe can.
        copied: FSDP2, which copies what it gathers and reduces; FSDP1 works in place.
        reduce: "fp32" or "bf16", in which gradients are reduced, and wait to be; "": as the masters.
        reduce_each: gradients are reduced after every microbatch; else they are kept whole until the last.
        tp_gather_fp8: tensor parallelism gathers activations in FP8.
        tp_overlap: each of its exchanges runs beside the products that it belongs to (asynchronous tensor parallelism).
        loss: how it is computed, a key of `harness.advise.scale.held.LOSS_COPIES`; of its memory alone.
        unsplit_vocabulary: tensor parallelism splits neither the embedding nor the logits; of their memory alone.
        bf16_step_s: seconds of a bf16 step, measured: what the parts leave unexplained is kept in FP8 too. None: nothing
            is known.

    Raises:
        UsageError: a count below 1, an unknown dtype, GPUs that cannot be divided so.
    """

    model: str = ""
    batch: int = 1
    seq: int = 1
    compute: str = "bf16_autocast"
    checkpointing: str = "none"
    accumulation: int = 1
    compiled: bool = False
    dp: int = 1
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    node: int = 8
    gather_fp8: bool = True
    copied: bool = True
    reduce: str = ""
    reduce_each: bool = False
    tp_gather_fp8: bool = False
    tp_overlap: bool = False
    loss: str = "fused"
    unsplit_vocabulary: bool = False
    bf16_step_s: float | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: expected an integer of at least 1")
        for name, known in (("compute", COMPUTE), ("reduce", ("", *BYTES)), ("checkpointing", _AGAIN)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        if self.dp % self.replicas:
            near = max(1, round(self.dp / self.replicas)) * self.replicas
            raise UsageError(
                f"dp={self.dp} is no multiple of replicas={self.replicas}; the nearest is {near}"
            )
        if self.pp == 1 and self.virtual > 1:
            raise UsageError("the interleaved schedule is one of a pipeline; name its stages by pp=")
        if self.tp > 1 and self.node % self.tp:
            raise UsageError(
                f"tp={self.tp} does not divide the {self.node} GPUs of a node; layers are split within a node"
            )

    @property
    def world(self) -> int:
        """All GPUs."""
        return self.dp * self.tp * self.pp

    @property
    def shards(self) -> int:
        """GPUs over which one copy of a weight lies."""
        return self.dp // self.replicas

    @property
    def weights(self) -> str:
        """Dtype of masters, gradients and optimizer states."""
        return "bf16" if self.compute == "bf16" else "fp32"

    @property
    def again(self) -> Recompute:
        """What is run twice."""
        return _AGAIN[self.checkpointing]

    @property
    def update_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer states that an update moves, for a parameter."""
        return _UPDATE_BYTES[self.weights]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient that is reduced."""
        return BYTES[self.reduce or self.weights]

    @property
    def groups(self) -> dict[str, GpuGroup]:
        """The groups that collectives run in, by name."""
        return {
            "tp": GpuGroup.of(self.tp, 1, self.node),
            "shard": GpuGroup.of(self.shards, self.tp, self.node),
            "replicas": GpuGroup.of(self.replicas, self.tp * self.shards, self.node),
        }
