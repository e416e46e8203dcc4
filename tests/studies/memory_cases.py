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
        before: predicted by the model until 2026-11-22, GiB: eager code, every product's result kept, a fused loss.
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
    before: float
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
        Held(name, h100, "compile", "bf16", 47.65, 53.6, _AO, _STEP, in_view=True),
        Held(name, h100, "compile", "tensorwise", 47.77, 55.0, _AO, _recipe(_STEP, "tensorwise"), name, True),
        Held(name, h100, "compile", "rowwise", 47.79, 56.4, _AO, _recipe(_STEP, "rowwise"), name, True),
        Held("8B, FSDP8, batch 2", h100, "eager", "bf16", 82.4, 82.9, _TITAN, replace(_TWO, compiled=False), in_view=True),
        Held("8B, FSDP8, batch 2", h100, "compile", "bf16", 77.0, 82.9, _TITAN, _TWO, in_view=True),
        Held(
            "8B, FSDP8, batch 2", h100, "compile", "tensorwise", 76.8, 87.2, _TITAN,
            _recipe(_TWO, "tensorwise"), "8B, FSDP8, batch 2", True,
        ),
        Held(name, mi300x, "compile", "bf16", 39.0, 53.6, f"{_AO}, about 39 for all", _MI300X, in_view=True),
        Held(name, b200, "compile", "bf16", 33.4, 53.6, f"{_AO}, 33.4 to 33.9 for all", _B200, in_view=True),
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
                case.key, f"{job.world} H200", mode, "bf16", case.memory_gb, _BEFORE[case.key] / 1.073741824,
                case.source, job,
            )
        )  # fmt: skip
    return tuple(found)


# 1e9 bytes, reports/published/studies/scale-published.csv until 2026-11-22
_BEFORE = {
    "7B, 1 H200": 78.8,
    "7B, 2 H200, FSDP2": 73.7,
    "7B, 2 H200, TP2": 39.5,
    "7B, 4 H200, FSDP4": 61.7,
    "7B, 4 H200, TP4": 19.9,
    "7B, 4 H200, TP2 and FSDP2": 37.0,
    "7B, 8 H200, TP4 and FSDP2": 18.6,
    "13B, 8 H200, FSDP8, eager": 91.6,
    "13B, 8 H200, TP4 and FSDP2": 31.5,
    "7B, 16 H200, TP4 and FSDP4": 15.6,
    "13B, 16 H200, TP4 and FSDP4": 25.9,
    "7B, 32 H200, TP4 and FSDP8": 14.1,
    "13B, 32 H200, TP4 and FSDP8": 23.2,
    "70B, 32 H200, TP4 and FSDP8": 90.1,
    "13B, 8 H200, TP4 and FSDP2 (June)": 31.5,
    "13B, 32 H200, TP4 and FSDP8 (June)": 23.2,
    "13B, 64 H200, TP4 and FSDP16 (June)": 21.8,
    "13B, 128 H200, TP4 and FSDP32 (June)": 21.1,
    "13B, 160 H200, TP4 and FSDP40 (June)": 21.0,
    "70B, 8 H200, TP4 and FSDP2 (June)": 129.8,
    "70B, 32 H200, TP4 and FSDP8 (June)": 90.1,
    "70B, 64 H200, TP4 and FSDP16 (June)": 83.5,
    "70B, 96 H200, TP4 and FSDP24 (June)": 81.5,
    "70B, 128 H200, TP4 and FSDP32 (June)": 80.2,
    "70B, 160 H200, TP4 and FSDP40 (June)": 79.9,
}

CASES: tuple[Held, ...] = (*_torchtitan(), *_kempner())
