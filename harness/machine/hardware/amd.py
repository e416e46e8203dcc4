"""The peak table's GPUs by AMD: one literal each, as in `harness.machine.hardware.table`."""

from __future__ import annotations

from types import MappingProxyType

from harness.machine.hardware.device import Device, Other, Reached
from harness.machine.hardware.sources import MAMF, TITAN

_CDNA3 = MappingProxyType({"bf16": 2048, "fp8": 4096})
_CDNA4 = MappingProxyType({"bf16": 4096, "fp8": 8192})
_AMD = "https://www.amd.com/en/products/accelerators/instinct/"

AMD: tuple[Device, ...] = (
    Device(
        key="MI300X",
        names=("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        memory_gib=192.0,
        max_power_w=750,
        sm_count=304,
        clock_mhz=2100,
        flop_per_clock_sm=_CDNA3,
        tflops={"bf16": 1307.4, "fp8": 2614.9},
        bandwidth_tb_s=5.3,
        source=f"{_AMD}mi300/mi300x.html",
        capability="gfx942",
        max_clock_mhz=2100,
        link_gb_s=448.0,
        others=(
            Other("bf16", 1300.0, f"ml-engineering; {TITAN}", "rounded"),
            Other("fp8", 2610.0, "ml-engineering", "rounded"),
        ),
        reached=(Reached("bf16", 668.4, f"{MAMF}, with tunable operators"),),
    ),
    Device(
        key="MI325X",
        names=("AMD Instinct MI325X", "AMD Instinct MI325X OAM"),
        memory_gib=256.0,
        max_power_w=1000,
        sm_count=304,
        clock_mhz=2100,
        flop_per_clock_sm=_CDNA3,
        tflops={"bf16": 1307.4, "fp8": 2614.9},
        bandwidth_tb_s=6.0,
        source=f"{_AMD}mi300/mi325x.html",
        capability="gfx942",
        max_clock_mhz=2100,
        link_gb_s=448.0,
        others=(Other("bf16", 1300.0, TITAN, "rounded"),),
    ),
    Device(
        key="MI350X",
        names=("AMD Instinct MI350X", "AMD Instinct MI350X OAM"),
        memory_gib=288.0,
        max_power_w=1000,
        sm_count=256,
        clock_mhz=2200,
        flop_per_clock_sm=_CDNA4,
        tflops={"bf16": 2300.0, "fp8": 4600.0},
        bandwidth_tb_s=8.0,
        source=f"{_AMD}mi350/mi350x.html",
        capability="gfx950",
        max_clock_mhz=2200,
        link_gb_s=537.6,
        others=(
            Other(
                "bf16", 312.0, "torchtitan before pull request 4779", "an A100's, by fallback", valid=False
            ),
        ),
        date="2026-11",
    ),
    Device(
        key="MI355X",
        names=("AMD Instinct MI355X", "AMD Instinct MI355X OAM"),
        memory_gib=288.0,
        max_power_w=1400,
        sm_count=256,
        clock_mhz=2400,
        flop_per_clock_sm=_CDNA4,
        tflops={"bf16": 2500.0, "fp8": 5000.0},
        bandwidth_tb_s=8.0,
        source=f"{_AMD}mi350/mi355x.html",
        capability="gfx950",
        max_clock_mhz=2400,
        link_gb_s=537.6,
        others=(
            Other(
                "bf16", 2516.6, "arithmetic: 256 CUs (ROCm's GPU specifications) x 2400 MHz", "not rounded"
            ),
            Other("fp8", 5033.2, "arithmetic: 256 CUs (ROCm's GPU specifications) x 2400 MHz", "not rounded"),
            Other("fp8", 10100.0, "press material", "with sparsity", valid=False),
        ),
        date="2026-11",
    ),
)
