"""What a machine is expected to reach: each figure with its uncertainty and where it is from.

The best source wins, figure by figure: this machine's stored runs; what others published for this GPU; the nominal
peak times the share of it that GPUs typically reach. No figure is fitted to a whole training step: products come from
benchmarks of products, casts from benchmarks of casts, so that published training steps can test the prediction.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.machine.ceilings import BF16, TENSORWISE, Ceilings, TimedProduct
from harness.machine.hardware import DEVICES, named
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.machine.hardware import Device

MEASURED, PUBLISHED, TYPICAL = "measured", "published", "typical"
RESULT_BYTES = 2.0  # of an element of a product: bfloat16
LARGE = 2.0**28  # bytes: activations of a training step are copied at the bandwidth of tensors of this size

FIGURES: Mapping[str, str] = {
    "bf16": "FLOP/s of a long bf16 product",
    "fp8": "FLOP/s of a long FP8 product",
    "bandwidth": "bytes/s of a copy, read and write counted",
    "casts": "share of the bandwidth that fused cast kernels reach",
    "strided": "share of the bandwidth of generated code that writes a transposed result",
    "transposed": "share of the bandwidth of an operator that writes a transposed result",
    "attention": "FLOP/s of fused attention, forward and backward, counting what causal attention runs",
    "between": "bandwidth's share in the kernels between the products",
    "link": "bytes/s to the other GPUs of the node, one direction",
    "network": "bytes/s of a GPU to other nodes, one direction",
    "codes": "bytes/s of what is sent as FP8 codes, over those of bf16",
    "dispatch": "seconds of the CPU for an operator in eager mode",
    "launch": "seconds of the CPU for a kernel of compiled code",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A value, its relative standard error, and its source."""

    value: float
    spread: float
    kind: str  # MEASURED, PUBLISHED or TYPICAL
    source: str


@dataclass(frozen=True, slots=True)
class Rates:
    """The figures of one machine.

    Attributes:
        name: of the machine.
        figures: by the names of `FIGURES`; without "fp8" the GPU has no FP8 units.
        products: measured products of single shapes, which correct the closed form near them.
        has_fp8: its matrix units take FP8.
    """

    name: str
    figures: Mapping[str, Figure]
    products: tuple[TimedProduct, ...] = field(default=())

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    @property
    def has_fp8(self) -> bool:
        """Whether its matrix units take FP8."""
        return "fp8" in self.figures

    def shifted(self, name: str, sigmas: float) -> Rates:
        """Return these rates with one figure shifted by so many standard errors."""
        figure = self.figures[name]
        value = figure.value * (1 + figure.spread) ** sigmas
        return replace(self, figures={**self.figures, name: replace(figure, value=value)})


# What is known of GPUs in general; sources in docs/advise.md.
_BANDWIDTH = Figure(0.90, 0.05, TYPICAL, "a copy reached 4.3 of 4.8 TB/s on one H200; torchao assumes 0.92")
_GENERAL: Mapping[str, Figure] = {
    "casts": Figure(
        0.85, 0.12, TYPICAL, "transposing Triton casts of torchao reach 85 to 91 % of a copy on H100"
    ),
    "strided": Figure(
        0.64, 0.25, TYPICAL, "Inductor's cast with transpose: 1.4 of 2.2 TB/s (pytorch 133242)"
    ),
    "transposed": Figure(0.64, 0.25, TYPICAL, "as generated code: no operator's was published"),
    "between": Figure(1.0, 0.30, TYPICAL, "every byte counted once, at the bandwidth of a copy"),
    "network": Figure(0.8 * 50e9, 0.2, TYPICAL, "400 Gbit/s a GPU, 80 % of it"),
    "codes": Figure(1.0, 0.15, TYPICAL, "half the bytes in half the time; nobody published it"),
    "dispatch": Figure(8e-6, 0.4, TYPICAL, "Triton 9 to 11 us a call, a precompiled launch 2 to 4.5 us"),
    "launch": Figure(4e-6, 0.4, TYPICAL, "a precompiled launch takes 2 to 4.5 us"),
}
_RELATIVE_SPREAD = 0.12  # of another GPU with the same silicon: its clock under load is another
_LINK_SHARE = 0.8  # NCCL all-gather of large messages on 8 H100 reaches some 360 of 450 GB/s
# Share of the bf16 peak that FlashAttention-2 reaches: 35 % on Hopper in the forward pass (arXiv:2407.08608), of which
# the backward pass keeps 0.8, since it runs five products where two passes' worth are counted as four; 50 to 73 % on
# Ampere (arXiv:2307.08691). Elsewhere nobody published it; Hopper's share is taken.
_HOPPER, _AMPERE = 0.30, 0.50


def typical_share(rate: str) -> Figure:
    """The share of its peak that the best published product reaches: the median over the GPUs of the table."""
    shares = [r.tflops / d.tflops[rate] for d in DEVICES for r in d.reached if r.rate == rate and not r.of]
    return _median(shares, "published products")


def typical_ratio() -> Figure:
    """How many times faster than bf16 the best published FP8 product is: the median over the GPUs that have both."""
    best = [{r.rate: r.tflops for r in device.reached if not r.of} for device in DEVICES]
    found = _median(
        [rates["fp8"] / rates["bf16"] for rates in best if {"bf16", "fp8"} <= rates.keys()], "GPUs"
    )
    return replace(found, spread=max(found.spread, 0.08))


