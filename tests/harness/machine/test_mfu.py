"""MFU. Oracles: PaLM's formula, the definition T_min / T_step, published figures formed again from their inputs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.machine.hardware import DEVICES, named
from harness.machine.mfu import (
    utilization,
)

H200 = named("h200")
WITH_FP8 = [device for device in DEVICES if "fp8" in device.tflops]
PUBLISHED = Path(__file__).parents[3] / "results" / "published"
amounts = st.floats(1e6, 1e18)


@given(flops=amounts, seconds=st.floats(1e-4, 1e4), device=st.sampled_from(DEVICES))
def test_all_in_bf16_it_is_palm_s(flops: float, seconds: float, device: object) -> None:
    """arXiv:2204.02311, appendix B: MFU = observed throughput over the peak throughput, to 1e-9."""
    found = utilization({"bf16": flops}, seconds, device, recomputed={})
    palm = flops / seconds / (device.tflops["bf16"] * 1e12)
    assert found.mfu_mixed == pytest.approx(palm, rel=1e-9)
    assert found.mfu_bf16_peak == pytest.approx(palm, rel=1e-9)
    assert found.hfu == pytest.approx(palm, rel=1e-9)
    assert found.fp8_share == 0


@given(
    device=st.sampled_from(WITH_FP8),
    parts=st.lists(
        st.tuples(st.sampled_from(["bf16", "e4m3", "e5m2"]), amounts, st.floats(0.01, 1.0)), min_size=1
    ),
    idle=st.floats(0, 10),
)
def test_what_really_runs_never_passes_100_percent(
    device: object, parts: list[tuple[str, float, float]], idle: float
) -> None:
    """A step is made of GEMMs, each at some share of the peak of its own dtype, and of time without any."""
    flops: dict[str, float] = {}
    seconds = idle
    for dtype, amount, share in parts:
        flops[dtype] = flops.get(dtype, 0.0) + amount
        seconds += amount / (share * device.peak_tflops(dtype) * 1e12)
    found = utilization(flops, seconds, device, formula="causal", recomputed={})
    assert found.mfu_mixed is not None
    assert found.mfu_mixed <= 1 + 1e-9
    assert not {"over_peak", "masked_counted"} & set(found.flags)
    assert found.mfu_fp8_peak <= found.mfu_mixed + 1e-9 <= found.mfu_bf16_peak + 2e-9


@pytest.mark.parametrize(
    ("device", "flops", "clock_mhz", "flags"),
    [
        ("h200", {"e4m3": 1200e12}, None, {"bf16_peak_passed"}),  # comparable with the literature, no share
        # 132 SMs x 1500 MHz x 8192 = 1622 TFLOP/s, below the published 1979
        ("h200", {"e4m3": 1700e12}, 1500, {"over_peak", "bf16_peak_passed"}),
        ("h200", {"e4m3": 1700e12}, 1980, {"bf16_peak_passed"}),
        ("h200", {"bf16": 1000e12}, None, {"over_published"}),
        ("h200", {"bf16": 1000e12}, 1980, set()),
        # GeForce cards double their FP8 rate with fp16 accumulation
        ("rtx_4090", {"e4m3": 500e12}, 2520, {"fp16_accumulation", "bf16_peak_passed"}),
        ("rtx_4090", {"e4m3": 800e12}, 2520, {"over_peak", "bf16_peak_passed"}),
    ],
)
def test_what_passes_a_peak_is_flagged(
    device: str, flops: dict[str, float], clock_mhz: float | None, flags: set[str]
) -> None:
    found = utilization(flops, 1.0, named(device), formula="gemm", recomputed={}, clock_mhz=clock_mhz)
    assert set(found.flags) == flags


@pytest.mark.parametrize(
    ("flops", "seconds", "formula"),
    [
        ({"bf16": 1.0}, 0.0, "palm"),
        ({"bf16": 1.0}, -1.0, "palm"),
        ({"bf16": 1.0}, math.nan, "palm"),
        ({"bf16": 1.0}, math.inf, "palm"),
        ({"bf16": -1.0}, 1.0, "palm"),
        ({"bf16": math.nan}, 1.0, "palm"),
        ({"bf16": 1.0}, 1.0, "lies"),
    ],
)
def test_what_cannot_be_is_refused(flops: dict[str, float], seconds: float, formula: str) -> None:
    with pytest.raises(ValueError, match=r"expected|must be|known"):
        utilization(flops, seconds, H200, formula=formula)


def row(**changed: object) -> dict[str, object]:
    resolved = {
        "flops_formula_id": "palm",
        "flops_causal": {"bf16": 3e14, "e4m3": 6e14},
        "flops_recomputed": {"palm": {"bf16": 2e14}, "causal": {"bf16": 1e14}},
        "checkpointing": "full",
        "tokens_per_step": 16384,
    }
    return {
        "status": "ok",
        "value": 1000.0,
        "unit": "ms",
        "flops": json.dumps({"bf16": 4e14, "e4m3": 6e14}),
        "resolved": json.dumps(resolved),
        "sample_clock_mhz": [1900.0, math.nan, 1980.0],
    } | changed


# llm-foundry's MPT-3b at 2048 and torchtitan's Llama 3 8B at 8192: 6 N + 12 L d T FLOPs a token; blocks that run in FP8.
MPT = (6 * 2_651_837_440 + 12 * 32 * 2560 * 2048, 6 * 32 * 12 * 2560**2)
LLAMA = (6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192, 6 * 32 * 218_103_808)
