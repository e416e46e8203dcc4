"""Models and machines for the tests of `harness.advise`, as plain data."""

from __future__ import annotations

from harness.advise.casts import CastCost, RecipeCost
from harness.advise.model import Linear, Model, VectorTraffic
from harness.advise.rates import MEASURED, Figure, Rates, rates_of
from harness.machine.hardware import named

NOTHING = VectorTraffic()
SIX = RecipeCost(
    "six",
    "kernels",
    {t: CastCost(6.0, forward=5.0 * (t != "grad_output")) for t in ("input", "weight", "grad_output")},
)


def round_h200() -> Rates:
    """Round numbers for an H200: 780 and 1300 TFLOP/s, 4.0 TB/s, casts at all of it."""
    figures = dict(rates_of(named("h200")).figures)
    for name, value in (("bf16", 780e12), ("fp8", 1300e12), ("bandwidth", 4.0e12), ("casts", 1.0)):
        figures[name] = Figure(value, 0.0, MEASURED, "round numbers")
    return Rates("round H200", figures)


def model(*sizes: tuple[str, int, int], tokens: int = 16384, **more: object) -> Model:
    """Linear layers (name, K, N), each with an input of its own."""
    layers = tuple(Linear(name, K, N, tokens, i) for i, (name, K, N) in enumerate(sizes))
    given: dict[str, object] = {
        "parameters": sum(K * N for _, K, N in sizes),
    }
    return Model("a model", layers, tokens, **{**given, **more})
