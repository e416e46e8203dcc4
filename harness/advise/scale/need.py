"""Memory of the step that is advised, in bf16 and in FP8, and the smallest changes with which the model says that it fits.

For dense models of this project memory is predicted whole (`harness.advise.scale.held`). Of every other model, and of a
pipeline's stages, only weights, gradients and AdamW's two averages are known: a lower bound, by which a step may not fit, and
never fits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.advise.memory import MARGIN, Memory
from harness.advise.model import slowest_stage
from harness.advise.scale.held import memory
from harness.store.errors import UsageError
from harness.training.models import MODELS
from harness.training.models.llama_moe import MoeConfig
from harness.training.step import BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from harness.advise.model import Model
    from harness.training.setup import Setup

StepChanges = dict[
    str, Any
]  # keys of the command to their new values; the first one says of which kind they are
_FIELDS = {"weights": "compute"}  # of `Setup`, by another key
_STATES = 4  # weight, gradient, two averages
_MOST_GPUS = 4096


def memory_of(model: Model, device: int, job: Setup, by_gpus: bool = False) -> Memory:
    """Memory of the step that is advised, see the module docstring.

    Args:
        model: one GPU's part, but for the stage of a pipeline.
        device: bytes of the GPU.
        job: that it is about, with the sequences of one forward pass, the recipe of the converted layers (None where none are)
            and what FSDP gathers.
        by_gpus: the question named all GPUs (`gpus=`), so that a way out must name them too.
    """
    config = getattr(MODELS.get(model.name), "config", None)
    known = config is not None and not isinstance(config, MoeConfig) and model.whole
    gpus = [{"dp": job.dp * 2**i} for i in range(1, 13) if job.dp * 2**i <= _MOST_GPUS]
    if not known or job.pp > 1:

        def states(one: Setup) -> int:
            """The mean of a pipeline's stages; the largest has no less."""
            return round(_STATES * BYTES[one.weights] * model.parameters / one.shards / one.pp)

        stages = [{"pp": n} for n in (2, 4, 8, 16) if _divides(model, n)] if job.pp == 1 else []
        ways = {} if states(job) <= device else _ways([*gpus, *stages], states, device, job, by_gpus)
        bound = {"states": states(job)}
        return Memory(bound, None, device, False, ways, "a pipeline" if known else "this model")

    def whole(one: Setup) -> int:
        return sum(memory(one).values())

    bf16, fp8 = memory(replace(job, recipe=None)), memory(job) if job.recipe else None
    found = Memory(bf16, fp8, device, True, {})
    if found.needed <= device:
        return found
    # Single changes first; then fewer bytes and more GPUs together. No stages of a pipeline: their memory is not predicted.
    single: list[StepChanges] = [{"replicas": 1}] * (job.replicas > 1) + gpus
    single += [{"checkpointing": mode} for mode in ("selective", "full") if job.checkpointing == "none"]
    single += [{"weights": "bf16"}] * (job.weights == "fp32")
    halves = (job.batch >> i for i in range(1, job.batch.bit_length()))
    single += [{"batch": batch} for batch in halves if job.compiled]
    more = {"checkpointing": "full"}
    together = [each | more for each in gpus] + [each | more | {"batch": 1} for each in gpus]
    ways = _ways(single, whole, device, job, by_gpus) or _ways(together, whole, device, job, by_gpus)
    return replace(found, ways=ways)


def _ways(
    options: Iterable[StepChanges],
    size_of: Callable[[Setup], int],
    device: int,
    job: Setup,
    by_gpus: bool,
) -> dict[str, int]:
    """The first changes of each kind with which the step fits with `MARGIN`, in words of the command; and its bytes."""
    found: dict[str, tuple[str, int]] = {}
    for changes in options:
        kind = next(iter(changes))
        if kind in found:
            continue
        try:
            one = replace(job, **{_FIELDS.get(name, name): value for name, value in changes.items()})
            size = size_of(one)
        except UsageError:
            continue
        if size * MARGIN <= device:
            named = {"gpus": one.world, **changes} if by_gpus and one.world != job.world else changes
            found[kind] = (" ".join(f"{name}={value}" for name, value in named.items()), size)
    return dict(found.values())


def _divides(model: Model, stages: int) -> bool:
    try:
        slowest_stage(model, stages)
    except UsageError:
        return False
    return True
