"""What a job is predicted to send, hold and take: bytes by collective, memory of a rank, time of a step and its MFU.

Bytes come from shapes (`harness.advise.scale.counts`), memory from `harness.advise.scale.held`. Time is the prediction of
`harness.advise`: compute by the rates of the GPU (measured ones where runs are named, else published ones), communication by
`harness.machine.communication`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8core.recipe import RECIPES
from harness.advise.decide import able
from harness.advise.recipes import candidates
from harness.advise.scale.counts import Collective, exchanging, sharding
from harness.advise.scale.held import memory, setup_of, weights_of
from harness.advise.step import Parts, speedup, step_cost
from harness.advise.training import traced
from harness.machine.hardware import named
from harness.machine.mfu import Utilization, utilization
from harness.store.errors import UsageError, unknown
from harness.training import meta_estimate
from harness.training.models import MODELS, ModelSpec
from harness.training.models.llama_moe import MoeConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.advise.casts import RecipeCost
    from harness.advise.model import Model
    from harness.advise.plan import Plan
    from harness.advise.rates import Rates
    from harness.advise.scale.job import ClusterJob
    from harness.advise.step import Ratio


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

    job: ClusterJob
    collectives: tuple[Collective, ...]
    memory: Mapping[str, int]
    parts: Parts
    use: Utilization
    flops: Mapping[str, float]
    speedup: Ratio | None = None


def predict(job: ClusterJob, rates: Rates) -> Prediction:
    """All of it.

    Raises:
        UsageError: an unknown model, GPU or recipe, a length that the model has not, layers that `tp` does not divide.
    """
    check(job)
    weights = weights_of(job.model, job.recipe, job.tp)
    model, plan = _part_of(job)
    collectives = (*sharding(weights, job), *exchanging(plan.exchanges, weights.blocks, job))
    parts, ratio = step_parts(job, rates), None
    if job.recipe:
        recipe = candidates(job.compiled)[job.recipe]
        ratio = speedup(model, rates, plan, recipe, able(model, recipe))
    # Of the whole group's tokens, each rank works on its part
    setup = setup_of(job)
    flops, again = (
        {dtype: amount / job.tp for dtype, amount in whole.items()}
        for whole in (meta_estimate.flops(setup), meta_estimate.recomputed_flops(setup).get("palm", {}))
    )
    tokens = job.tokens * job.accumulation / job.tp
    use = utilization(flops, parts.total, named(job.gpu), tokens=tokens, recomputed=again)
    return Prediction(job, collectives, memory(job), parts, use, flops, ratio)


def check(job: ClusterJob) -> ModelSpec:
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
        _part_of(job)
    return spec


def step_parts(job: ClusterJob, rates: Rates, recipe: RecipeCost | None = None) -> Parts:
    """Seconds of an optimizer step by part.

    Args:
        job: which.
        rates: of its GPU.
        recipe: costs of `job.recipe` as somebody else's library runs it; None: as fp8core does.
    """
    model, plan = _part_of(job)
    if not job.recipe:
        return step_cost(model, rates, plan, None)
    recipe = recipe or candidates(job.compiled)[job.recipe]
    return step_cost(model, rates, plan, recipe, able(model, recipe))


def _part_of(job: ClusterJob) -> tuple[Model, Plan]:
    """One GPU's part of the job's model, and how it is trained."""
    return job.on_a_gpu(traced(job.model, job.batch, job.seq))
