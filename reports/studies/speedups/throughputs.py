"""Published throughputs of training steps with their conditions: what the prediction is held against. Plain data.

Nothing is fitted to them. Where the same run also gives a speedup it stands in `speedups.table` and is taken from
there. Tokens/s are of one GPU. Sources read in November 2026.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.advise.scale.job import ClusterJob
from speedups.case import BY_OP, Case
from speedups.libraries import TENSORWISE_AO
from speedups.table import CASES


@dataclass(frozen=True, slots=True)
class Published:
    """One published throughput.

    Attributes:
        key: short name.
        tokens_per_s: of one GPU.
        source: where it stands.
        step: what ran: a case of `speedups.table`, or a job.
        fp8: with the recipe of the case; else in bf16.
        memory_gb: published peak of a GPU, 1e9 bytes.
        assumed: a condition that was not published.
    """

    key: str
    tokens_per_s: float
    source: str
    step: Case | ClusterJob
    fp8: bool = False
    memory_gb: float | None = None
    assumed: str = ""


def _both(case: Case) -> tuple[Published, ...]:
    """bf16 and FP8 of a case whose throughput was published."""
    assert case.bf16 is not None
    assumed = "" if case.known else case.note
    return (
        Published(f"{case.key}: bf16", case.bf16, case.source, case, assumed=assumed),
        Published(case.key, case.bf16 * case.measured, case.source, case, fp8=True, assumed=assumed),
    )


def _once(found: tuple[Published, ...]) -> tuple[Published, ...]:
    """Several recipes share a run in bf16, which counts once."""
    first: dict[tuple[float, str], Published] = {}
    for one in found:
        first.setdefault((one.tokens_per_s, one.source), one)
    return tuple(first.values())


_BY_KEY = {case.key: case for case in CASES}
_8B, _8B_128 = _BY_KEY["8B, 8 H100, batch 2, tensorwise"], _BY_KEY["8B, 128 H100, batch 2, tensorwise"]
_70B, _70B_ASYNC = _BY_KEY["70B, TP8, tensorwise"], _BY_KEY["70B, TP8 async, tensorwise"]
_TITAN = "torchtitan, benchmarks/llama3_h100_202412"
_TRAINY = "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber, sampled at step 100"
_MFU = "KempnerForge, benchmarks/mfu_scaling, 2026-04-05"
_WEAK = "KempnerForge, benchmarks/weak_scaling_160gpu, 2026-06-30"


def _eager(case: Case) -> Case:
    return replace(case, plan={**case.plan, "compiled": False})


def _trainy(nodes: int) -> Case:
    plan = {"dp": 8 * nodes, "again": BY_OP}
    return Case("", "llama3_8b", "H200 SXM", TENSORWISE_AO, 1.0, _TRAINY, batch=2, plan=plan)


def _kempner(
    model: str, world: int, tp: int, batch: int, accumulation: int, compiled: bool = True
) -> ClusterJob:
    """Nodes of 4 H200 SXM, everything recomputed, length 4096, bf16 masters, gradients reduced in float32."""
    return ClusterJob(
        model=model,
        gpu="h200",
        world=world,
        batch=batch,
        seq=4096,
        accumulation=accumulation,
        tp=tp,
        node=4,
        weights="bf16",
        compiled=compiled,
    )


def _kempner_cases() -> tuple[Published, ...]:
    batches = {"llama_7b": (4, 2), "llama_13b": (4, 4), "llama3_70b": (2, 4)}
    short = {"llama_7b": "7B", "llama_13b": "13B", "llama3_70b": "70B"}
    found = []
    for source, rows in ((_MFU, _MFU_ROWS), (_WEAK, _WEAK_ROWS)):
        for model, world, tp, tokens_per_s, memory in rows:
            eager = source == _MFU and model == "llama_13b" and tp == 1
            job = _kempner(model, world, tp, *batches[model], compiled=not eager)
            split = f"TP{tp}" if tp > 1 else ""
            shard = f"FSDP{world // tp}" if world > tp else ""
            words = " and ".join(filter(None, (split, shard)))
            name = f"{short[model]}, {world} H200{', ' if words else ''}{words}{', eager' if eager else ''}"
            found.append(
                Published(
                    f"{name}{' (June)' if source == _WEAK else ''}",
                    tokens_per_s / world,
                    source,
                    job,
                    memory_gb=memory,
                )
            )
    return tuple(found)


# Model, GPUs, tensor parallelism, tokens/s of all GPUs, 1e9 bytes a GPU
_MFU_ROWS = (
    ("llama_7b", 1, 1, 10471, 80.7),
    ("llama_7b", 2, 1, 18728, 62.4),
    ("llama_7b", 2, 2, 13163, 57.8),
    ("llama_7b", 4, 1, 38983, 61.1),
    ("llama_7b", 4, 4, 25135, 39.4),
    ("llama_7b", 4, 2, 25980, 45.9),
    ("llama_7b", 8, 4, 44299, 32.7),
    ("llama_13b", 8, 1, 35405, 88.5),
    ("llama_13b", 8, 4, 27345, 45.1),
    ("llama_7b", 16, 4, 82988, 29.4),
    ("llama_13b", 16, 4, 53814, 39.2),
    ("llama_7b", 32, 4, 155917, 27.6),
    ("llama_13b", 32, 4, 104309, 36.3),
    ("llama3_70b", 32, 4, 17657, 93.2),
)
_WEAK_ROWS = (
    ("llama_13b", 8, 4, 29860, 45.0),
    ("llama_13b", 32, 4, 110373, 36.2),
    ("llama_13b", 64, 4, 216507, 34.8),
    ("llama_13b", 128, 4, 423306, 34.0),
    ("llama_13b", 160, 4, 534644, 33.9),
    ("llama3_70b", 8, 4, 3623, 128.5),
    ("llama3_70b", 32, 4, 18688, 93.2),
    ("llama3_70b", 64, 4, 35824, 86.8),
    ("llama3_70b", 96, 4, 52190, 84.6),
    ("llama3_70b", 128, 4, 69985, 83.6),
    ("llama3_70b", 160, 4, 85571, 82.9),
)

PUBLISHED: tuple[Published, ...] = (
    *_once(
        tuple(
            one
            for case in CASES
            if case.bf16 is not None and "without k and v" not in case.key
            for one in _both(case)
        )
    ),
    Published("8B, 8 H100, batch 2, eager: bf16", 5762, _TITAN, _eager(_8B)),
    Published("8B, 128 H100, batch 2, eager: bf16", 5605, _TITAN, _eager(_8B_128)),
    Published("70B, TP8, tensorwise, Dec 2024", 829, _TITAN, _70B, fp8=True),
    Published("70B, TP8 async, tensorwise, Dec 2024", 876, _TITAN, _70B_ASYNC, fp8=True),
    Published("8B, 32 H200, batch 2, tensorwise", 10938, _TRAINY, _trainy(4), True, assumed="checkpointing"),
    Published("8B, 64 H200, batch 2, tensorwise", 10753, _TRAINY, _trainy(8), True, assumed="checkpointing"),
    *_kempner_cases(),
)

# Published, and not predicted: what -> why.
LEFT_OUT: dict[str, str] = {
    "IBM and Meta, 2024-11: 1.8B, 8B, 70B, 405B on 128 to 512 H100": "batch and checkpointing were chosen for each "
    "precision and are not published",
    "Crusoe, 2025: 70B on 1600 to 1920 H200, up to 1856 B200": "only ratios; batch, length and context parallelism "
    "are not published",
    "torchtitan, 2024-12, table 2 and 6: 8B and 405B, 32,768 to 262,144 tokens": "context parallelism is not modelled",
    "torchtitan, 2024-12, table 5: 405B, 512 H100, PP8, 100 and 128 tokens/s": "the number of microbatches is not "
    "published, which a pipeline's bubble depends on",
    "Llama 4 Scout on GB200, torchao's 2-layer MoE on B200, KempnerForge's MoE": "experts are not modelled",
    "torchtitan, nvfp4.md: 8B on 4 Blackwell GPUs": "batch and GPU are not published",
    "Megatron-Bridge, performance summaries 25.09 to 26.08: Llama 3 on H100, B200, GB200, GB300": "FP8 alone, or bf16 with "
    "other parallelism; nothing in both precisions at the same settings but mixtures of experts",
    "Megatron-LM, issue 396: 13B, 0.34 and 0.24 s a step": "GPUs, batch and length are not published, nor the model's shape",
    "PaddleMIX, pull request 584: DiT, 1.64 times": "a diffusion model, whose shapes and batch are not published",
    "unsloth, pull request 6839: FLUX and Z-Image on B200, 0.76 and 0.38 times": "an adapter is trained, batch 1: no weight's gradient",
    "FP8-LM, COAT": "states, gradients or activations in FP8 too: more than the Linear layers",
    "KempnerForge, configs/train/7b_16gpu_fp8.toml": "a configuration without a figure",
    "nanochat, RFC of 2023, TransformerEngine": "ratios only, see reports/published/studies/speedups.md",
}
