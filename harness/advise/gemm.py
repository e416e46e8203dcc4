"""How long one matrix product takes.

    t = 2 M K N / P + 2 M N / BW          the sum at the rate of a long product, then the result (bfloat16) is written

and never less than its operands' bytes at the bandwidth, nor than a kernel's 2 us. P is the rate of one long product.
With P and BW of the same machine this gives published products from K = 512 to 16384 to within some 10 % (a test holds
it to that): short sums are slow because the result's bytes weigh more, not because the sum is. Where products of a
machine were measured, the measured ones nearby correct it, in the logarithm of M, K and N.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.advise.rates import RESULT_BYTES
from harness.machine.ceilings import BF16, ROWWISE, TENSORWISE, Product

if TYPE_CHECKING:
    from harness.advise.rates import Rates

FLOOR_S = 2e-6  # what the smallest kernel takes on the device
_NEAR = 2.0  # octaves over which a measured product speaks for its neighbours
_FP8_BYTES, _BF16_BYTES = 1.0, 2.0


def product_seconds(rates: Rates, kind: str, role: str, M: int, K: int, N: int) -> float:
    """Seconds of [M, K] @ [K, N]; `kind` as in `harness.machine.ceilings.Product`, `role` one of the three GEMMs."""
    return closed_form(rates, kind, M, K, N) * _correction(rates, kind, role, M, K, N)


def closed_form(rates: Rates, kind: str, M: int, K: int, N: int) -> float:
    """See the module docstring."""
    operand = _BF16_BYTES if kind == BF16 else _FP8_BYTES
    result = RESULT_BYTES * M * N / rates["bandwidth"]
    moved = operand * (M * K + K * N) / rates["bandwidth"] + result
    rate = rates["bf16" if kind == BF16 else "fp8"]
    return max(2.0 * M * K * N / rate + result, moved, FLOOR_S)


def _correction(rates: Rates, kind: str, role: str, M: int, K: int, N: int) -> float:
    """Measured over closed form, of the measured products nearby; 1 where none is near."""
    weight = total = 0.0
    for product in rates.products:
        if product.kind != kind and not (
            kind == ROWWISE and product.kind == TENSORWISE and not _has(rates, ROWWISE)
        ):
            continue
        distance = math.dist(_place(product.M, product.K, product.N), _place(M, K, N))
        distance += 0.5 * (product.role != role)
        if distance == 0:
            return product.seconds / closed_form(rates, kind, M, K, N)
        near = math.exp(-((distance / _NEAR) ** 2))
        weight += near
        total += near * math.log(
            product.seconds / closed_form(rates, product.kind, product.M, product.K, product.N)
        )
    return math.exp(total / max(weight, 1.0)) if weight else 1.0


def _has(rates: Rates, kind: str) -> bool:
    return any(product.kind == kind for product in rates.products)


def _place(M: int, K: int, N: int) -> tuple[float, float, float]:
    return math.log2(M), math.log2(K), math.log2(N)


__all__ = ["BF16", "FLOOR_S", "ROWWISE", "TENSORWISE", "Product", "closed_form", "product_seconds"]
