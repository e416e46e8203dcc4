"""Published peak memory of training steps, with their conditions. Plain data; sources read in November 2026.

torchtitan logs `reserved_bytes.all.peak` in GiB (`torchtitan/components/metrics.py`), which torchao's script reads from
its log (`benchmarks/float8/training/parse_torchtitan_logs.py`) and its page prints as GB. KempnerForge divides by 1024**3
too (`kempnerforge/metrics/memory.py`) and prints GB. All figures here are therefore GiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from speedups.throughputs import PUBLISHED

from harness.advise.scale.job import ClusterJob


@dataclass(frozen=True, slots=True)
class Held:
    """One published peak.

    Attributes:
        key: short name.
        gpu: as published.
        mode: "eager" or "compile".
        precision: "bf16" or the recipe.
        gib: published.
        source: where it stands.
        job: the conditions.
        pair: key of the bf16 run of the same conditions; "" for one in bf16.
        in_view: what the model counts was chosen with this row in view. No number was fitted to any.
    """

    key: str
    gpu: str
    mode: str
    precision: str
    gib: float
    source: str
    job: ClusterJob
    pair: str = ""
    in_view: bool = False


_AO = "torchao, docs, training workflow"
_TITAN = "torchtitan, benchmarks/llama3_h100_202412"
# torch 2.7 and torchtitan of early 2025: the loss in float32, not compiled. Its head stays in bf16.
_STEP = ClusterJob("llama3_8b", "h100", 8, 1, 8192, checkpointing="by_op", loss="float32", left_out=("head",))
# torchtitan compiles the loss where it compiles the model since its pull request 1033 (2025-04)
_LATER = replace(_STEP, loss="fused")
_MI300X, _B200 = replace(_LATER, gpu="mi300x"), replace(_LATER, gpu="b200")
_TWO = replace(_STEP, batch=2)


def _recipe(job: ClusterJob, recipe: str) -> ClusterJob:
    return replace(job, recipe=recipe, gather_fp8=recipe == "tensorwise")


def _torchtitan() -> tuple[Held, ...]:
    h100, mi300x, b200 = "8 H100", "8 MI300X", "8 B200"
    name = "8B, FSDP8, batch 1"
    return (
        Held(name, h100, "compile", "bf16", 47.65, _AO, _STEP, in_view=True),
        Held(name, h100, "compile", "tensorwise", 47.77, _AO, _recipe(_STEP, "tensorwise"), name, True),
        Held(name, h100, "compile", "rowwise", 47.79, _AO, _recipe(_STEP, "rowwise"), name, True),
        Held("8B, FSDP8, batch 2", h100, "eager", "bf16", 82.4, _TITAN, replace(_TWO, compiled=False), in_view=True),
        Held("8B, FSDP8, batch 2", h100, "compile", "bf16", 77.0, _TITAN, _TWO, in_view=True),
        Held(
            "8B, FSDP8, batch 2", h100, "compile", "tensorwise", 76.8, _TITAN,
            _recipe(_TWO, "tensorwise"), "8B, FSDP8, batch 2", True,
        ),
        Held(name, mi300x, "compile", "bf16", 39.0, f"{_AO}, about 39 for all", _MI300X, in_view=True),
        Held(name, b200, "compile", "bf16", 33.4, f"{_AO}, 33.4 to 33.9 for all", _B200, in_view=True),
    )  # fmt: skip


def _kempner() -> tuple[Held, ...]:
    """Everything recomputed; embedding and logits whole under tensor parallelism; F.cross_entropy on bf16 logits."""
    found = []
    for case in PUBLISHED:
        if case.memory_gb is None or not isinstance(case.step, ClusterJob):
            continue
        job = replace(case.step, loss="native", unsplit_vocabulary=case.step.tp > 1)
        mode = "compile" if job.compiled else "eager"
        found.append(
            Held(
                case.key, f"{job.world} H200", mode, "bf16", case.memory_gb,
                case.source, job,
            )
        )  # fmt: skip
    return tuple(found)


CASES: tuple[Held, ...] = (*_torchtitan(), *_kempner())
