"""How long one layer takes: its three products and its casts, in bf16 and in FP8.

    product = 2 M K N / P + 2 M N / BW    the sum at the rate of a long product, then the result (bfloat16) is written

and never less than its operands' bytes at the bandwidth, nor than a kernel's 2 us. P is the rate of one long product.
With P and BW of the same machine this gives published products from K = 512 to 16384 to within some 10 % (a test holds
it to that): short sums are slow because the result's bytes weigh more, not because the sum is. Where products of a
machine were measured, the measured ones nearby correct it, in the logarithm of M, K and N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.advise.rates import RESULT_BYTES
from harness.machine.ceilings import BF16, ROWWISE, TENSORWISE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.advise.casts import CastCost, RecipeCost
    from harness.advise.model import Linear
    from harness.advise.rates import Rates

FLOOR_S = 2e-6  # what the smallest kernel takes on the device
_NEAR = 2.0  # octaves over which a measured product speaks for its neighbours


def product_seconds(rates: Rates, kind: str, role: str, M: int, K: int, N: int) -> float:
    """Seconds of [M, K] @ [K, N]; `kind` as in `harness.machine.ceilings.TimedProduct`, `role` one of the three GEMMs."""
    plain = closed_form(rates, kind, M, K, N)
    own = [p for p in rates.products if p.kind == kind]
    if kind == ROWWISE and not own:
        own = [p for p in rates.products if p.kind == TENSORWISE]
    weight = total = 0.0
    for product in own:
        ratios = (product.M / M, product.K / K, product.N / N)
        distance = math.hypot(*map(math.log2, ratios)) + 0.5 * (product.role != role)
        if distance == 0:
            return product.seconds
        near = math.exp(-((distance / _NEAR) ** 2))
        weight += near
        of = closed_form(rates, product.kind, product.M, product.K, product.N)
        total += near * math.log(product.seconds / of)
    return plain * math.exp(total / max(weight, 1.0))


def closed_form(rates: Rates, kind: str, M: int, K: int, N: int) -> float:
    """See the module docstring."""
    operand, rate = (2.0, rates["bf16"]) if kind == BF16 else (1.0, rates["fp8"])
    result = RESULT_BYTES * M * N / rates["bandwidth"]
    moved = operand * (M * K + K * N) / rates["bandwidth"] + result
    return max(2.0 * M * K * N / rate + result, moved, FLOOR_S)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of one Linear layer, forward and backward, without recomputation.

    Attributes:
        layer: which.
        bf16, fp8: of each GEMM.
        casts: of each tensor, and of the input's gradient where it is rescaled; the input's is that of all layers
            that share it.
        forward_casts: of each tensor, what recomputation adds: the cast for the forward product alone.
    """

    layer: Linear
    bf16: Mapping[str, float]
    fp8: Mapping[str, float]
    casts: Mapping[str, float]
    forward_casts: Mapping[str, float]

    @property
    def speedup(self) -> float:
        """With a cast of its own."""
        return sum(self.bf16.values()) / (sum(self.fp8.values()) + sum(self.casts.values()))

    def recomputed(self, again: float) -> tuple[float, float, dict[str, float]]:
        """Products in bf16 and in FP8, and each cast, where so much of the forward pass runs again."""
        bf16, fp8 = (sum(part.values()) + again * part["output"] for part in (self.bf16, self.fp8))
        return bf16, fp8, {t: self.casts[t] + again * self.forward_casts[t] for t in self.casts}


def gemm_sizes(layer: Linear) -> dict[str, tuple[int, int, int]]:
    """M, K, N of each GEMM of a layer."""
    T, K, N = layer.tokens, layer.K, layer.N
    return {"output": (T, K, N), "grad_input": (T, N, K), "grad_weight": (N, T, K)}


def layer_cost(layer: Linear, recipe: RecipeCost | None, rates: Rates) -> LayerCost:
    """Cost of one layer; a GEMM that the recipe does not convert costs the same in both."""
    bf16 = {role: product_seconds(rates, BF16, role, *size) for role, size in gemm_sizes(layer).items()}
    fp8 = dict(bf16)
    elements = {
        "input": layer.tokens * layer.K,
        "weight": layer.K * layer.N,
        "grad_output": layer.tokens * layer.N,
    }
    casts, forward = dict.fromkeys(elements, 0.0), dict.fromkeys(elements, 0.0)
    if recipe is not None:
        for role in recipe.fp8_gemms:
            size = gemm_sizes(layer)[role]
            fp8[role] = product_seconds(rates, recipe.kind, role, *size) / recipe.product_share
        for tensor, cast in recipe.casts.items():
            casts[tensor], forward[tensor] = _cast_seconds(elements[tensor], cast, recipe, rates)
        if recipe.rescaled and "grad_input" in recipe.fp8_gemms:
            casts["grad_input"] = elements["input"] * recipe.rescaled / rates["bandwidth"]
            forward["grad_input"] = 0.0
    return LayerCost(layer, bf16, fp8, casts, forward)


def _cast_seconds(elements: int, cast: CastCost, recipe: RecipeCost, rates: Rates) -> tuple[float, float]:
    """Seconds of a tensor's casts, forward and backward together; and of what the forward product alone needs."""
    by_kernels = recipe.by == "kernels"  # they transpose in tiles
    speed = rates["bandwidth"] * (rates["casts"] if by_kernels else 1.0)
    across = rates["transposed" if recipe.by == "operators" else "strided"]
    moved = cast.total if by_kernels else cast.streamed + cast.strided / across
    both = max(elements * moved / speed, FLOOR_S * cast.kernels) if cast.total else 0.0
    return both, max(elements * cast.forward / speed, FLOOR_S) if cast.forward else 0.0
