"""Memory of the step that is advised, in bf16 and in FP8, and the smallest changes with which the model says that it fits.

For dense models of this project memory is predicted whole (`harness.advise.scale.held`). Of every other model, and of a
pipeline's stages, only weights, gradients and AdamW's two averages are known: a lower bound, by which a step may not fit, and
never fits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.advise.fits import GIB, MARGIN, Memory
from harness.advise.pipeline import slowest_stage
from harness.advise.plan import BYTES
from harness.advise.scale.held import memory
from harness.store.errors import UsageError
from harness.training.models import MODELS
from harness.training.models.llama_moe import MoeConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from harness.advise.advice import Advice
    from harness.advise.model import Model
    from harness.advise.scale.job import ClusterJob

Changes = dict[
    str, str | int
]  # keys of the command to their new values; the first one says of which kind they are
_STATES = 4  # weight, gradient, two averages
_MOST_GPUS = 4096


def memory_of(found: Advice, job: ClusterJob, *, by_gpus: bool = False, reduce: str = "") -> Memory:
    """Memory of the step that is advised, see the module docstring.

    Args:
        found: the advice; its model is one GPU's part, but for the stage of a pipeline.
        job: that it is about, with the sequences of one forward pass, the recipe of the converted layers ("" where none is) and
            what FSDP gathers.
        by_gpus: the question named all GPUs (`gpus=`), so that a way out must name them too.
        reduce: dtype of reduced gradients, if the question named it; "": as the masters'.
    """
    device = int(found.device.memory_gib * GIB)
    config = getattr(MODELS.get(found.model.name), "config", None)
    known = config is not None and not isinstance(config, MoeConfig) and found.model.whole
    if not known or job.pp > 1:
        size = _states(found.model, job)
        ways = _more_gpus(found.model, job, device, by_gpus) if size > device else {}
        unknown = "a pipeline" if known else "this model"
        return Memory({"states": size}, None, device, False, ways, unknown)
    bf16 = memory(replace(job, recipe=""))
    fp8 = memory(job) if job.recipe else None
    taken = sum((bf16 if fp8 is None else fp8).values())
    ways = _ways(job, device, by_gpus, reduce) if taken > device else {}
    return Memory(bf16, fp8, device, True, ways)


def _states(model: Model, job: ClusterJob) -> int:
    """Bytes of weights, gradients and AdamW's averages of one GPU: the mean of a pipeline's stages, the largest has no less."""
    return round(_STATES * BYTES[job.weights] * model.parameters / job.shard / job.pp)


def _more_gpus(model: Model, job: ClusterJob, device: int, by_gpus: bool) -> dict[str, int]:
    """GPUs with which weights and averages alone fit: more shards; or stages, of a model that divides into so many."""
    found: dict[str, int] = {}
    for key, options in (("dp", _gpus(job.dp)), ("pp", _stages(model) if job.pp == 1 else [])):
        for count in options:
            changes: Changes = {key: count}
            size = _states(model, _changed(job, changes, ""))
            if size * MARGIN <= device:
                found[_words(job, changes, by_gpus)] = size
                break
    return found


def _stages(model: Model) -> list[int]:
    """Numbers of stages that a model divides into."""
    found = []
    for count in (2, 4, 8, 16):
        try:
            slowest_stage(model, count)
        except UsageError:
            break
        found.append(count)
    return found


def _ways(job: ClusterJob, device: int, by_gpus: bool, reduce: str) -> dict[str, int]:
    """Single changes first; then fewer bytes and more GPUs together. The first of each kind that fits with `MARGIN`.

    No stages of a pipeline: their memory is not predicted, so that none can be said to fit.
    """
    found: dict[str, int] = {}
    for kind in (_single(job), _together(job)):
        done = set()
        for changes in kind:
            key = next(iter(changes))
            if key in done:
                continue
            try:
                size = sum(memory(_changed(job, changes, reduce)).values())
            except UsageError:
                continue
            if size * MARGIN <= device:
                found[_words(job, changes, by_gpus)] = size
                done.add(key)
        if found:
            break
    return found


def _single(job: ClusterJob) -> Iterator[Changes]:
    if job.replicas > 1:
        yield {"replicas": 1}
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


def _together(job: ClusterJob) -> Iterator[Changes]:
    for gpus in _gpus(job.dp):
        yield {"dp": gpus, "checkpointing": "full"}
    for gpus in _gpus(job.dp):
        yield {"dp": gpus, "checkpointing": "full", "batch": 1}


def _changed(job: ClusterJob, changes: Mapping[str, str | int], reduce: str) -> ClusterJob:
    fields: dict[str, Any] = dict(changes)
    if "dp" in fields:
        fields["world"] = fields.pop("dp") * job.tp * job.pp
    if "pp" in fields:
        fields["world"] = job.world * fields["pp"]
    if "weights" in fields:
        fields["reduce"] = reduce or fields["weights"]
    return replace(job, **fields)


def _words(job: ClusterJob, changes: Mapping[str, str | int], by_gpus: bool) -> str:
    """The changes as words of the command."""
    world = _changed(job, changes, "").world
    all_of = {"gpus": world} if by_gpus and world != job.world else {}
    return " ".join(f"{name}={value}" for name, value in {**all_of, **changes}.items())


def _gpus(now: int) -> list[int]:
    """More GPUs than now, doubled each time."""
    return [now * 2**i for i in range(1, 13) if now * 2**i <= _MOST_GPUS]
