"""From the words of a question to the job that it is about: GPUs, how they are split, what goes around."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.advise.scale.job import ClusterJob
from harness.advise.scale.layout import layout

if TYPE_CHECKING:
    from harness.advise.casts import RecipeCost
    from harness.advise.command import Question
    from harness.advise.model import Model
    from harness.machine.hardware import Device


def cannot_send(recipe: RecipeCost, question: Question) -> str:
    """Why a recipe cannot do what `fp8_all_gather=true` asks for; "" if it can, or nothing is asked."""
    if question.fp8_all_gather != "true" or recipe.gathered_weight is not None:
        return ""
    return f"{recipe.name} casts a weight along both axes, so that FSDP must gather it in bf16"


def job_of(question: Question, model: Model, device: Device) -> tuple[ClusterJob, str]:
    """How the model is trained and on which GPUs; and in one line what of it was not named.

    Raises:
        UsageError: numbers of GPUs that do not divide.
    """
    split = layout(
        model,
        gpus=question.gpus,
        dp=question.dp,
        tp=question.tp,
        pp=question.pp,
        accumulation=question.accumulation,
        schedule=question.schedule,
        node=question.node,
    )
    job = ClusterJob(
        model=model.name,
        gpu=device.key,
        world=split.world,
        batch=1,
        seq=max(1, model.tokens),  # all of a forward pass, however many sequences they are
        accumulation=split.accumulation,
        checkpointing=question.checkpointing,
        tp=split.tp,
        pp=split.pp,
        virtual=split.virtual,
        replicas=question.replicas,
        node=question.node,
        weights=question.weights,
        reduce=question.reduce or question.weights,
        compiled=question.mode == "compile",
    )
    return job, split.said


def step_seconds(question: Question, tokens: int, job: ClusterJob) -> float | None:
    """Seconds of the measured bf16 step, from the tokens/s of one GPU."""
    if question.bf16_tokens_per_s is None:
        return None
    return tokens * job.accumulation / (job.tp * job.pp * question.bf16_tokens_per_s)
