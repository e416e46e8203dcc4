"""One GPU of the peak table: what its maker publishes and what its silicon can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# What `flops` columns call a dtype -> the rate it runs at.
_RATE_OF = {
    **dict.fromkeys(("bf16", "fp16"), "bf16"),
    **dict.fromkeys(("fp8", "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"), "fp8"),
    "fp8_fp16acc": "fp8_fp16acc",
}


@dataclass(frozen=True, slots=True)
class Other:
    """A figure that another source gives for the same quantity; neither is thrown away.

    Attributes:
        what: a rate name ("bf16", "fp8", ...) or "bandwidth_tb_s".
        value: in the unit of the table.
        source: who says so.
        remark: why they differ, where that is known.
        valid: False: no dense figure of this part with fp32 accumulation: sparse, of another part or mode, a slip.
    """

    what: str
    value: float
    source: str
    remark: str = ""
    valid: bool = True


@dataclass(frozen=True, slots=True)
class Reached:
    """The best matrix product that someone measured on this GPU and published.

    Attributes:
        rate: "bf16" or "fp8".
        tflops: 1e12 FLOP/s.
        source: who measured it.
        size: M, K and N; None where it is not said, or a mean over shapes.
        power_w: limit during the measurement; None: the part's own.
        of: key of the GPU it was really measured on, where that is a relative of the same silicon; "": this one.
    """

    rate: str
    tflops: float
    source: str
    size: tuple[int, int, int] | None = None
    power_w: float | None = None
    of: str = ""


@dataclass(frozen=True)
class Device:
    """One GPU model.

    Attributes:
        key: short name for reports.
        names: exact device names, as torch and NVML give them.
        memory_gib: total memory as CUDA reports it.
        max_power_w: highest power limit; a card of this name with a higher one is another part.
        sm_count: multiprocessors (AMD: compute units).
        clock_mhz: clock that belongs to the published figures.
        flop_per_clock_sm: dense FLOP per clock and SM by rate name. "bf16" and "fp8" accumulate in fp32;
            "fp8_fp16acc" stands where accumulation in fp16 is faster (GeForce).
        tflops: published dense TFLOP/s by rate name.
        bandwidth_tb_s: published memory bandwidth, 1e12 bytes/s.
        source: where the published figures stand.
        capability: compute capability, or AMD's name of the architecture.
        max_clock_mhz: highest SM clock.
        clock_implied: no source prints `clock_mhz`; it is what the figures imply.
        link_gb_s: bandwidth to the other GPUs of a node, one direction, 1e9 bytes/s of one GPU.
        others: what other sources say.
        reached: the best published matrix products.
        date: when the sources were read.
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
    capability: str
    max_clock_mhz: float
    clock_implied: bool = False
    link_gb_s: float = 32.0
    others: tuple[Other, ...] = ()
    reached: tuple[Reached, ...] = ()
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
