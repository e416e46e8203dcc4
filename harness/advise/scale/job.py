"""Job: one way to train one model on one GPU or on many. Plain data, checked. Every prediction of a step starts here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.advise.plan import BYTES, CHECKPOINTING, UPDATE_BYTES, Plan
from harness.advise.tensor_parallel import split
from harness.machine.communication import Group
from harness.store.errors import UsageError, unknown

if TYPE_CHECKING:
    from harness.advise.model import Model

MOST_GPUS = 2**16


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A training run on `world` GPUs: FSDP2 over all that tensor and pipeline parallelism leave, or over one of `replicas` of them.

    GPUs are counted along tensor parallelism first, then along the shards of one copy of the weights, then along
    copies, then along the stages of a pipeline; `node` neighbours share NVLink.

    Attributes:
        model: what is trained; for `harness.advise.scale.predict` a name of `harness.training.models.MODELS`.
        gpu: a GPU of the peak table.
        world: GPUs.
        batch, seq: sequences of one forward pass of one data-parallel GPU (with `tp`: of the group), tokens of each.
        accumulation: forward passes of a step; microbatches of a pipeline.
        checkpointing: of activations: "none", "selective" or "full".
        tp: GPUs that split each layer.
        pp: stages of a pipeline.
        virtual: parts of the model that each stage's GPUs hold: 1 for the schedule 1F1B, more for the interleaved one.
        replicas: copies of the weights (HSDP); 1: FSDP over everything.
        node: GPUs of a node.
        recipe: of the Linear layers; "" for bf16.
        gather_fp8: the weights and inputs that the recipe can send in FP8 go around in FP8.
        reduce_each: gradients are reduced after every microbatch; else they are kept whole until the last.
        weights: "fp32" or "bf16" masters, gradients and optimizer states; products run in bf16 either way.
        reduce: "fp32" or "bf16", in which gradients are reduced, and wait to be.
        compiled: by torch.compile.
        left_out: last words of the names of layers that stay in bf16; of what is gathered and held alone.
        loss: how it is computed, a key of `harness.advise.scale.held.LOSS_COPIES`; of its memory alone.
        unsplit_vocabulary: tensor parallelism splits neither the embedding nor the logits; of their memory alone.
    """

    model: str
    gpu: str
    world: int
    batch: int
    seq: int
    accumulation: int = 1
    checkpointing: str = "full"
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    replicas: int = 1
    node: int = 8
    recipe: str = ""
    gather_fp8: bool = True
    reduce_each: bool = False
    weights: str = "fp32"
    reduce: str = "fp32"
    compiled: bool = True
    left_out: tuple[str, ...] = ()
    loss: str = "fused"
    unsplit_vocabulary: bool = False

    def __post_init__(self) -> None:
        for name in ("world", "batch", "seq", "accumulation", "tp", "pp", "virtual", "replicas", "node"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: expected an integer of at least 1")
        for name in ("weights", "reduce"):
            if getattr(self, name) not in BYTES:
                raise unknown(name, getattr(self, name), BYTES)
        if self.world > MOST_GPUS:
            raise UsageError(f"world={self.world}: expected at most {MOST_GPUS}")
        unit = self.tp * self.pp * self.replicas
        if self.world % unit:
            stages = (
                f" x pp = {self.tp} x {self.replicas} x {self.pp}"
                if self.pp > 1
                else f" = {self.tp} x {self.replicas}"
            )
            raise UsageError(
                f"world={self.world} is no multiple of tp x replicas{stages}; the nearest is "
                f"{max(1, round(self.world / unit)) * unit}"
            )
        if self.pp == 1 and self.virtual > 1:
            raise UsageError("the interleaved schedule is one of a pipeline; name its stages by pp=")
        if self.tp > 1 and self.node % self.tp:
            raise UsageError(
                f"tp={self.tp} does not divide the {self.node} GPUs of a node; layers are split within a node"
            )

    @property
    def dp(self) -> int:
        """GPUs, or tensor-parallel groups, that have each their own data."""
        return self.world // (self.tp * self.pp)

    @property
    def shard(self) -> int:
        """GPUs over which one parameter of one copy is sharded."""
        return self.dp // self.replicas

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass of one data-parallel GPU."""
        return self.batch * self.seq

    @property
    def groups(self) -> dict[str, Group]:
        """The groups that collectives run in, by name."""
        return {
            "tp": Group.of(self.tp, 1, self.node),
            "shard": Group.of(self.shard, self.tp, self.node),
            "replicas": Group.of(self.replicas, self.tp * self.shard, self.node),
        }

    def on_a_gpu(self, model: Model) -> tuple[Model, Plan]:
        """One GPU's part of a model (but for the stage of a pipeline, which the step takes), and how it is trained.

        Args:
            model: all of it, with the tokens of one forward pass.

        Raises:
            UsageError: layers that `tp` does not divide, or whose split is not known.
        """
        plan = Plan(
            compiled=self.compiled,
            again=CHECKPOINTING[self.checkpointing],
            accumulation=self.accumulation,
            dp=self.dp,
            replicas=self.replicas,
            tp=self.tp,
            pp=self.pp,
            virtual=self.virtual,
            node=self.node,
            gather_fp8=self.gather_fp8,
            tp_gather_fp8=self.gather_fp8 and self.tp > 1,
            reduce_each=self.reduce_each,
            update_bytes=UPDATE_BYTES[self.weights],
            gradient_bytes=float(BYTES[self.reduce]),
        )
        if self.tp == 1:
            return model, plan
        part, exchanges = split(model, self.tp)
        return part, replace(plan, exchanges=exchanges)
