"""Job: one way to train one model on one GPU or on many. Plain data, checked. Every prediction of a step starts here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.advise.model import split
from harness.advise.plan import BYTES, CHECKPOINTING, UPDATE_BYTES, Plan
from harness.machine.communication import Group
from harness.store.errors import UsageError, unknown

if TYPE_CHECKING:
    from harness.advise.model import Model

MOST_GPUS = 2**16
# Up to so many parameters: GPUs that split a layer, stages. As torchtitan publishes Llama 3 (benchmarks/llama3_h100_202412):
# 8B by FSDP, 70B by FSDP and TP8, 405B by FSDP, TP8 and PP8.
_SIZES = ((30e9, 1, 1), (150e9, 8, 1), (float("inf"), 8, 8))
_MICROBATCHES = 4  # for each stage: from there on the bubble is small (GPipe, arXiv:1811.06965, section 2.3)
SCHEDULES = {"1f1b": 1, "interleaved": 2}  # parts of the model on a GPU


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A training run on `world` GPUs: FSDP2 over all that tensor and pipeline parallelism leave, or over one of `replicas` of them.

    GPUs are counted along tensor parallelism first, then along the shards of one copy of the weights, then along
    copies, then along the stages of a pipeline; `node` neighbours share NVLink.

    Attributes:
        model: what is trained; for `harness.advise.scale.held` a name of `harness.training.models.MODELS`.
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
            names = {"tp": self.tp, "replicas": self.replicas, **({"pp": self.pp} if self.pp > 1 else {})}
            raise UsageError(
                f"world={self.world} is no multiple of {' x '.join(names)} = {' x '.join(map(str, names.values()))}; "
                f"the nearest is {max(1, round(self.world / unit)) * unit}"
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
        same = [
            "compiled",
            "accumulation",
            "dp",
            "replicas",
            "tp",
            "pp",
            "virtual",
            "node",
            "gather_fp8",
            "reduce_each",
        ]
        plan = Plan(
            **{name: getattr(self, name) for name in same},
            again=CHECKPOINTING[self.checkpointing],
            tp_gather_fp8=self.gather_fp8 and self.tp > 1,
            update_bytes=UPDATE_BYTES[self.weights],
            gradient_bytes=float(BYTES[self.reduce]),
        )
        if self.tp == 1:
            return model, plan
        part, exchanges = split(model, self.tp)
        return part, replace(plan, exchanges=exchanges)


def layout(
    model: Model,
    gpus: int | None,
    dp: int | None,
    tp: int | None,
    pp: int | None,
    accumulation: int | None,
    schedule: str,
    node: int,
) -> tuple[dict[str, Any], str]:
    """How `gpus` GPUs are split, as fields of `ClusterJob`; and in one line what was not named and is taken, "" for nothing.

    None is what the question leaves open. Without `gpus` what is not named is 1. With it, layers and stages are split as
    torchtitan splits models of that size, as far as the GPUs reach and the layers divide, and the rest is data parallel.

    Raises:
        UsageError: a split that does not multiply to `gpus`; a schedule without a pipeline.
    """
    asked = {"tp": tp, "pp": pp, "dp": dp, "accumulation": accumulation}
    if gpus is None:
        tp, pp, dp = tp or 1, pp or 1, dp or 1
    else:
        _, most_tp, most_pp = next(size for size in _SIZES if model.parameters <= size[0])
        room = gpus // (dp or 1)
        if tp is None:
            most_tp = min(most_tp, node, max(1, room // (pp or 1)))
            tp = next(n for n in (8, 4, 2, 1) if n <= most_tp and room % n == 0 and _divides(model, n))
        if pp is None:
            most_pp = min(most_pp, max(1, room // tp), model.blocks or 1)
            stages = (n for n in (8, 4, 2, 1) if n <= most_pp and room % (tp * n) == 0)
            pp = max(1, room // tp) if dp else next(stages, 1)
        if (dp or gpus // (tp * pp)) * tp * pp != gpus:
            named = f"dp={dp}, tp={tp}, pp={pp}" if dp else f"tp={tp}, pp={pp}"
            raise UsageError(
                f"gpus={gpus} is not what {named} multiply to; leave one of them out, or take gpus={(dp or 1) * tp * pp}"
            )
        dp = gpus // (tp * pp)
    if pp == 1 and schedule != "1f1b":
        raise UsageError(f"schedule={schedule} is one of a pipeline; name its stages by pp=")
    if accumulation is None:
        accumulation = _MICROBATCHES * pp if pp > 1 else 1
    taken = {"tp": tp, "pp": pp, "dp": dp, **({"accumulation": accumulation} if pp > 1 else {})}
    left = [f"{name}={value}" for name, value in taken.items() if asked[name] is None]
    said = f"taken, since it was not named: {', '.join(left)}" if left and (gpus or pp > 1) else ""
    sizes = {"world": dp * tp * pp, "tp": tp, "pp": pp, "accumulation": accumulation}
    return {**sizes, "virtual": SCHEDULES[schedule]}, said


def _divides(model: Model, tp: int) -> bool:
    try:
        split(model, tp)
    except UsageError:
        return tp == 1
    return True
