"""Memory of the step that is advised, in bf16 and in FP8, and the smallest changes with which the model says that it fits.

For dense models of this project memory is predicted whole (`harness.advise.scale.held`). Of every other model only weights,
gradients and AdamW's two averages are known: a lower bound, by which a step may not fit, and never fits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.advise.fits import GIB, MARGIN, Memory
from harness.advise.scale.held import memory
from harness.advise.scale.job import BYTES, Job
from harness.store.errors import UsageError
from harness.training.models import MODELS
from harness.training.models.llama_moe import MoeConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from harness.advise.advice import Advice

_STATES = 4  # weight, gradient, two averages
_MOST_GPUS = 4096


def memory_of(found: Advice, batch: int, seq: int, checkpointing: str, weights: str, recipe: str) -> Memory:
    """Memory of the step that is advised, see the module docstring.

    Args:
        found: the advice; its model is one GPU's part.
        batch: sequences of one forward pass.
        seq: tokens of each.
        checkpointing: of activations.
        weights: dtype of the masters.
        recipe: of the converted layers; "" where none is.
    """
    device = int(found.device.memory_gib * GIB)
    config = getattr(MODELS.get(found.model.name), "config", None)
    plan = found.plan
    if config is None or isinstance(config, MoeConfig) or not found.model.whole:
        states = _STATES * BYTES[weights] * found.model.parameters
        bound = {"states": round(states * plan.replicas / plan.dp)}
        ways = {}
        if sum(bound.values()) > device:
            need = next((n for n in _gpus(plan.dp) if states / n * MARGIN <= device), None)
            ways = {f"dp={need}": round(states / need)} if need else {}
        return Memory(bound, None, device, False, ways)
    job = Job(
        found.model.name,
        found.device.key,
        plan.dp * plan.tp,
        batch,
        seq,
        accumulation=plan.accumulation,
        checkpointing=checkpointing,
        tp=plan.tp,
        node=plan.node if plan.node % plan.tp == 0 else plan.tp,
        recipe=recipe,
        gather_fp8=found.fp8_all_gather,
        weights=weights,
        reduce=weights,
        compiled=plan.compiled,
    )
    bf16 = memory(replace(job, recipe=""))
    fp8 = memory(job) if recipe else None
    taken = sum((bf16 if fp8 is None else fp8).values())
    ways = _ways(job, device) if taken > device else {}
    return Memory(bf16, fp8, device, True, ways)


def _ways(job: Job, device: int) -> dict[str, int]:
    """Single changes first; then fewer bytes and more GPUs together. The first of each kind that fits with `MARGIN`."""
    found: dict[str, int] = {}
    for kind in (_single(job), _together(job)):
        for changes in kind:
            key = next(iter(changes))
            if any(way.startswith(f"{key}=") for way in found):
                continue
            try:
                size = sum(memory(_changed(job, changes)).values())
            except UsageError:
                continue
            if size * MARGIN <= device:
                found[" ".join(f"{name}={value}" for name, value in changes.items())] = size
        if found:
            break
    return found


def _single(job: Job) -> Iterator[dict[str, str | int]]:
    for gpus in _gpus(job.dp):
        yield {"dp": gpus}
    for mode in ("selective", "full"):
        if job.checkpointing == "none":
            yield {"checkpointing": mode}
    if job.weights == "fp32":
        yield {"weights": "bf16"}
    batch = job.batch // 2
    while batch and job.compiled:
        yield {"batch": batch}
        batch //= 2


def _together(job: Job) -> Iterator[dict[str, str | int]]:
    for gpus in _gpus(job.dp):
        yield {"dp": gpus, "checkpointing": "full"}
    for gpus in _gpus(job.dp):
        yield {"dp": gpus, "checkpointing": "full", "batch": 1}


def _changed(job: Job, changes: Mapping[str, str | int]) -> Job:
    fields: dict[str, Any] = dict(changes)
    if "dp" in fields:
        fields["world"] = fields.pop("dp") * job.tp
    if "weights" in fields:
        fields["reduce"] = fields["weights"]
    return replace(job, **fields)


def _gpus(now: int) -> list[int]:
    """More GPUs than now, doubled each time."""
    return [now * 2**i for i in range(1, 13) if now * 2**i <= _MOST_GPUS]
