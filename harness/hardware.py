"""Peak rates of known GPUs, dense, as data; an unknown device is None (N/A) and never a fallback.

Each literal holds what the vendor publishes and, apart from it, what the silicon can do: SMs x clock x FLOP
per clock and SM. A test recomputes one from the other. `clock_mhz` is the clock that the published figure
implies, not the highest one: an H200 boosts to 1980 MHz, above the 1830 of its 989 TFLOP/s, so a short
burst may pass the published peak. `exceeds_peak` therefore judges at the clock that was measured.

The vendors print sparse rates in large type; the figures here are dense, half of those. Vendor pages were
read through the public repositories that quote them (ml-engineering, torchtitan, torchao; August 2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# What `flops` columns call a dtype -> the rate it runs at.
_RATE_OF = {
    **dict.fromkeys(("bf16", "fp16"), "bf16"),
    **dict.fromkeys(("fp8", "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"), "fp8"),
    "fp8_fp16acc": "fp8_fp16acc",
}
# Memory that CUDA reports differs by a few percent from the table's, by driver, ECC and reserved pages.
_MEMORY_TOLERANCE = 0.08
# A limit in force may be set some watts above the nominal one by the board maker.
_POWER_TOLERANCE = 0.02


@dataclass(frozen=True)
class Device:
    """One GPU model.

    Attributes:
        key: short name for reports.
        names: exact device names, as torch and NVML give them.
        memory_gib: total memory as CUDA reports it.
        max_power_w: highest power limit; a card of this name with a higher one is another part.
        sm_count: multiprocessors (AMD: compute units).
        clock_mhz: clock that the published figures imply.
        flop_per_clock_sm: dense FLOP per clock and SM by rate name. "bf16" and "fp8" accumulate in fp32;
            "fp8_fp16acc" stands where accumulation in fp16 is faster (GeForce).
        tflops: published dense TFLOP/s by rate name.
        bandwidth_tb_s: published memory bandwidth, 1e12 bytes/s.
        source: where the published figures stand.
        date: when that source was read.
        remark: what a reader must know.
    """

    key: str
    names: tuple[str, ...]
    memory_gib: float
    max_power_w: float
    sm_count: int
    clock_mhz: float
    flop_per_clock_sm: Mapping[str, int]
    tflops: Mapping[str, float]
    bandwidth_tb_s: float
    source: str
    date: str = "2026-08"
    remark: str = ""

    def peak_tflops(self, dtype: str) -> float | None:
        """Published dense peak of a dtype ("bf16", "e4m3", ...); None where there is none."""
        return self.tflops.get(_RATE_OF.get(dtype, ""))

    def derived_tflops(self, dtype: str, clock_mhz: float | None = None) -> float | None:
        """SMs x clock x FLOP per clock and SM, at a given clock or the published one."""
        rate = self.flop_per_clock_sm.get(_RATE_OF.get(dtype, ""))
        clock = self.clock_mhz if clock_mhz is None else clock_mhz
        return None if rate is None else self.sm_count * clock * 1e6 * rate / 1e12

    def exceeds_peak(
        self, flops: Mapping[str, float], seconds: float, clock_mhz: float | None = None
    ) -> bool | None:
        """Whether a time is impossible: below that of its FLOPs, each dtype at its own rate and the measured clock.

        None where that can't be told: no peak for a dtype, or no clock and a time below that of the published
        peaks, which a boost clock may explain.
        """
        published = [self.peak_tflops(dtype) for dtype in flops]
        limits = [self.derived_tflops(dtype, clock_mhz) for dtype in flops]
        rates = limits if clock_mhz is not None else published
        if None in published or None in limits:
            return None
        least = sum(f / (rate * 1e12) for f, rate in zip(flops.values(), rates, strict=True) if rate)
        if clock_mhz is not None:
            return seconds < least
        return False if seconds >= least else None


def lookup(name: str, memory_gib: float, power_limit_w: float | None = None) -> Device | None:
    """The table entry of a device, or None (N/A).

    Args:
        name: exact name from torch or NVML; part of a name never matches ("NVIDIA H200 NVL" is no H200,
            a MIG slice is no whole GPU). Case does not count.
        memory_gib: its memory, which tells parts of one name apart.
        power_limit_w: limit in force, where known. A lower one than the part's is the owner's choice and
            leaves the peak as it is; a higher one means another part.
    """
    wanted = name.casefold()
    for device in DEVICES:
        if (
            wanted in {n.casefold() for n in device.names}
            and abs(memory_gib / device.memory_gib - 1) <= _MEMORY_TOLERANCE
            and (power_limit_w is None or power_limit_w <= device.max_power_w * (1 + _POWER_TOLERANCE))
        ):
            return device
    return None


_AMPERE = MappingProxyType({"bf16": 2048})
_ADA = MappingProxyType({"bf16": 1024, "fp8": 2048})
# GeForce halves the rates that accumulate in fp32.
_ADA_GEFORCE = MappingProxyType({"bf16": 512, "fp8": 1024, "fp8_fp16acc": 2048})
_HOPPER = MappingProxyType({"bf16": 4096, "fp8": 8192})
_BLACKWELL = MappingProxyType({"bf16": 8192, "fp8": 16384})
_CDNA3 = MappingProxyType({"bf16": 2048, "fp8": 4096})

_A100 = "NVIDIA A100 data sheet, https://www.nvidia.com/en-us/data-center/a100/"
_H100 = "NVIDIA H100 page, https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "NVIDIA H200 page, https://www.nvidia.com/en-us/data-center/h200/"


def _a100(key: str, names: tuple[str, ...], memory_gib: float, power_w: float, bandwidth: float) -> Device:
    return Device(key, names, memory_gib, power_w, 108, 1410, _AMPERE, {"bf16": 312.0}, bandwidth, _A100)


DEVICES: tuple[Device, ...] = (
    _a100("A100 SXM 40GB", ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"), 39.4, 400, 1.555),
    _a100("A100 SXM 80GB", ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), 79.2, 400, 2.039),
    _a100("A100 PCIe 40GB", ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"), 39.4, 250, 1.555),
    _a100("A100 PCIe 80GB", ("NVIDIA A100 80GB PCIe",), 79.2, 300, 1.935),
    Device(
        key="L40S",
        names=("NVIDIA L40S",),
        memory_gib=45.0,
        max_power_w=350,
        sm_count=142,
        clock_mhz=2490,
        flop_per_clock_sm=_ADA,
        tflops={"bf16": 362.05, "fp8": 733.0},
        bandwidth_tb_s=0.864,
        source="NVIDIA L40S data sheet, https://www.nvidia.com/en-us/data-center/l40s/",
        remark="the data sheet's fp8 is 1.2 % above twice its bf16; 2520 MHz gives 366.4 and 732.9",
    ),
    Device(
        key="RTX 4090",
        names=("NVIDIA GeForce RTX 4090",),
        memory_gib=23.6,
        max_power_w=600,
        sm_count=128,
        clock_mhz=2520,
        flop_per_clock_sm=_ADA_GEFORCE,
        tflops={"bf16": 165.2, "fp8": 330.3, "fp8_fp16acc": 660.6},
        bandwidth_tb_s=1.008,
        source="NVIDIA Ada GPU architecture white paper, appendix A, through pages that quote it",
        remark="660.6 TFLOP/s accumulates in fp16; cards boost well above 2520 MHz; limits go up to 600 W",
    ),
    Device(
        key="H100 SXM",
        names=("NVIDIA H100 80GB HBM3",),
        memory_gib=79.2,
        max_power_w=700,
        sm_count=132,
        clock_mhz=1830,
        flop_per_clock_sm=_HOPPER,
        tflops={"bf16": 989.4, "fp8": 1978.9},
        bandwidth_tb_s=3.35,
        source=_H100,
    ),
    Device(
        key="H100 PCIe",
        names=("NVIDIA H100 PCIe",),
        memory_gib=79.2,
        max_power_w=350,
        sm_count=114,
        clock_mhz=1620,
        flop_per_clock_sm=_HOPPER,
        tflops={"bf16": 756.0, "fp8": 1513.0},
        bandwidth_tb_s=2.0,
        source=_H100,
    ),
    Device(
        key="H100 NVL",
        names=("NVIDIA H100 NVL",),
        memory_gib=93.6,
        max_power_w=400,
        sm_count=132,
        clock_mhz=1545,
        flop_per_clock_sm=_HOPPER,
        tflops={"bf16": 835.0, "fp8": 1671.0},
        bandwidth_tb_s=3.9,
        source=_H100,
        remark="one GPU; figures for the pair, and sparse ones, are in circulation under the same name",
    ),
    Device(
        key="H200 SXM",
        names=("NVIDIA H200",),
        memory_gib=139.8,
        max_power_w=700,
        sm_count=132,
        clock_mhz=1830,
        flop_per_clock_sm=_HOPPER,
        tflops={"bf16": 989.0, "fp8": 1979.0},
        bandwidth_tb_s=4.8,
        source=_H200,
    ),
    Device(
        key="H200 NVL",
        names=("NVIDIA H200 NVL",),
        memory_gib=139.8,
        max_power_w=600,
        sm_count=132,
        clock_mhz=1545,
        flop_per_clock_sm=_HOPPER,
        tflops={"bf16": 835.5, "fp8": 1670.5},
        bandwidth_tb_s=4.8,
        source=_H200 + " (1,671 and 3,341 with sparsity)",
    ),
    Device(
        key="B200",
        names=("NVIDIA B200",),
        memory_gib=178.4,
        max_power_w=1000,
        sm_count=148,
        clock_mhz=1856,
        flop_per_clock_sm=_BLACKWELL,
        tflops={"bf16": 2250.0, "fp8": 4500.0},
        bandwidth_tb_s=8.0,
        source="NVIDIA DGX B200 data sheet, https://www.nvidia.com/en-us/data-center/dgx-b200/",
        remark="72 PFLOP/s sparse fp8 of 8 GPUs; the bus width that CUDA 13 reports gives 7.67 TB/s",
    ),
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
        source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    ),
)
