"""Peak table. Oracle: arithmetic (SMs x clock x FLOP per clock and SM) against the published figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.machine.hardware import DEVICES, Device, named
from harness.store.errors import UsageError

BY_KEY = {device.key: device for device in DEVICES}


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.key)
def test_the_clock_of_a_published_figure_is_one_that_the_part_can_run_at(device: Device) -> None:
    """An implied clock would hide a sparse figure, were it not for the highest clock: twice the rate needs twice it."""
    assert device.clock_mhz <= device.max_clock_mhz
    assert 2 * device.clock_mhz > device.max_clock_mhz


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


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.key)
def test_every_entry_is_complete_and_dense(device: Device) -> None:
    assert set(device.tflops) == set(device.flop_per_clock_sm)
    assert device.source
    assert device.date
    assert device.bandwidth_tb_s > 0
    if "fp8" in device.tflops:
        assert device.tflops["fp8"] / device.tflops["bf16"] == pytest.approx(2.0, rel=0.02)


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
