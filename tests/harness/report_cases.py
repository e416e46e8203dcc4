"""Invented cases of each suite and whole invented runs, made of `report_fixtures`; the numbers come from a formula."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from report_fixtures import CPU, TIMING, Invented, absent, figure, write_run

from harness.store.case import Case, Scalar
from harness.store.errors import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from harness.store.measurement import Measurement


GEMM_ARMS = ("bf16_eager", "tensorwise_eager", "tensorwise_fast_eager", "rowwise_eager", "rowwise_fast_eager")
LINEAR_ARMS = tuple(
    f"{p}_{m}" for m in ("eager", "compile") for p in ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp")
)
SHAPES = (
    ("qkv", 4096, 6144),
    ("o", 4096, 4096),
    ("gate+up", 4096, 14336),
    ("down", 14336, 4096),
    ("k+v", 4096, 1024),
)


def cast_cases(invented: Invented, peak_gb_s: float, skip_compile: str = "") -> list[list[Measurement]]:
    """Casts of four sizes; small ones are bound by launch."""
    out = []
    for dtype in ("e4m3fn", "e5m2"):
        for granularity in ("tensorwise", "rowwise"):
            for m in (1024, 4096, 8192, 16384):
                case = Case.of("cast", {"dtype": dtype, "granularity": granularity, "M": m, "K": 4096})
                moved = m * 4096 * (2 + 2 + 1)
                eager = 0.02 + moved / (0.25 * peak_gb_s * 1e6)
                arms: dict[str, Mapping[str, object]] = {
                    "eager": {"ms": eager, "bytes": moved},
                    "eager:again": {"ms": eager, "bytes": moved, "baseline": "eager"},
                }
                if not skip_compile:
                    fast = 0.006 + moved / ((0.82 if granularity == "rowwise" else 0.6) * peak_gb_s * 1e6)
                    arms["compile"] = {"ms": fast, "bytes": moved, "baseline": "eager"}
                rows = invented.times(case, arms)
                rows += [figure(case, a, "mismatches", 0.0) for a in ("eager", "compile") if a in arms]
                if skip_compile:
                    rows.append(absent(case, "compile", "skipped", skip_compile, "eager"))
                else:
                    rows.append(
                        figure(
                            case,
                            "compile",
                            "compile_s",
                            2.1,
                            resolved={"compile_cache": "cold", "compile_graphs": 1},
                        )
                    )
                out.append(rows)
    return out


def gemm_cases(invented: Invented, bf16_tflops: float, fp8: bool = True) -> list[list[Measurement]]:
    """The three GEMMs of five layers at 8192 tokens; small K gains little from FP8."""
    out = []
    for layer, k, n in SHAPES:
        for role, (m_, k_, n_) in {
            "output": (8192, k, n),
            "grad_input": (8192, n, k),
            "grad_weight": (n, 8192, k),
        }.items():
            axes: dict[str, Scalar] = {
                "shape_set": "llama3_8b",
                "layer": layer,
                "role": role,
                "M": m_,
                "K": k_,
                "N": n_,
            }
            case = Case.of("gemm", axes)
            flops, moved = 2.0 * m_ * k_ * n_, 2.0 * (m_ * k_ + k_ * n_ + m_ * n_)
            base = 0.012 + flops / (bf16_tflops * 1e9)
            arms: dict[str, Mapping[str, object]] = {
                "bf16_eager": {"ms": base, "flops": {"bf16": flops}, "bytes": moved},
                "bf16_eager:again": {"ms": base, "flops": {"bf16": flops}, "baseline": "bf16_eager"},
            }
            if fp8:
                for arm, gain in zip(GEMM_ARMS[1:], (1.55, 1.78, 1.32, 1.52), strict=True):
                    ms = 0.015 + flops / (gain * bf16_tflops * 1e9)
                    resolved = {"backend": "torch", "a_dtype": "float8_e4m3fn", "b_dtype": "float8_e4m3fn"}
                    about = {
                        "ms": ms,
                        "flops": {"e4m3": flops},
                        "baseline": "bf16_eager",
                        "resolved": resolved,
                    }
                    arms[arm] = {**about, "bytes": moved / 2 + m_ * n_}
            rows = invented.times(case, arms)
            for arm in GEMM_ARMS[1:]:
                if fp8:
                    resolved = {"sqnr_bound_db": 28.3}
                    rows.append(
                        figure(case, arm, "sqnr_db", 28.5 + invented.random.gauss(0, 0.03), resolved=resolved)
                    )
                    rows.append(figure(case, arm, "sqnr_row_min_db", 27.2, resolved=resolved))
                else:
                    rows.append(
                        absent(case, arm, "skipped", "compute capability 8.0 has no FP8", "bf16_eager")
                    )
            out.append(rows)
    return out


def linear_cases(
    invented: Invented, bf16_tflops: float, skip: Mapping[str, str] | None = None
) -> list[list[Measurement]]:
    """Forward and backward of five layers, the whole square; FP8 eager loses to its casts on small layers."""
    skip = skip or {}
    out = []
    for layer, k, n in SHAPES:
        axes: dict[str, Scalar] = {"model": "llama3_8b", "layer": layer, "M": 8192, "K": k, "N": n}
        case = Case.of("linear", axes)
        flops = 6.0 * 8192 * k * n
        rows, arms = [], {}
        for arm in LINEAR_ARMS:
            precision, mode = arm.rsplit("_", 1)
            baseline = "" if precision == "bf16" else f"bf16_{mode}"
            if arm in skip:
                rows.append(absent(case, arm, "skipped", skip[arm], baseline))
                continue
            gain = {"bf16": 1.0, "tensorwise": 1.62, "rowwise": 1.36, "rowwise_with_gw_hp": 1.2}[precision]
            casts = (
                0.0
                if precision == "bf16"
                else (0.55 if mode == "eager" else 0.12) * (8192 * (k + n)) / (8192 * 12000)
            )
            fp8 = 0.0 if precision == "bf16" else (2 / 3 if precision.endswith("hp") else 1.0) * flops
            split = {d: f for d, f in (("bf16", flops - fp8), ("e4m3", fp8)) if f}
            expected = 0 if precision == "bf16" else 2 if precision.endswith("hp") else 3
            resolved = (
                {
                    "fp8_gemms": expected,
                    "backend": "torch",
                    "kernels": ["sm90_gemm_e4m3_e4m3_bf16", "vectorized_elementwise"],
                }
                if expected
                else {}
            )
            arms[arm] = {
                "ms": 0.03 + flops / (gain * bf16_tflops * 1e9) + casts,
                "baseline": baseline,
                "flops": split,
                "resolved": resolved,
            }
            if arm == "bf16_eager":
                arms["bf16_eager:again"] = {**arms[arm], "baseline": "bf16_eager"}
            if expected:
                bound = {
                    "sqnr_bound_db": {
                        "sqnr_db": 28.3,
                        "grad_input_sqnr_db": 24.37 if precision == "tensorwise" else 28.3,
                    }
                }
                for metric, value in (
                    ("sqnr_db", 28.5),
                    ("grad_input_sqnr_db", 24.6 if precision == "tensorwise" else 28.5),
                ):
                    value += invented.random.gauss(0, 0.03)
                    rows.append(figure(case, arm, metric, value, resolved=bound))
            if mode == "compile":
                rows.append(
                    figure(
                        case, arm, "compile_s", 6.5, resolved={"compile_cache": "cold", "compile_graphs": 1}
                    )
                )
        rows += invented.times(case, arms)
        if layer == "gate+up":
            rows += invented.times(
                case,
                {
                    a: {**v, "ms": float(str(v["ms"])) * 1.07, "rounds": 4}
                    for a, v in arms.items()
                    if ":" not in a
                },
                "sustained",
            )
        out.append(rows)
    return out


def ceiling_cases(invented: Invented, peak_gb_s: float, bf16_tflops: float) -> list[list[Measurement]]:
    """Copies of eight sizes and one large matmul in each precision."""
    out = []
    for power in range(20, 33, 2):
        for what, share in (("copy", 0.88), ("read", 0.93), ("transpose", 0.55)):
            case = Case.of("ceilings", {"what": what, "mib": 2 ** (power - 20)})
            ms = 0.003 + 2**power / (share * peak_gb_s * 1e6)
            out.append(invented.times(case, {"torch": {"ms": ms, "bytes": float(2**power)}}))
    for what, gain in (("mm_bf16", 1.02), ("mm_fp8_tensorwise", 1.9)):
        case = Case.of("ceilings", {"what": what, "cube": 8192})
        flops = 2.0 * 8192**3
        dtype = "e4m3" if what == "mm_fp8_tensorwise" else "bf16"
        out.append(
            invented.times(
                case, {"torch": {"ms": flops / (gain * bf16_tflops * 1e9), "flops": {dtype: flops}}}
            )
        )
    launch = Case.of("ceilings", {"what": "launch"})
    out.append([figure(launch, "torch", "launch_us", 3.2)])
    return out


def large_run(folder: Path, cases: int, **more: object) -> Path:
    """So many cases of GEMMs and layers, every third one a layer with the whole square; about 26 rows a case."""
    invented = Invented(rounds=8, samples=3)
    parts: list[list[Measurement]] = []
    for i in range(cases):
        m, k, n = 256 * (1 + i % 16), 512 * (1 + i // 16 % 16), 512 * (1 + i // 256)
        layer = i % 3 == 0
        case = Case.of(
            "linear" if layer else "gemm", {"shape_set": "custom", "layer": "custom", "M": m, "K": k, "N": n}
        )
        flops = (6.0 if layer else 2.0) * m * k * n
        arms: dict[str, Mapping[str, object]] = {}
        for j, arm in enumerate(LINEAR_ARMS if layer else GEMM_ARMS):
            fp8 = not arm.startswith("bf16")
            gain = 1.2 + 0.05 * j if fp8 else 1.0
            arms[arm] = {
                "ms": 0.012 + flops / (gain * 720e9),
                "flops": {"e4m3" if fp8 else "bf16": flops},
                "bytes": 2.0 * (m * k + k * n + m * n),
                "baseline": (f"bf16_{arm.rsplit('_', 1)[1]}" if layer else "bf16_eager") if fp8 else "",
                "resolved": {"fp8_gemms": 3} if fp8 and layer else {},
            }
        control = "bf16_eager"
        arms[f"{control}:again"] = {**arms[control], "baseline": control}
        rows = invented.times(case, arms)
        for arm in arms:
            for metric, value in (("sqnr_db", 28.5), ("sqnr_row_min_db", 27.0), ("accum_sqnr_db", 55.0)):
                if ":" not in arm:
                    rows.append(figure(case, arm, metric, value + invented.random.random()))
        if i % 200 == 0:
            parts.append([])
        parts[-1] += rows
    return write_run(folder, parts, **more)


def tiny_run(folder: Path, **more: object) -> Path:
    """The three GEMMs of one layer on an invented H200: enough where the contents do not matter."""
    return write_run(folder, gemm_cases(Invented(), 720.0)[:3], **more)


def gpu_run(folder: Path, seed: int = 0, **more: object) -> Path:
    """A whole quick run on an invented H200, with one wrong arm and one skipped one."""
    invented = Invented(seed)
    cases = cast_cases(invented, 4200.0) + gemm_cases(invented, 720.0) + linear_cases(invented, 690.0)
    cases += ceiling_cases(invented, 4200.0, 740.0)
    odd = Case.of(
        "gemm", {"shape_set": "custom", "layer": "odd", "role": "output", "M": 8192, "K": 4104, "N": 4096}
    )
    cases.append(
        invented.times(odd, {"bf16_eager": {"ms": 0.4, "flops": {"bf16": 1e11}}})
        + [
            absent(odd, arm, "skipped", "K=4104 is no multiple of 16, which FP8 GEMMs need", "bf16_eager")
            for arm in GEMM_ARMS[1:]
        ]
    )
    return write_run(folder, cases, **more)


def cpu_run(folder: Path, **more: object) -> Path:
    """A whole quick run on an invented CPU without a C++ compiler."""
    invented = Invented(
        seed=1, spread=0.03, clock_mhz=None, timing={**TIMING, "method": "perf_counter", "l2": "none"}
    )
    why = "no C++ compiler: torch.compile needs one"
    cases = cast_cases(invented, 12.0, skip_compile=why) + linear_cases(
        invented, 0.02, {a: why for a in LINEAR_ARMS if a.endswith("_compile")}
    )
    return write_run(folder, cases, **{"env": CPU, "run_id": "20260102T050607Z-0123456-ef01", **more})


KERNELS = {
    "bf16": {"fp8_gemm": 0.0, "bf16_gemm": 52.0, "cast": 0.0, "attention": 11.0, "other": 27.0},
    "tensorwise": {"fp8_gemm": 27.0, "bf16_gemm": 6.0, "cast": 9.0, "attention": 11.0, "other": 27.0},
    "rowwise": {"fp8_gemm": 31.0, "bf16_gemm": 6.0, "cast": 7.0, "attention": 11.0, "other": 27.0},
}


def train_cases(invented: Invented) -> list[list[Measurement]]:
    """Training steps of two models, eager and compiled; the small one is slower in FP8, one arm runs out of memory."""
    out = []
    for model, size in (("llama3_1b", 1.0), ("nanogpt_char", 0.03)):
        case = Case.of(
            "train", {"model": model, "batch": 8, "seq": 2048, "checkpointing": "none", "compute": "bf16"}
        )
        flops, tokens = 5.0e14 * size, 8 * 2048
        arms: dict[str, Mapping[str, object]] = {}
        rows = []
        for mode in ("eager", "compile"):
            for precision in ("bf16", "tensorwise", "rowwise"):
                arm, baseline = f"{precision}_{mode}", "" if precision == "bf16" else f"bf16_{mode}"
                fp8 = 0.0 if precision == "bf16" else 0.8 * flops
                gain = {"bf16": 1.0, "tensorwise": 1.28, "rowwise": 1.19}[precision]
                casts = 0.0 if precision == "bf16" else 14.0 if mode == "eager" else 4.0
                ms = 900.0 * size / gain * (1.35 if mode == "eager" else 1.0) + casts
                resolved = {"tokens_per_step": tokens, "recipe": "none" if precision == "bf16" else precision}
                if model == "llama3_1b" and arm == "rowwise_eager":
                    memory = {
                        "weights": 5 << 30,
                        "activations": 60 << 30,
                        "logits": 8 << 30,
                        "workspace": 4 << 30,
                    }
                    failed = absent(
                        case,
                        arm,
                        "failed",
                        "out of memory: tried to allocate 2.00 GiB",
                        baseline,
                        cause=Cause.OOM,
                    )
                    rows.append(replace(failed, resolved={**resolved, "memory": memory}))
                    continue
                split = {d: f for d, f in (("bf16", flops - fp8), ("e4m3", fp8)) if f}
                arms[arm] = {"ms": ms, "baseline": baseline, "flops": split, "resolved": resolved}
                rows += [
                    figure(
                        case, arm, "peak_memory_bytes", 40e9 * size * (1 if precision == "bf16" else 0.94)
                    ),
                    figure(case, arm, "reserved_memory_bytes", 44e9 * size),
                    figure(case, arm, "joules_per_token", 0.7e-3 * ms / tokens * 650),
                ]
                for name, ms_of in KERNELS[precision].items():
                    if ms_of and mode == "compile":
                        rows.append(figure(case, arm, "kernel_time_ms", ms_of * 9.0 * size, part=name))
                if mode == "compile":
                    cold = {"compile_cache": "cold", "compile_graphs": 1, "compile_graph_breaks": 0}
                    rows.append(
                        figure(case, arm, "compile_s", 41.0 + 10 * (precision != "bf16"), resolved=cold)
                    )
                    rows.append(figure(case, arm, "compile_s", 9.0, part="warm", resolved=cold))
        for baseline in ("bf16_eager", "bf16_compile"):
            arms[f"{baseline}:again"] = {**arms[baseline], "baseline": baseline}
        out.append(rows + invented.times(case, arms))
    return out
