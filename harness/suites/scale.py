"""Suite `scale`: what a training step would send, hold and take on GPUs that are not here. Nothing is timed.

Each arm of a case is a prediction (`harness.advise.scale`): bytes and calls of each collective from the shapes of the
parameters, memory of a rank, time of a step by part and the MFU that follows. With `proof` FSDP2 itself runs on fake
tensors in a fake process group of that many ranks, on a model cut to two blocks, and bytes and calls must be those that
were counted.

    bf16                      no FP8
    tensorwise                FP8 codes around: FSDP gathers weights, tensor parallelism activations, at a byte each
    tensorwise_bf16_gather    the same layers, everything sent in bf16
    rowwise                   scales of rows and columns need two casts of the weight: bf16 around
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from harness.advise.decide import verdict
from harness.advise.gpu import gpu_and_rows
from harness.advise.plan import BYTES
from harness.advise.rates import rates_of
from harness.advise.recipes import unavailable
from harness.advise.scale.counts import given, sharding
from harness.advise.scale.held import weights_of
from harness.advise.scale.job import MOST_GPUS, ClusterJob
from harness.advise.scale.predict import check, predict
from harness.machine.ceilings import ceilings
from harness.machine.hardware import named
from harness.store.case import Arm, expand
from harness.store.errors import Cause
from harness.suites.common import refuse_shapes, with_defaults
from harness.timing.workload import ArmInfo, Axis, Series, Trial, Unsupported, arm_table
from harness.training.models.memory import GIB
from harness.training.setup import CHECKPOINTING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from harness.advise.rates import Rates
    from harness.advise.scale.predict import Prediction
    from harness.store.case import Case, Scalar

PROVED_BLOCKS = 2
_BF16_GATHER = "bf16_gather"

AXES: Mapping[str, Axis] = {
    "model": Axis("a name of harness.training.models", kind="str", default="llama_7b"),
    "gpu": Axis("a GPU of the peak table", kind="str", default="h100"),
    "world": Axis(f"GPUs, at most {MOST_GPUS}", default=16),
    "batch": Axis("sequences of a forward pass of one GPU; with tp of the group", default=1),
    "seq": Axis("tokens of a sequence", default=4096),
    "accumulation": Axis("forward passes of a step", default=1),
    "checkpointing": Axis("of activations", CHECKPOINTING, default="full"),
    "tp": Axis("GPUs that split each layer", default=1),
    "replicas": Axis("copies of the weights (HSDP)", default=1),
    "node": Axis("GPUs of a node", default=8),
    "weights": Axis("masters, gradients and optimizer states", tuple(BYTES)),
    "reduce": Axis("in which gradients are reduced", tuple(BYTES)),
    "reduce_each": Axis("gradients are reduced after every forward pass of a step", (False, True)),
    "network_gb_s": Axis("1e9 bytes/s of one GPU to other nodes", kind="float", default=40.0),
    "runs": Axis(
        'stored runs of that GPU, "+" between them: their rates replace published ones',
        kind="str",
        default="",
    ),
    "proof": Axis("count at the collectives of FSDP2 too, in a fake process group", (False, True)),
}
ARMS: Mapping[str, ArmInfo] = arm_table(
    {
        Arm("bf16"): ArmInfo("no FP8"),
        Arm("tensorwise"): ArmInfo("codes go around", "bf16", "tensorwise"),
        Arm("tensorwise", variant=_BF16_GATHER): ArmInfo("bf16 goes around", "bf16", "tensorwise"),
        Arm("rowwise"): ArmInfo("bf16 goes around", "bf16", "rowwise"),
    }
)


def points(
    shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
) -> list[dict[str, Scalar]]:
    """No linked axes; every job is checked here.

    Raises:
        UsageError: an unknown model, GPU or run; a world that tp and replicas don't divide; too long a sequence.
        ValueError: shapes are named, which this suite has no use for.
    """
    refuse_shapes("scale", shapes, "whole models by axes.model")
    fixed = with_defaults([{}], axes, AXES)
    for case in expand("scale", axes, fixed):
        check(_job(case, "bf16"))
        _rates(case)
    return fixed


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """FP8 that the named GPU lacks. What this machine has does not matter."""
    recipe = ARMS[arm].recipe
    gpu = named(case.text("gpu"))
    if not recipe:
        return None
    if gpu.peak_tflops("fp8") is None:
        return Unsupported("device", f"{gpu.key} has no FP8 matrix units")
    why = unavailable(recipe, gpu.capability, compiled=True)
    return Unsupported("device", why) if why else None


def work(case: Case) -> float:
    """Tokens of a step of all GPUs."""
    job = _job(case, "bf16")
    return float(job.tokens * job.accumulation * job.dp)


def trial(case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]) -> Trial:
    """The prediction; with `proof` a failure where FSDP2 sends anything else than was counted."""
    job, gpu = _job(case, arm), named(case.text("gpu"))
    rates = _rates(case)
    found = predict(job, rates)
    needed, room = sum(found.memory.values()), gpu.memory_gib * GIB
    resolved: dict[str, object] = {
        "timed": "nothing: a prediction",
        "recipe": job.recipe or "bf16",
        "compile": "compile",
        "shards": job.shard,
        "tokens_per_step": job.tokens * job.accumulation // job.tp,
        "tokens_per_s": found.use.tokens_per_s,
        "flops": dict(found.flops),
        "flops_formula_id": found.use.formula,
        **{name: getattr(found.use, name) for name in ("model_tflops", "mfu_mixed", "mfu_bf16_peak", "hfu")},
        "fits": needed <= room,
        "predicted_speedup": _speedup(found),
        "gpu_memory_bytes": int(room),
        "rates": {
            name: {"value": figure.value, "kind": figure.kind, "source": figure.source}
            for name, figure in rates.figures.items()
        },
    }
    failure = ""
    if case["proof"]:
        failure = _disproved(job)
        resolved["proof"] = (
            failure or f"FSDP2 on fake tensors, {PROVED_BLOCKS} blocks, {job.world} fake ranks"
        )
    return Trial(() if failure else _series(found), resolved, failure, cause=Cause.NUMERICS)


def _speedup(found: Prediction) -> dict[str, object] | None:
    """Over bf16, with its 95 % interval and what that decides; None for bf16."""
    if found.speedup is None:
        return None
    return {**asdict(found.speedup), "decision": verdict(found.speedup)}


def _rates(case: Case) -> Rates:
    """Rates of the case's GPU, measured where its runs are named, else published."""
    runs = [run for run in case.text("runs").split("+") if run]
    gpu, frame = gpu_and_rows(case.text("gpu"), runs)
    reached = ceilings(frame) if frame is not None else None
    network = case.number("network_gb_s")
    given = None if network == AXES["network_gb_s"].default else network
    return rates_of(gpu, reached, network_gb_s=given)


