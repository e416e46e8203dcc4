"""Peak rates of known GPUs, dense, as data; an unknown device is None (N/A) and never a fallback.

`devices.yaml` has an entry a GPU: what the vendor publishes and, apart from it, what the silicon can
do, SMs x clock x FLOP per clock and SM. To add one, add an entry. A test recomputes one from the other and fails over 2.5 %. Where two sources
say different things both stand there. `clock_mhz` is the clock that belongs to the published figure: the boost clock
where the vendor prints one, else the clock that the figure implies (`clock_implied`), which must lie below the highest
one. An H200 runs up to 1980 MHz, above the 1830 of its 989 TFLOP/s, so a short burst may pass the published peak;
`exceeds_peak` therefore judges at the clock that was measured.

The vendors print sparse rates in large type; the figures here are dense, half of those. Vendor pages were read through
the public repositories that quote them (ml-engineering, torchtitan, torchao).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.store.errors import UsageError, unknown
from harness.store.tables import beside

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


__all__ = ["DEVICES", "Device", "Other", "Reached", "lookup", "named", "of_env"]


def _device(entry: dict[str, Any]) -> Device:
    size = lambda of: {"size": tuple(of["size"])} if "size" in of else {}  # noqa: E731
    entry |= {name: MappingProxyType(entry[name]) for name in ("flop_per_clock_sm", "tflops")}
    entry["others"] = tuple(Other(**of) for of in entry.get("others", ()))
    entry["reached"] = tuple(Reached(**of | size(of)) for of in entry.get("reached", ()))
    return Device(**entry | {"names": tuple(entry["names"])})


DEVICES: tuple[Device, ...] = tuple(map(_device, beside(__file__, "devices.yaml")["devices"]))
# Memory that CUDA reports differs by a few percent from the table's, by driver, ECC and reserved pages.
_MEMORY_TOLERANCE = 0.08
# A limit in force may be set some watts above the nominal one by the board maker.
_POWER_TOLERANCE = 0.02


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


def of_env(env: Mapping[str, Any]) -> Device | None:
    """The table entry of the GPU of a stored environment; None for a CPU and for what is not in the table."""
    name, memory = env.get("gpu"), env.get("gpu_memory_gib")
    return lookup(name, memory, env.get("power_limit_w")) if name and memory else None


def named(text: str) -> Device:
    """The device that a person means by "h200", "H200 SXM", "rtx-4090" or its exact name.

    Blanks, underscores, hyphens and case do not count. A short name stands for the form that most people have: the SXM
    board where there are several.

    Raises:
        UsageError: a part of names, which are given; or not in the table, with the nearest.
    """
    keys = _spoken()
    plain = _plain(text)
    found = keys.get(plain)
    if found is not None:
        return found
    candidates = [device.key for device in DEVICES if len(plain) > 1 and plain in _plain(device.key)]
    if candidates:
        raise UsageError(
            f"gpu={text!r} is only a part of a name: {', '.join(candidates)}; give one of them whole"
        )
    raise unknown("gpu", text, ("_".join(name.lower().split()) for name in _short()))


def _short() -> dict[str, Device]:
    names: dict[str, Device] = {}
    for device in DEVICES:
        first = device.key.split()[0]
        if any(map(str.isdigit, first)):
            names.setdefault(first, device)  # "H100": the first H100 of the table, the SXM one
    return names | {device.key: device for device in DEVICES}


def _spoken() -> Mapping[str, Device]:
    exact = {name: device for device in DEVICES for name in device.names}
    return {_plain(name): device for name, device in (_short() | exact).items()}


def _plain(text: str) -> str:
    return "".join(character for character in text.casefold() if character not in " _-\t")
