"""What a job is predicted to send, hold and take: bytes by collective, memory of a rank, time of a step and its MFU.

Bytes come from shapes (`harness.advise.scale.counts`), memory from `harness.advise.scale.held`. Time is the prediction of `harness.advise`: compute by the rates of the GPU
(measured ones where runs are named, else published ones), communication by `harness.machine.communication`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8core.recipe import RECIPES
from harness.advise.recipes import candidates
from harness.advise.scale.counts import Collective, exchanging, sharding
from harness.advise.scale.held import MEMORY, memory
from harness.advise.scale.job import BYTES
from harness.advise.scale.weights import weights_of
from harness.advise.step import CHECKPOINTING, Parts, Plan, step_cost
from harness.advise.tensor_parallel import split
from harness.advise.trace import trace
from harness.machine.hardware import named
from harness.machine.mfu import Utilization, utilization
from harness.store.errors import UsageError, unknown
from harness.training import on_paper
from harness.training.models import MODELS, ModelSpec
from harness.training.models.llama_moe import MoeConfig
from harness.training.setup import Setup

__all__ = ["MEMORY", "Prediction", "check", "memory", "predict", "recipe_sends", "step_parts", "tokens_per_s"]

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.advise.casts import Recipe
    from harness.advise.model import Model
    from harness.advise.rates import Rates
    from harness.advise.scale.job import Job
    from harness.advise.step import Exchange

# Bytes that the update of a parameter moves, by the masters' dtype (`harness.advise.step.Plan.update_bytes`)
UPDATE_BYTES = {"fp32": 40.0, "bf16": 20.0}


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
    """

    job: Job
    collectives: tuple[Collective, ...]
    memory: Mapping[str, int]
    parts: Parts
    use: Utilization
    flops: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of one GPU."""
        return tokens_per_s(self.job, self.parts)


def predict(job: Job, rates: Rates) -> Prediction:
    """All of it.

    Raises:
        UsageError: an unknown model, GPU or recipe, a length that the model has not, layers that `tp` does not divide.
    """
    spec = check(job)
    weights = weights_of(job.model, job.recipe, job.tp)
    _, exchanges = _split(_traced(spec, job.seq), job)
    collectives = (*sharding(weights, job), *exchanging(exchanges, weights.blocks, job))
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
    return Prediction(job, collectives, memory(job), parts, use, flops)


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
        _split(_traced(spec, job.seq), job)
    return spec


def step_parts(job: Job, rates: Rates, recipe: Recipe | None = None) -> Parts:
    """Seconds of an optimizer step by part.

    Args:
        job: which.
        rates: of its GPU.
        recipe: costs of `job.recipe` as somebody else's library runs it; None: as fp8core does.
    """
    model = _traced(MODELS[job.model], job.seq).with_tokens(job.tokens)
    model, exchanges = _split(model, job)
    plan = Plan(
        compiled=job.compiled,
        again=CHECKPOINTING[job.checkpointing],
        accumulation=job.accumulation,
        dp=job.dp,
        replicas=job.replicas,
        tp=job.tp,
        exchanges=exchanges,
        node=job.node,
        gather_fp8=job.gather_fp8,
        reduce_each=job.reduce_each,
        tp_gather_fp8=job.gather_fp8 and recipe_sends(job.recipe),
        update_bytes=UPDATE_BYTES[job.weights],
        gradient_bytes=float(BYTES[job.reduce]),
    )
    if not job.recipe:
        return step_cost(model, rates, plan, None)
    recipe = recipe or candidates(job.compiled)[job.recipe]
    able = {layer.fqn for layer in model.layers if job.recipe not in layer.barred}
    return step_cost(model, rates, plan, recipe, able)


def tokens_per_s(job: Job, parts: Parts) -> float:
    """Tokens/s of one GPU."""
    return job.tokens * job.accumulation / job.tp / parts.total


def recipe_sends(recipe: str) -> bool:
    """Whether activations of a recipe go around in FP8: one scale for the whole tensor, known before it is sent."""
    return recipe == "tensorwise"


def _setup(job: Job) -> Setup:
    return Setup(
        model=job.model,
        batch=job.batch,
        seq=job.seq,
        recipe=RECIPES[job.recipe] if job.recipe else None,
        checkpointing=job.checkpointing,
        accumulation=job.accumulation,
    )


@functools.lru_cache(maxsize=32)
def _traced(spec: ModelSpec, seq: int) -> Model:
    """One sequence; all else is proportional."""
    return trace(spec, 1, seq)


def _split(model: Model, job: Job) -> tuple[Model, tuple[Exchange, ...]]:
    return split(model, job.tp) if job.tp > 1 else (model, ())