def _median(values: list[float], of: str) -> Figure:
    middle = statistics.median(values)
    return Figure(middle, statistics.stdev(values) / middle, TYPICAL, f"median of {len(values)} {of}")


def rates_of(device: Device, measured: Ceilings | None = None, *, network_gb_s: float | None = None) -> Rates:
    """The figures of a GPU of the peak table, measured ones where there are any.

    Args:
        device: entry of the table.
        measured: from stored runs of that machine.
        network_gb_s: 1e9 bytes/s of one GPU to other nodes.

    Raises:
        UsageError: no bf16 peak is known and none was measured.
    """
    figures = dict(_GENERAL)
    figures["bandwidth"] = replace(_BANDWIDTH, value=_BANDWIDTH.value * device.bandwidth_tb_s * 1e12)
    if measured is not None and (copied := measured.bandwidth(LARGE)) is not None:
        figures["bandwidth"] = Figure(copied, 0.03, MEASURED, "sweep=ceilings, copy of 256 MiB")
        if (across := measured.bandwidth(LARGE, "transpose")) is not None:
            figures["transposed"] = Figure(across / copied, 0.25, MEASURED, "sweep=ceilings, transposed copy")
        # Inductor fuses a step's casts into their neighbours; an operator alone says nothing of what they reach. All else is
        # measured, so that the figure of another GPU errs once for the code and once for the GPU.
        alone = figures["strided"]
        source = f"no row of these runs is of a compiled step's own casts: {alone.source}"
        figures["strided"] = replace(alone, spread=alone.spread * math.sqrt(2), source=source)
    for rate in ("bf16", "fp8"):
        found = _product_rate(rate, device, measured, figures["bandwidth"].value)
        if found is not None:
            figures[rate] = found
    if "bf16" not in figures:
        raise UsageError(
            f"{device.key}: no bf16 peak is known; measure it with sweep=ceilings and name the run by runs="
        )
    share = _HOPPER if device.capability.startswith(("9.", "10.", "gfx")) else _AMPERE
    spread = 0.2 if device.capability == "9.0" else 0.35
    peak, link = device.tflops["bf16"] * 1e12, device.link_gb_s
    figures["attention"] = Figure(
        share * peak, spread, TYPICAL, f"FlashAttention-2, {share:.0%} of the bf16 peak"
    )
    figures["link"] = Figure(_LINK_SHARE * link * 1e9, 0.15, TYPICAL, f"{_LINK_SHARE:.0%} of {link:g} GB/s")
    if network_gb_s is not None:
        figures["network"] = Figure(network_gb_s * 1e9, 0.1, PUBLISHED, "network_gb_s=")
    if measured is not None and measured.launch_s:
        figures["launch"] = Figure(measured.launch_s, 0.2, MEASURED, "sweep=ceilings, launch")
    return Rates(device.key, figures, measured.products if measured else ())


def long_rate(tflops: float, size: tuple[int, int, int], bandwidth: float) -> float:
    """FLOP/s of an endless sum, from a product of finite size: its result is written when the sum is done.

    >>> round(long_rate(585, (8192, 8192, 8192), 2.2e12) / 1e12)  # 1.88 ms, of which the result takes 0.06
    605
    """
    M, K, N = size
    seconds = 2.0 * M * K * N / (tflops * 1e12)
    return 2.0 * M * K * N / (seconds - RESULT_BYTES * M * N / bandwidth)


def _product_rate(rate: str, device: Device, measured: Ceilings | None, bandwidth: float) -> Figure | None:
    """Rate of long products: the best measured one, a published one, from the other rate, or a share of the peak."""
    own = [p for p in measured.products if (p.kind == BF16) == (rate == "bf16")] if measured else []
    if own := [p for p in own if p.kind in (BF16, TENSORWISE)] or own:
        best = max(own, key=lambda p: p.tflops)
        value = long_rate(best.tflops, (best.M, best.K, best.N), bandwidth)
        return Figure(value, 0.04, MEASURED, f"{best.M}x{best.K}x{best.N}, run {best.run_id}")
    if rate not in device.tflops:
        return None
    known = max((r for r in device.reached if r.rate == rate), key=lambda r: r.tflops, default=None)
    if known is not None:
        if known.of:  # of a relative, whose product is long-rated by the relative's own bandwidth
            bandwidth = _BANDWIDTH.value * named(known.of).bandwidth_tb_s * 1e12
        value = long_rate(known.tflops, known.size, bandwidth) if known.size else known.tflops * 1e12
        if known.of:
            return Figure(value, _RELATIVE_SPREAD, TYPICAL, f"of the {known.of}: {known.source}")
        return Figure(value, 0.08, PUBLISHED, known.source)
    if device.reached:  # one rate of this GPU says more about the other than other GPUs do
        other, ratio = device.reached[0], typical_ratio()
        value = other.tflops * 1e12 * (ratio.value if rate == "fp8" else 1 / ratio.value)
        return replace(ratio, value=value, source=f"{ratio.value:.2f} between FP8 and bf16, {ratio.source}")
    share, peak = typical_share(rate), device.tflops[rate]
    source = f"{share.value:.0%} of {peak:g}: {share.source}"
    return replace(share, value=share.value * peak * 1e12, source=source)
