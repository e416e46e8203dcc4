"""One product's time. Oracle: published products of one machine, predicted from another product of it."""

from __future__ import annotations

from dataclasses import replace

from harness.advise.layer import closed_form, product_seconds
from harness.advise.rates import PUBLISHED, Figure, Rates, long_rate, rates_of
from harness.machine.ceilings import BF16, Product
from harness.machine.hardware import named

# machine: bandwidth (bytes/s), then (kind, M, K, N, TFLOP/s) of the product that the rate is taken from and of others
H100 = 0.92 * 3.35e12


def machine(bandwidth: float, anchor: tuple[str, int, int, int, float]) -> Rates:
    kind, M, K, N, tflops = anchor
    rate = Figure(long_rate(tflops, (M, K, N), bandwidth), 0.0, PUBLISHED, "")
    figures = dict(rates_of(named("h100")).figures)
    figures |= {"bf16" if kind == BF16 else "fp8": rate, "bandwidth": Figure(bandwidth, 0.0, PUBLISHED, "")}
    return Rates("a test", figures)


def test_several_measured_neighbours_bend_a_product_by_their_mean_and_not_by_their_sum() -> None:
    """Three products around it that all took 1.5 times the closed form: it takes no more than that."""
    plain = rates_of(named("h200"))
    at, around = (8192, 4096, 4096), [(8192, 4096, 5120), (8192, 5120, 4096), (8192, 4096, 3584)]
    slow = [Product(BF16, "output", *one, 1.5 * closed_form(plain, BF16, *one)) for one in around]
    bent = product_seconds(replace(plain, products=tuple(slow)), BF16, "output", *at)
    assert 1.4 < bent / closed_form(plain, BF16, *at) <= 1.5 + 1e-9
