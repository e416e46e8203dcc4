"""Generates rows as an H200 might give them, so that the report of a GPU can be looked at where there is none.

NOTHING HERE WAS MEASURED. Every row carries `generated_by` in its environment, by which the report names the rows
generated in its title, its notice, its picture and its conditions, and no comparison pairs them with measured ones.
Figures follow published ones, named beside them; noise comes from a seeded generator.

    PYTHONPATH=.:tests/harness python tests/harness/h200_rows.py build/h200.html
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curves_for_tests import whole_suite
from report_cases import SHAPES, cast_cases, ceiling_cases, gemm_cases
from report_fixtures import H200, Invented, absent, figure, write_run

from harness.store.arm import parse
from harness.store.case import Case
from harness.store.cause import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.store.measurement import Measurement

GENERATED_BY = "tests/harness/h200_rows.py"
ENV = H200 | {
    "generated_by": GENERATED_BY,
    "gpu_sm_count": 132,
    "gpu_l2_mib": 60,
    "max_sm_clock_mhz": 1980,
    "ecc": True,
    "mig": False,
    "cublas": "12.8.4",
    "torchao": "0.18.0",
    "transformer_engine": "2.9.0",
}
# Randn products of 8192^3 at 700 W: bf16 788 TFLOP/s, the copy 4.3 TB/s of 4.8 (shared/reference/performance.md, sections 1 and 2).
BF16_TFLOPS, COPY_GB_S = 788.0, 4300.0
# Forward and backward of a layer against bf16 of the same mode. Compiled fp8core: the model of performance.md, section 5
# (fused 1.30x eager, 1.37x compiled). torchao eager 0.69x by the same model; TE 1.58x of GEMM and cast on an H200 NVL
# (TransformerEngine, speedups.rst), less the rest of the layer. Rowwise between, by torchao's +10 % against +25 % of a step.
LAYER = {
    "tensorwise_eager": 1.30,
    "rowwise_eager": 1.16,
    "torchao_tensorwise_eager": 0.69,
    "torchao_rowwise_eager": 0.63,
    "te_tensorwise_eager": 1.41,
    "tensorwise_compile": 1.37,
    "rowwise_compile": 1.22,
    "rowwise_with_gw_hp_compile": 1.12,
    "torchao_tensorwise_compile": 1.31,
    "torchao_rowwise_compile": 1.16,
}
# Whole steps of Llama 3 8B at length 8192: 6,150 tokens/s in bf16, +25.0 % tensorwise, +10.1 % rowwise (torchao, training
# workflow page, 8 H100); 5,762 eager against 6,667 compiled (torchtitan, llama3_h100_202412). GPT-2: nanochat's +7.3 %.
STEP = {
    "llama3_8b": {
        "tensorwise_compile": 1.26,
        "rowwise_compile": 1.11,
        "torchao_tensorwise_compile": 1.25,
        "torchao_rowwise_compile": 1.10,
        "tensorwise_eager": 1.17,
        "rowwise_eager": 1.04,
        "te_tensorwise_eager": 1.21,
    },
    "gpt2": {
        "tensorwise_compile": 1.073,
        "rowwise_compile": 0.98,
        "torchao_tensorwise_compile": 1.06,
        "torchao_rowwise_compile": 0.97,
        "tensorwise_eager": 0.97,
        "rowwise_eager": 0.88,
        "te_tensorwise_eager": 0.93,
    },
}
MODELS: Mapping[str, dict[str, Any]] = {
    # 6 FLOP a parameter and token, 8.03e9 and 1.24e8 parameters; attention is left out
    "llama3_8b": {
        "ms": 1332.0,
        "tokens": 8192,
        "flops": 3.95e14,
        "seq": 8192,
        "batch": 1,
        "gib": 47.7,
        "gemms": 672,
    },
    "gpt2": {
        "ms": 98.0,
        "tokens": 32768,
        "flops": 2.4e13,
        "seq": 1024,
        "batch": 32,
        "gib": 21.0,
        "gemms": 144,
    },
}
KERNELS = {  # ms of a step of 1,000 ms by class: bf16, and what is left of it in FP8
    "bf16": {"bf16_gemm": 690.0, "attention": 150.0, "other": 140.0, "comm": 20.0},
    "fp8": {
        "fp8_gemm": 360.0,
        "bf16_gemm": 70.0,
        "cast": 55.0,
        "attention": 150.0,
        "other": 140.0,
        "comm": 20.0,
    },
}


def resolved_of(name: str, gemms: int) -> dict[str, object]:
    """What an arm's row says about what ran; an FP8 one with its proof."""
    arm = parse(name)
    if not (arm.has_fp8 or arm.peer):
        return {}
    due = gemms * 2 // 3 if arm.recipe.endswith("gw_hp") else gemms
    kernels = ["sm90_xmma_gemm_e4m3e4m3_bf16"]
    return {"fp8_gemms": due, "fp8_gemms_expected": due, "backend": "torch", "kernels": kernels}