def _series(found: Prediction) -> list[Series]:
    def one(metric: str, value: float, part: str = "") -> Series:
        return Series(metric, (float(value),), (0,), part)

    parts = {f.name: getattr(found.parts, f.name) for f in fields(found.parts)}
    return [
        one("predicted_step_ms", 1e3 * found.parts.total),
        *(one("predicted_step_ms", 1e3 * seconds, part) for part, seconds in parts.items() if seconds),
        one("predicted_memory_bytes", sum(found.memory.values())),
        *(one("predicted_memory_bytes", size, part) for part, size in found.memory.items() if size),
        one("sent_bytes", sum(c.wire(found.job) for c in found.collectives)),
        *(one("sent_bytes", c.wire(found.job), c.part) for c in found.collectives),
        one("collectives", sum(c.calls for c in found.collectives)),
        *(one("collectives", c.calls, c.part) for c in found.collectives),
    ]


def _disproved(job: ClusterJob) -> str:
    """What FSDP2 sends that was not counted, or the other way round; "" if they agree. Tensor parallelism is left out."""
    from harness.advise.scale.observed import observe_fake

    alone = replace(job, tp=1, world=job.dp)
    weights = replace(weights_of(job.model, job.recipe, 1), blocks=PROVED_BLOCKS)
    counted, seen = given(sharding(weights, alone), alone), observe_fake(alone, PROVED_BLOCKS)
    return "" if seen == counted else f"FSDP2 called and sent (calls, bytes) {seen}; counted were {counted}"


def _job(case: Case, arm: str) -> ClusterJob:
    named_axes = {f.name for f in fields(ClusterJob)} & set(AXES)
    values: dict[str, Any] = {name: case[name] for name in named_axes}
    record = ARMS[arm].arm
    gather_fp8 = record.variant != _BF16_GATHER and record.recipe != "rowwise"
    return ClusterJob(**values, recipe=record.fp8_recipe, gather_fp8=gather_fp8)
