"""Peak table. Oracle: arithmetic (SMs x clock x FLOP per clock and SM) against the published figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.machine.hardware import DEVICES, Device, Other, lookup, named, of_env
from harness.store.errors import UsageError

BY_KEY = {device.key: device for device in DEVICES}
PEAKS = [(device, rate) for device in DEVICES for rate in device.tflops]
OTHERS = [(device, other) for device in DEVICES for other in device.others]


@pytest.mark.parametrize(("device", "rate"), PEAKS, ids=[f"{d.key}-{r}" for d, r in PEAKS])
def test_published_peaks_follow_from_the_silicon(device: Device, rate: str) -> None:
    """Over 2.5 % apart one of the two is wrong: a sparse figure, another part's clock, or a slip."""
    assert device.derived_tflops(rate) == pytest.approx(device.peak_tflops(rate), rel=0.025)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.key)
def test_the_clock_of_a_published_figure_is_one_that_the_part_can_run_at(device: Device) -> None:
    """An implied clock would hide a sparse figure, were it not for the highest clock: twice the rate needs twice it."""
    assert device.clock_mhz <= device.max_clock_mhz
    assert 2 * device.clock_mhz > device.max_clock_mhz


@pytest.mark.parametrize(
    ("device", "other"), OTHERS, ids=[f"{d.key}-{o.what}-{o.value:g}" for d, o in OTHERS]
)
def test_figures_of_other_sources_are_kept_and_told_apart(device: Device, other: Other) -> None:
    """What is marked as no figure of this part fails the 2.5 % of the oracle; what stays in doubt is near."""
    own = device.bandwidth_tb_s if other.what == "bandwidth_tb_s" else device.derived_tflops(other.what)
    assert other.source
    assert own is not None
    assert other.value != (
        device.bandwidth_tb_s if other.what == "bandwidth_tb_s" else device.tflops[other.what]
    )
    if not other.valid:
        assert own != pytest.approx(other.value, rel=0.025)
        assert other.remark
    else:
        assert own == pytest.approx(other.value, rel=0.12)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.key)
def test_what_was_reached_lies_below_the_highest_clock_s_rate(device: Device) -> None:
    for reached in device.reached:
        limit = device.derived_tflops(reached.rate, device.max_clock_mhz)
        assert limit is not None
        assert 0.3 * limit < reached.tflops < limit
        assert reached.source


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("h200", "H200 SXM"),
        ("a100", "A100 SXM 80GB"),
        ("rtx_4090", "RTX 4090"),
        ("rtx-6000 ada", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("rtxpro6000blackwell", "RTX PRO 6000 Blackwell"),
        ("rtx 50-80", "RTX 5080"),
        ("h800", "H800 SXM"),
        ("nvidiab300sxm6ac", "B300"),
    ],
)
def test_a_person_s_name_of_a_gpu(text: str, key: str) -> None:
    assert named(text).key == key


@pytest.mark.parametrize(
    "text", ["", "h2000", "v100", "nvidia", "rtx 4080 super", "<script>", "h200; rm -rf /", "\x1b[31m"]
)
def test_a_name_that_is_none_is_refused_in_one_line_with_the_nearest(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        named(text)
    message = str(refused.value)
    assert "h200_sxm" in message
    assert "\n" not in message
    assert "\x1b" not in message
    if text == "h2000":
        assert "nearest: h200" in message


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("6000", ["RTX 6000 Ada", "RTX PRO 6000 Blackwell"]),
        ("nvl", ["H100 NVL", "H200 NVL"]),
        ("rtx_pro-6000", ["RTX PRO 6000 Blackwell"]),
    ],
)
def test_a_part_of_names_is_refused_with_the_candidates(text: str, keys: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        named(text)
    found = str(refused.value).split(": ")[-1].split(";")[0].split(", ")
    assert found == keys


def test_no_two_parts_answer_to_one_name() -> None:
    """Not to an exact one, and not without blanks, hyphens, underscores and case."""
    assert len(BY_KEY) == len(DEVICES)
    owners: dict[str, set[str]] = {}
    for device in DEVICES:
        for name in (device.key, *device.names):
            owners.setdefault(re.sub(r"[ -]", "", name.casefold()), set()).add(device.key)
    assert all(len(keys) == 1 for keys in owners.values())
    for device in DEVICES:
        for name in (device.key, *device.names):
            assert named(name) is named(re.sub(r"[ -]", "", name).swapcase()) is device
        assert all(lookup(n, device.memory_gib, device.max_power_w) is device for n in device.names)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.key)