def layers(invented: Invented) -> list[list[Measurement]]:
    """Layers of Llama 3 8B at 16,384 tokens, with both peers, their checks and a second pass under sustained load."""
    out = []
    for place, (layer, k, n) in enumerate(SHAPES):
        case = Case.of("linear", {"model": "llama3_8b", "layer": layer, "M": 16384, "K": k, "N": n})
        flops = 6.0 * 16384 * k * n
        base = 0.02 + flops / (BF16_TFLOPS * 1e9)
        arms: dict[str, dict[str, object]] = {}
        for mode, factor in (("eager", 1.03), ("compile", 1.0)):
            bf16 = {"ms": base * factor, "flops": {"bf16": flops}}
            arms[f"bf16_{mode}"] = bf16
            arms[f"bf16_{mode}:again"] = bf16 | {"baseline": f"bf16_{mode}"}
        rows = []
        for name, gain in LAYER.items():
            baseline = f"bf16_{parse(name).mode}"
            # k+v is a fifth of the others: casts and launches take what the product gains
            ms = float(str(arms[baseline]["ms"])) / (gain if k * n > 5e6 else 1 + (gain - 1) / 4 - 0.04)
            about = {
                "ms": ms,
                "baseline": baseline,
                "flops": {"e4m3": flops},
                "resolved": resolved_of(name, 3),
            }
            arms[name] = about
            recipe = parse(name).recipe
            # 24.4 dB of e5m2 gradients by the tensor, 28.4 dB of rows: results/published/cpu
            bounds = {"sqnr_db": 27.8, "grad_input_sqnr_db": 23.6 if recipe == "tensorwise" else 27.8}
            for metric, value in (
                ("sqnr_db", 28.4),
                ("grad_input_sqnr_db", bounds["grad_input_sqnr_db"] + 0.7),
            ):
                value += invented.random.gauss(0, 0.03)
                rows.append(figure(case, name, metric, value, resolved={"sqnr_bound_db": bounds}))
            if name.endswith("compile"):
                cold = {"compile_cache": "cold", "compile_graphs": 1}
                rows.append(figure(case, name, "compile_s", 6.0 + invented.random.random(), resolved=cold))
        rows += invented.times(case, arms)
        if place == 2:
            slow = {n: a | {"ms": 1.06 * float(str(a["ms"])), "rounds": 6} for n, a in arms.items()}
            rows += Invented(9, clock_mhz=1530.0).times(case, slow, "sustained")  # 700 W reached, clocks fall
        out.append(rows)
    return out


