"""Peak table. Oracle: arithmetic (SMs x clock x FLOP per clock and SM) against the published figures."""

from __future__ import annotations

import itertools

import pytest

from harness.hardware import DEVICES, Device, lookup

BY_KEY = {device.key: device for device in DEVICES}
PEAKS = [(device, rate) for device in DEVICES for rate in device.tflops]


@pytest.mark.parametrize(("device", "rate"), PEAKS, ids=[f"{d.key}-{r}" for d, r in PEAKS])
def test_published_peaks_follow_from_the_silicon(device: Device, rate: str) -> None:
    """Over 2.5 % apart one of the two is wrong: a sparse figure, another part's clock, or a slip."""
    assert device.derived_tflops(rate) == pytest.approx(device.peak_tflops(rate), rel=0.025)


def test_the_oracle_would_catch_sparse_and_neighbouring_figures() -> None:
    """Sparse rates, and an H200 filed under the NVL's clock, are far over 2.5 %."""
    h200 = BY_KEY["H200 SXM"]
    assert h200.derived_tflops("fp8") != pytest.approx(3958.0, rel=0.025)
    assert h200.derived_tflops("bf16", BY_KEY["H200 NVL"].clock_mhz) != pytest.approx(989.0, rel=0.025)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.key)
def test_every_entry_is_complete_and_dense(device: Device) -> None:
    assert set(device.tflops) == set(device.flop_per_clock_sm)
    assert device.source
    assert device.date
    assert device.bandwidth_tb_s > 0
    if "fp8" in device.tflops:
        assert device.tflops["fp8"] / device.tflops["bf16"] == pytest.approx(2.0, rel=0.02)


def test_keys_and_names_are_unique() -> None:
    assert len(BY_KEY) == len(DEVICES)
    names = [name.casefold() for device in DEVICES for name in device.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "memory_gib", "power_w", "key"),
    [
        ("NVIDIA H200", 139.8, 700.0, "H200 SXM"),
        ("NVIDIA H200", 140.4, 500.0, "H200 SXM"),  # capped by its owner
        ("NVIDIA H200", 139.8, None, "H200 SXM"),  # NVML not there
        ("NVIDIA H200 NVL", 139.8, 600.0, "H200 NVL"),
        ("NVIDIA L40S", 44.4, 350.0, "L40S"),
        ("nvidia l40s", 45.0, 350.0, "L40S"),
        ("NVIDIA H100 80GB HBM3", 79.1, 700.0, "H100 SXM"),
        ("NVIDIA H100 PCIe", 79.6, 350.0, "H100 PCIe"),
        ("NVIDIA H100 NVL", 93.0, 400.0, "H100 NVL"),
        ("NVIDIA A100-SXM4-40GB", 39.39, 400.0, "A100 SXM 40GB"),
        ("NVIDIA A100 80GB PCIe", 79.1, 300.0, "A100 PCIe 80GB"),
        ("NVIDIA GeForce RTX 4090", 23.5, 450.0, "RTX 4090"),
        ("NVIDIA B200", 178.4, 1000.0, "B200"),
        ("AMD Instinct MI300X", 191.98, None, "MI300X"),
    ],
)
def test_known_devices_are_found(name: str, memory_gib: float, power_w: float | None, key: str) -> None:
    device = lookup(name, memory_gib, power_w)
    assert device is not None
    assert device.key == key


@pytest.mark.parametrize(
    ("name", "memory_gib", "power_w"),
    [
        ("NVIDIA H200", 139.8, 1000.0),  # a GH200-like part with a higher limit
        ("NVIDIA H200", 94.0, 700.0),  # another memory
        ("NVIDIA H200 MIG 1g.18gb", 17.6, None),
        ("NVIDIA H100", 94.0, 500.0),  # a customer's own variant with HBM2e
        ("NVIDIA GH200 480GB", 94.5, 900.0),
        ("NVIDIA L40", 44.4, 300.0),
        ("NVIDIA GeForce RTX 4090 D", 23.5, 425.0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, 150.0),
        ("NVIDIA A800-SXM4-80GB", 79.2, 400.0),
        ("H200", 139.8, 700.0),
        ("", 139.8, 700.0),
    ],
)
def test_what_is_not_in_the_table_is_not_available(
    name: str, memory_gib: float, power_w: float | None
) -> None:
    """Substring matching would take several of these for a neighbour."""
    assert lookup(name, memory_gib, power_w) is None


def test_peaks_by_the_dtype_names_of_the_store() -> None:
    h200, rtx = BY_KEY["H200 SXM"], BY_KEY["RTX 4090"]
    assert [h200.peak_tflops(d) for d in ("bf16", "fp16", "e4m3", "e5m2", "fp8")] == [
        989,
        989,
        1979,
        1979,
        1979,
    ]
    assert h200.peak_tflops("fp32") is None
    assert h200.derived_tflops("fp32") is None
    assert BY_KEY["A100 SXM 80GB"].peak_tflops("e4m3") is None, "no fp8 on Ampere"
    assert (rtx.peak_tflops("e4m3"), rtx.peak_tflops("fp8_fp16acc")) == (330.3, 660.6)
    assert h200.peak_tflops("fp8_fp16acc") is None


def test_a_rate_above_the_silicon_is_flagged_at_the_measured_clock() -> None:
    """132 SMs x 1980 MHz x 4096 = 1070.5 TFLOP/s; at 1500 MHz 811.0."""
    h200 = BY_KEY["H200 SXM"]
    assert h200.exceeds_peak({"bf16": 1070.0e12}, 1.0, 1980.0) is False
    assert h200.exceeds_peak({"bf16": 1071.0e12}, 1.0, 1980.0) is True
    assert h200.exceeds_peak({"bf16": 900.0e12}, 1.0, 1500.0) is True, (
        "below the published peak, and still impossible"
    )
    mixed = {"e4m3": 1000e12, "e5m2": 1000e12, "bf16": 500e12}
    at_peak = 2000 / h200.derived_tflops("e4m3", 1980.0) + 500 / h200.derived_tflops("bf16", 1980.0)
    assert h200.exceeds_peak(mixed, at_peak * 1.01, 1980.0) is False, "each dtype at its own rate"
    assert h200.exceeds_peak(mixed, at_peak * 0.99, 1980.0) is True
    assert h200.exceeds_peak({"e4m3": 1071.0e12}, 1.0, 1980.0) is False, "judged by its own dtype"


def test_without_a_clock_only_the_possible_is_certain() -> None:
    h200 = BY_KEY["H200 SXM"]
    assert h200.exceeds_peak({"bf16": 989.0e12}, 1.0) is False
    assert h200.exceeds_peak({"bf16": 1000.0e12}, 1.0) is None, "a boost clock may explain it"
    assert h200.exceeds_peak({"fp32": 1e21}, 1.0, 1980.0) is None


def test_no_two_parts_answer_to_one_description() -> None:
    for one, other in itertools.permutations(DEVICES, 2):
        for name in one.names:
            assert lookup(name, one.memory_gib, one.max_power_w) is one
            assert name not in other.names
