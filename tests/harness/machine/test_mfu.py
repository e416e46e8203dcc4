"""MFU. Oracles: PaLM's formula, the definition T_min / T_step, published figures formed again from their inputs."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.machine.hardware import DEVICES, named
from harness.machine.mfu import (
    floor_seconds,
    of_row,
    utilization,
)

H200 = named("h200")
WITH_FP8 = [device for device in DEVICES if "fp8" in device.tflops]
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


def test_the_whole_of_masked_attention_can_pass_100_percent_and_says_so() -> None:
    """Megatron-LM issue 831: half of T x T never runs; counting it makes 90 % into 117 %."""
    seconds = 1.0
    gemm, attention = 0.6 * 989e12, 0.3 * 989e12
    causal = utilization({"bf16": gemm + attention}, seconds, H200, formula="causal", recomputed={})
    palm = utilization({"bf16": gemm + 2 * attention}, seconds, H200, formula="palm", recomputed={})
    assert causal.mfu_mixed == pytest.approx(0.9)
    assert causal.flags == ()
    assert palm.mfu_mixed == pytest.approx(1.2)
    assert palm.flags == ("masked_counted",)


def test_each_dtype_against_its_own_peak() -> None:
    """One second of FP8 at its peak and one of bf16 at its own, in four seconds: half."""
    flops = {"e4m3": 0.75 * 1979e12, "e5m2": 0.25 * 1979e12, "bf16": 989e12}
    found = utilization(flops, 4.0, H200, formula="causal", tokens=4096, recomputed={})
    assert found.mfu_mixed == pytest.approx(0.5)
    assert found.mfu_bf16_peak == pytest.approx((1979 + 989) / 989 / 4)
    assert found.mfu_fp8_peak == pytest.approx((1979 + 989) / 1979 / 4)
    assert found.fp8_share == pytest.approx(1979 / (1979 + 989))
    assert found.tokens_per_s == 1024
    assert found.model_tflops == pytest.approx((1979 + 989) / 4)


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


def test_unknown_peaks_are_not_available_never_a_stand_in() -> None:
    for flops, device in (({"bf16": 1e15}, None), ({"fp32": 1e15}, H200), ({"e4m3": 1e15}, named("a100"))):
        found = utilization(flops, 1.0, device, formula="causal", tokens=8, recomputed={})
        assert (found.mfu_mixed, found.hfu, found.achievable) == (None, None, None)
        assert found.model_tflops == 1000
        assert found.tokens_per_s == 8
    assert utilization({"bf16": 1e15}, 1.0, None, recomputed={}).mfu_bf16_peak is None


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


def test_a_stored_step_has_a_line_for_each_count() -> None:
    palm, causal = of_row(row(), H200, {"bf16": 780.0, "fp8": 1300.0})
    assert (palm.formula, causal.formula) == ("palm", "causal")
    assert palm.mfu_mixed == pytest.approx(400 / 989 + 600 / 1979)
    assert causal.mfu_mixed == pytest.approx(300 / 989 + 600 / 1979)
    assert palm.hfu == pytest.approx(600 / 989 + 600 / 1979)
    assert causal.hfu == pytest.approx(400 / 989 + 600 / 1979)
    assert causal.achievable == pytest.approx(400 / 780 + 600 / 1300)
    assert palm.tokens_per_s == 16384


def test_stored_rows_without_time_or_counts() -> None:
    assert of_row(row(status="failed", value=None), H200) == ()
    assert of_row(row(flops="{}"), H200) == ()
    plain = of_row(row(resolved="{}"), H200)
    assert [u.formula for u in plain] == ["gemm"]
    assert plain[0].tokens_per_s is None
    old = of_row(row(resolved=json.dumps({"flops_formula_id": "palm", "checkpointing": "full"})), H200)
    assert old[0].hfu is None, "a run from before recomputation was stored"
    assert old[0].mfu_mixed is not None


def test_what_was_counted_while_it_ran_is_hfu_and_no_mfu() -> None:
    """A model of the user may recompute inside itself: its count holds that, and nobody can take it out again."""
    resolved = json.dumps({"flops_formula_id": "counted", "checkpointing": "none", "tokens_per_step": 16384})
    (found,) = of_row(row(resolved=resolved), H200, {"bf16": 780.0, "fp8": 1300.0})
    assert (found.mfu_mixed, found.mfu_bf16_peak, found.mfu_fp8_peak, found.model_tflops) == (None,) * 4
    assert found.hfu == pytest.approx(400 / 989 + 600 / 1979)
    assert found.achievable == pytest.approx(400 / 780 + 600 / 1300)
    assert found.tokens_per_s == 16384
    fast = utilization({"bf16": 1000e12}, 1.0, H200, formula="counted", recomputed={}, clock_mhz=1500)
    assert "over_peak" in fast.flags, "what ran cannot pass the peak either"


def test_recomputation_counts_for_the_hardware_and_not_for_the_model() -> None:
    flops, again = {"bf16": 600e12}, {"bf16": 200e12}
    found = utilization(
        flops, 1.0, H200, formula="causal", recomputed=again, achieved={"bf16": 800.0, "fp8": 1300.0}
    )
    assert found.mfu_mixed == pytest.approx(600 / 989)
    assert found.hfu == pytest.approx(800 / 989)
    assert found.achievable == pytest.approx(1.0)
    assert utilization(flops, 1.0, H200, formula="causal", recomputed=None).hfu is None, (
        "not known is not none"
    )


def test_against_measured_rates_e4m3_and_e5m2_are_both_fp8() -> None:
    achieved = {"bf16": 780.0, "fp8": 1300.0}
    found = utilization(
        {"e4m3": 650e12, "e5m2": 650e12}, 2.0, H200, formula="causal", recomputed={}, achieved=achieved
    )
    assert found.achievable == pytest.approx(0.5)
    assert utilization({"fp32": 1e12}, 2.0, H200, recomputed={}, achieved=achieved).achievable is None


def test_least_time_needs_the_rate_of_every_dtype_that_occurs() -> None:
    assert floor_seconds({"bf16": 2e12, "e4m3": 0.0}, {"bf16": 1.0}) == 2.0
    assert floor_seconds({"bf16": 2e12, "e4m3": 1.0}, {"bf16": 1.0}) is None
    assert floor_seconds({"bf16": 2e12}, {"bf16": None}) is None
    assert floor_seconds({}, {}) == 0
