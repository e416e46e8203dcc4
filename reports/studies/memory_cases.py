"""Published peak memory of training steps, with their conditions. Plain data; sources read in November 2026.

torchtitan logs `reserved_bytes.all.peak` in GiB (`torchtitan/components/metrics.py`), which torchao's script reads from
its log (`benchmarks/float8/training/parse_torchtitan_logs.py`) and its page prints as GB. KempnerForge divides by 1024**3
too (`kempnerforge/metrics/memory.py`) and prints GB. All figures here are therefore GiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fp8core.recipe import RECIPES
from harness.training.setup import Setup


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
    job: Setup
    pair: str = ""
    in_view: bool = False


_AO = "torchao, docs, training workflow"
_TITAN = "torchtitan, benchmarks/llama3_h100_202412"
# torch 2.7 and torchtitan of early 2025: the loss in float32, not compiled. Its head stays in bf16.
_STEP = Setup(
    "llama3_8b", 1, 8192, dp=8, reduce="fp32", checkpointing="by_op", compiled=True, loss="float32", left_out=("head",)
)  # fmt: skip
# torchtitan compiles the loss where it compiles the model since its pull request 1033 (2025-04)
_LATER = replace(_STEP, loss="fused")
_TWO = replace(_STEP, batch=2)


def _recipe(job: Setup, recipe: str) -> Setup:
    return replace(job, recipe=RECIPES[recipe], gather_fp8=recipe == "tensorwise")


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
        Held(name, mi300x, "compile", "bf16", 39.0, f"{_AO}, about 39 for all", _LATER, in_view=True),
        Held(name, b200, "compile", "bf16", 33.4, f"{_AO}, 33.4 to 33.9 for all", _LATER, in_view=True),
    )  # fmt: skip


_MFU = "KempnerForge, benchmarks/mfu_scaling, 2026-04-05"
_WEAK = "KempnerForge, benchmarks/weak_scaling_160gpu, 2026-06-30"
_BATCHES = {"llama_7b": (4, 2), "llama_13b": (4, 4), "llama3_70b": (2, 4)}  # and accumulation
_SHORT = {"llama_7b": "7B", "llama_13b": "13B", "llama3_70b": "70B"}
# Model, GPUs, tensor parallelism, GB a GPU
_MFU_ROWS = (
    ("llama_7b", 1, 1, 80.7),
    ("llama_7b", 2, 1, 62.4),
    ("llama_7b", 2, 2, 57.8),
    ("llama_7b", 4, 1, 61.1),
    ("llama_7b", 4, 4, 39.4),
    ("llama_7b", 4, 2, 45.9),
    ("llama_7b", 8, 4, 32.7),
    ("llama_13b", 8, 1, 88.5),
    ("llama_13b", 8, 4, 45.1),
    ("llama_7b", 16, 4, 29.4),
    ("llama_13b", 16, 4, 39.2),
    ("llama_7b", 32, 4, 27.6),
    ("llama_13b", 32, 4, 36.3),
    ("llama3_70b", 32, 4, 93.2),
)
_WEAK_ROWS = (
    ("llama_13b", 8, 4, 45.0),
    ("llama_13b", 32, 4, 36.2),
    ("llama_13b", 64, 4, 34.8),
    ("llama_13b", 128, 4, 34.0),
    ("llama_13b", 160, 4, 33.9),
    ("llama3_70b", 8, 4, 128.5),
    ("llama3_70b", 32, 4, 93.2),
    ("llama3_70b", 64, 4, 86.8),
    ("llama3_70b", 96, 4, 84.6),
    ("llama3_70b", 128, 4, 83.6),
    ("llama3_70b", 160, 4, 82.9),
)


def _kempner() -> tuple[Held, ...]:
    """Nodes of 4 H200 SXM, everything recomputed, length 4096, bf16 masters, gradients reduced in float32.

    Embedding and logits are whole under tensor parallelism; `F.cross_entropy` on bf16 logits.
    """
    found = []
    for source, rows in ((_MFU, _MFU_ROWS), (_WEAK, _WEAK_ROWS)):
        for model, world, tp, gb in rows:
            eager = source == _MFU and model == "llama_13b" and tp == 1
            batch, accumulation = _BATCHES[model]
            job = Setup(
                model, batch, 4096, dp=world // tp, tp=tp, node=4, accumulation=accumulation, compute="bf16",
                checkpointing="full", reduce="fp32", compiled=not eager, loss="native", unsplit_vocabulary=tp > 1,
            )  # fmt: skip
            split, shard = f"TP{tp}" if tp > 1 else "", f"FSDP{world // tp}" if world > tp else ""
            words = " and ".join(filter(None, (split, shard)))
            key = f"{_SHORT[model]}, {world} H200{', ' if words else ''}{words}{', eager' if eager else ''}"
            key += " (June)" if source == _WEAK else ""
            found.append(Held(key, f"{world} H200", "eager" if eager else "compile", "bf16", gb, source, job))
    return tuple(found)


CASES: tuple[Held, ...] = (*_torchtitan(), *_kempner())