def steps(invented: Invented) -> list[list[Measurement]]:
    """Training steps of two models: one arm fails, one is skipped, and of one nothing can be said."""
    out = []
    for model, about in MODELS.items():
        axes = {"model": model, "batch": about["batch"], "seq": about["seq"], "checkpointing": "selective"}
        case = Case.of("train", axes | {"compute": "bf16"})
        tokens, flops = about["tokens"], about["flops"]
        arms: dict[str, dict[str, object]] = {}
        for mode, slower in (("eager", 1.157), ("compile", 1.0)):
            bf16 = {
                "ms": about["ms"] * slower,
                "flops": {"bf16": flops},
                "resolved": {"tokens_per_step": tokens},
            }
            arms[f"bf16_{mode}"] = bf16
            arms[f"bf16_{mode}:again"] = bf16 | {"baseline": f"bf16_{mode}"}
        for name, gain in STEP[model].items():
            baseline = f"bf16_{parse(name).mode}"
            resolved = {"tokens_per_step": tokens, "recipe": parse(name).recipe} | resolved_of(
                name, about["gemms"]
            )
            split = {"e4m3": 0.87 * flops, "bf16": 0.13 * flops}  # head and attention stay in bf16
            ms = float(str(arms[baseline]["ms"])) / gain
            arms[name] = {"ms": ms, "baseline": baseline, "flops": split, "resolved": resolved}
        rows = []
        for name, arm in arms.items():
            if parse(name).control:
                continue
            ms, is_fp8 = float(str(arm["ms"])), "e4m3" in str(arm["flops"])
            # The same memory in FP8 and bf16: 47.65 and 47.77 GB (torchao's page)
            rows.append(figure(case, name, "peak_memory_bytes", (about["gib"] + 0.1 * is_fp8) * 2**30))
            # 640 W of 700 drawn: an assumption
            rows.append(figure(case, name, "joules_per_token", 0.64 * ms / tokens))
            kernels = KERNELS["fp8" if is_fp8 else "bf16"]
            scale = ms / sum(kernels.values())
            rows += [
                figure(case, name, "kernel_time_ms", v * scale, part=part) for part, v in kernels.items()
            ]
            if name.endswith("compile"):
                cold = {"compile_cache": "cold", "compile_graphs": 1, "compile_graph_breaks": 0}
                rows.append(figure(case, name, "compile_s", 48.0, resolved=cold))
                rows.append(figure(case, name, "compile_s", 11.0, part="warm", resolved=cold))
        rows += invented.times(case, arms)
        # Rounds 8 % apart: the interval holds 1
        loud = {"ms": about["ms"] / 1.02, "baseline": "bf16_compile", "flops": {"e4m3": flops}}
        loud["resolved"] = {"tokens_per_step": tokens} | resolved_of("delayed_compile", about["gemms"])
        rows += Invented(5, spread=0.08).times(case, {"delayed_compile": loud})
        why = "CUDA out of memory: tried to allocate 7.83 GiB, of 139.80 GiB 4.11 GiB are free"
        rows.append(
            absent(case, "rowwise_with_gw_hp_compile", "failed", why, "bf16_compile", cause=Cause.OOM)
        )
        why = "MXFP8 needs compute capability 10.0, this is 9.0"
        rows.append(absent(case, "mxfp8_compile", "skipped", why, "bf16_compile", cause=Cause.UNSUPPORTED))
        out.append(rows)
    return out


def h200_runs(folder: Path) -> list[Path]:
    """Writes five runs, as the sweeps would; returns their folders."""
    invented = Invented(2026, rounds=12, spread=0.003)
    env = ENV | {"git_commit": "0" * 40}
    parts = {
        "linear": layers(invented),
        "gemm": gemm_cases(invented, BF16_TFLOPS),
        "cast": cast_cases(invented, COPY_GB_S),
        "ceilings": ceiling_cases(invented, COPY_GB_S, BF16_TFLOPS),
        "train": steps(invented),
        "divergence": [whole_suite()],
    }
    return [
        write_run(
            folder,
            cases,
            sweep=sweep,
            run_id=f"2026010{i}T030405Z-0000000-h200",
            env=env,
            env_id="generatedh2",
        )
        for i, (sweep, cases) in enumerate(parts.items(), 1)
    ]


def main(words: list[str]) -> int:
    """Writes the report of these rows as the HTML file that is named."""
    from harness.report import write_report

    with tempfile.TemporaryDirectory() as folder:
        write_report(h200_runs(Path(folder)), Path(words[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
