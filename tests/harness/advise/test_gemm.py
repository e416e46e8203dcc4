"""One product's time. Oracle: published products of one machine, predicted from another product of it."""

from __future__ import annotations

from harness.advise.rates import PUBLISHED, Figure, Rates, long_rate, rates_of
from harness.machine.ceilings import BF16
from harness.machine.hardware import named

# machine: bandwidth (bytes/s), then (kind, M, K, N, TFLOP/s) of the product that the rate is taken from and of others
H100 = 0.92 * 3.35e12


def machine(bandwidth: float, anchor: tuple[str, int, int, int, float]) -> Rates:
    kind, M, K, N, tflops = anchor
    rate = Figure(long_rate(tflops, (M, K, N), bandwidth), 0.0, PUBLISHED, "")
    figures = dict(rates_of(named("h100")).figures)
    figures |= {"bf16" if kind == BF16 else "fp8": rate, "bandwidth": Figure(bandwidth, 0.0, PUBLISHED, "")}
    return Rates("a test", figures)