def test_every_entry_is_complete_and_dense(device: Device) -> None:
    assert set(device.tflops) == set(device.flop_per_clock_sm)
    assert device.source
    assert device.date
    assert device.bandwidth_tb_s > 0
    if "fp8" in device.tflops:
        assert device.tflops["fp8"] / device.tflops["bf16"] == pytest.approx(2.0, rel=0.02)


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
        ("NVIDIA B200", 178.4, 1000.0, "B200"),
        ("AMD Instinct MI300X", 191.98, None, "MI300X"),
        ("NVIDIA GH200 480GB", 94.5, 900.0, "GH200 96GB"),
        ("NVIDIA GH200 144G HBM3e", 142.5, 700.0, "GH200 144GB"),
        ("NVIDIA GeForce RTX 5090", 31.36, 575.0, "RTX 5090"),
        ("NVIDIA B300 SXM6 AC", 268.6, 1100.0, "B300"),
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
        ("NVIDIA GH200", 94.5, 900.0),
        ("NVIDIA GH200 480GB", 142.5, 900.0),
        ("NVIDIA L40", 44.4, 300.0),
        ("NVIDIA H20", 139.8, 500.0),
        ("NVIDIA GeForce RTX 4080 SUPER", 15.99, 320.0),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, 600.0),
        ("NVIDIA GeForce RTX 4070", 15.6, 200.0),  # a 4070 Ti SUPER's memory
        ("AMD Instinct MI300A", 128.0, 550.0),
        ("NVIDIA GeForce RTX 4090 D", 23.5, 425.0),
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


def page_lines() -> list[str]:
    """The two tables of docs/hardware.md, from the data."""
    lines = [
        "| GPU | exact names | GiB | W | SMs | MHz | bf16 | FP8 | FP8, fp16 accumulation | TB/s | source |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for d in DEVICES:
        rates = [f"{d.tflops[r]:g}" if r in d.tflops else "none" for r in ("bf16", "fp8")]
        clock = f"{d.clock_mhz:g}" + (" *" if d.clock_implied else "")
        half = f"{d.tflops['fp8_fp16acc']:g}" if "fp8_fp16acc" in d.tflops else ""
        cells = [d.key, ", ".join(d.names), f"{d.memory_gib:g}", f"{d.max_power_w:g}", f"{d.sm_count}", clock]
        cells += [*rates, half, f"{d.bandwidth_tb_s:g}", f"{d.source}; {d.date}"]
        lines.append(f"|{'|'.join(cells)}|")  # blanks around would count as words of the page
    lines += ["", "| GPU | figure | also found | by | remark |", "|---|---|---|---|---|"]
    for d in DEVICES:
        own = {**d.tflops, "bandwidth_tb_s": d.bandwidth_tb_s}
        for other in d.others:
            cells = [
                d.key,
                f"{other.what} {own[other.what]:g}",
                f"{other.value:g}",
                other.source,
                other.remark,
            ]
            lines.append(f"|{'|'.join(cells)}|")  # blanks around would count as words of the page
    return lines


def test_the_page_lists_every_gpu_and_every_conflict() -> None:
    root = Path(__file__).parents[3]
    peaks, conflicts = "\n".join(page_lines()).split("\n\n")
    assert peaks in (root / "docs" / "hardware.md").read_text()
    assert conflicts in (root / "reports" / "published" / "studies" / "peaks.md").read_text()


def test_the_device_of_a_stored_environment_is_the_tables() -> None:
    h200 = next(device for device in DEVICES if "NVIDIA H200" in device.names)
    env = {"gpu": h200.names[0], "gpu_memory_gib": h200.memory_gib}
    assert of_env(env) is h200
    assert of_env(env | {"power_limit_w": 2 * h200.max_power_w}) is None
    assert of_env({"device": "cpu"}) is None
