"""What a job is predicted to send, hold and take: bytes by collective, memory of a rank, time of a step and its MFU.

Bytes come from shapes (`harness.advise.scale.counts`). Memory: weights, gradients and optimizer states are the rank's shards;
activations are those of `harness.training.models.memory` for one block and for two, of which each further block adds the
difference; FSDP adds what it holds whole. Time is the prediction of `harness.advise`: compute by the rates of the GPU
(measured ones where runs are named, else published ones), communication by `harness.machine.communication`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fp8core.recipe import RECIPES
from harness.advise.decide import able
from harness.advise.plan import BYTES
from harness.advise.recipes import candidates
from harness.advise.scale.counts import (
    BF16,
    Collective,
    Weight,
    exchanging,
    gathered_bytes,
    reduced_bytes,
    sharding,
)
from harness.advise.scale.weights import weights_of
from harness.advise.step import Parts, speedup, step_cost
from harness.advise.training import traced
from harness.machine.hardware import named
from harness.machine.mfu import Utilization, utilization
from harness.store.errors import UsageError, unknown
from harness.training import on_paper
from harness.training.models import MODELS, ModelSpec
from harness.training.models.llama_moe import MoeConfig
from harness.training.setup import Setup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.advise.casts import Recipe
    from harness.advise.model import Model
    from harness.advise.plan import Plan
    from harness.advise.rates import Rates
    from harness.advise.scale.job import Job
    from harness.advise.step import Ratio

MEMORY = ("weights", "gradients", "optimizer", "gathered", "reduced", "activations", "logits", "workspace")
_FILLED = 2  # blocks whose weights and gradients are whole at once: the one at work and the one under way
_ADAMW_STATES = 2


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction for one job.

    Attributes:
        job: which.
        collectives: of one optimizer step of one rank.
        memory: bytes by `MEMORY`.
        parts: seconds of a step.
        use: tokens/s of a GPU and the MFU columns.
        flops: of a step of a rank by dtype, nothing recomputed.
        speedup: over the same step in bf16, with its interval; None for bf16.
    """

    job: Job
    collectives: tuple[Collective, ...]
    memory: Mapping[str, int]
    parts: Parts
    use: Utilization
    flops: Mapping[str, float]
    speedup: Ratio | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of one GPU."""
        return tokens_per_s(self.job, self.parts)


def predict(job: Job, rates: Rates) -> Prediction:
    """All of it.

    Raises:
        UsageError: an unknown model, GPU or recipe, a length that the model has not, layers that `tp` does not divide.
    """
    check(job)
    weights = weights_of(job.model, job.recipe, job.tp)
    _, plan = part_of(job)
    collectives = (*sharding(weights, job), *exchanging(plan.exchanges, weights.blocks, job))
    parts = step_parts(job, rates)
    # Of the whole group's tokens, each rank works on its part
    setup = _setup(job)
    flops = {dtype: amount / job.tp for dtype, amount in on_paper.flops(setup).items()}
    again = {d: amount / job.tp for d, amount in on_paper.recomputed_flops(setup).get("palm", {}).items()}
    use = utilization(
        flops,
        parts.total,
        named(job.gpu),
        tokens=job.tokens * job.accumulation / job.tp,
        recomputed=again,
    )
    return Prediction(job, collectives, memory(job), parts, use, flops, gain(job, rates))


def check(job: Job) -> ModelSpec:
    """The model of a job whose names and sizes are known.

    Raises:
        UsageError: see `predict`.
    """
    if job.model not in MODELS:
        raise unknown("model", job.model, MODELS)
    if job.recipe and job.recipe not in RECIPES:
        raise unknown("recipe", job.recipe, RECIPES)
    spec = MODELS[job.model]
    if job.pp > 1:
        raise UsageError(
            f"pp={job.pp}: bytes and memory of a pipeline are not counted here; `advise` predicts its step"
        )
    if isinstance(spec.config, MoeConfig):
        raise UsageError(f"{job.model} has experts, whose exchanges are not modelled; take a dense model")
    if job.seq > spec.max_seq:
        raise UsageError(f"seq={job.seq}: {job.model} reads at most {spec.max_seq} tokens")
    named(job.gpu)
    for name in ("heads", "kv_heads"):
        heads = getattr(spec.config, name, job.tp)
        if heads % job.tp:
            raise UsageError(f"tp={job.tp} does not divide the {heads} {name} of {job.model}")
    if job.tp > 1:
        part_of(job)
    return spec


def step_parts(job: Job, rates: Rates, recipe: Recipe | None = None) -> Parts:
    """Seconds of an optimizer step by part.

    Args:
        job: which.
        rates: of its GPU.
        recipe: costs of `job.recipe` as somebody else's library runs it; None: as fp8core does.
    """
    model, plan = part_of(job)
    if not job.recipe:
        return step_cost(model, rates, plan, None)
    recipe = recipe or candidates(job.compiled)[job.recipe]
    return step_cost(model, rates, plan, recipe, able(model, recipe))


def gain(job: Job, rates: Rates) -> Ratio | None:
    """Step time in bf16 over that in FP8 with its interval, all that can be converted converted; None for bf16."""
    if not job.recipe:
        return None
    model, plan = part_of(job)
    recipe = candidates(job.compiled)[job.recipe]
    return speedup(model, rates, plan, recipe, able(model, recipe))


def part_of(job: Job) -> tuple[Model, Plan]:
    """One GPU's part of the job's model, and how it is trained."""
    return job.on_a_gpu(traced(job.model, job.batch, job.seq, None, None))


def tokens_per_s(job: Job, parts: Parts) -> float:
    """Tokens/s of one GPU."""
    return job.tokens * job.accumulation / job.tp / parts.total


def memory(job: Job) -> dict[str, int]:
    """Bytes of one rank by `MEMORY`, at the most.

    Whole are the weights outside of blocks and those of two blocks, and two blocks' gradients on their way to be
    reduced; all gradients where they wait for the last microbatch. Of activations, tensor parallelism with sequence
    parallelism splits everything but the inputs that it gathers.
    """
    weights = weights_of(job.model, job.recipe, job.tp)
    mine = _local(weights.block, job) * weights.blocks + _local(weights.rest, job)
    master = BYTES[job.weights]
    gradients, gathered, reduced = mine * master, 0, 0
    if job.shard > 1:
        gathered = _FILLED * gathered_bytes(weights.block, job) + gathered_bytes(weights.rest, job)
        waits = job.accumulation > 1 and not job.reduce_each
        held = weights.blocks if waits else min(_FILLED, weights.blocks)
        reduced = held * reduced_bytes(weights.block, job) + reduced_bytes(weights.rest, job)
        if waits:  # shards are made as the whole ones go
            reduced = max(0, reduced - gradients)
    elif job.weights == "fp32":
        gathered = BF16 * (mine if job.checkpointing == "none" else _local(weights.rest, job))
    kept = _activations(replace(job, world=job.tp, replicas=1, accumulation=1))
    return {
        "weights": mine * master,
        "gradients": gradients,
        "optimizer": mine * master * _ADAMW_STATES,
        "gathered": gathered,
        "reduced": reduced,
        **kept,
    }


@functools.lru_cache(maxsize=256)
def _activations(job: Job) -> dict[str, int]:
    """What a forward and backward pass keeps and works in: the same for every number of GPUs."""
    one, two = (
        on_paper.memory(replace(_setup(job), compute="bf16", layers=layers), "cpu") for layers in (1, 2)
    )
    more = MODELS[job.model].layers - 1
    grown = {part: one[part] + more * (two[part] - one[part]) for part in ("activations", "fp8_weights")}
    kept = (grown["activations"] + grown["fp8_weights"]) // job.tp
    work = max(one["workspace"], two["workspace"]) // job.tp
    if job.tp > 1:
        wide = BF16 * job.tokens * MODELS[job.model].width
        whole = 2 * wide * (job.tp - 1) // job.tp  # both inputs of a block that were gathered
        kept += whole * (more + 1) if job.checkpointing != "full" else 0
        work += whole
    return {"activations": kept, "logits": one["logits"] // job.tp, "workspace": work}


def _local(weights: Sequence[Weight], job: Job) -> int:
    """Elements of a rank's shards, that of the first rank, which has the most."""
    return sum(w.padded(job.shard) for w in weights) // job.shard


def _setup(job: Job) -> Setup:
    return Setup(
        model=job.model,
        batch=job.batch,
        seq=job.seq,
        recipe=RECIPES[job.recipe] if job.recipe else None,
        checkpointing=job.checkpointing,
        accumulation=job.accumulation,
    )
