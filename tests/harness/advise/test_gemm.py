"""One product's time. Oracle: the closed form, and neighbours whose times are planted."""

from __future__ import annotations

from dataclasses import replace

from harness.advise.layer import closed_form, product_seconds
from harness.advise.rates import rates_of
from harness.machine.ceilings import BF16, TimedProduct
from harness.machine.hardware import named


def test_several_measured_neighbours_bend_a_product_by_their_mean_and_not_by_their_sum() -> None:
    """Three products around it that all took 1.5 times the closed form: it takes no more than that."""
    plain = rates_of(named("h200"))
    at, around = (8192, 4096, 4096), [(8192, 4096, 5120), (8192, 5120, 4096), (8192, 4096, 3584)]
    slow = [TimedProduct(BF16, "output", *one, 1.5 * closed_form(plain, BF16, *one)) for one in around]
    bent = product_seconds(replace(plain, products=tuple(slow)), BF16, "output", *at)
    assert 1.4 < bent / closed_form(plain, BF16, *at) <= 1.5 + 1e-9
