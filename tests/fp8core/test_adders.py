"""accumulate: the model of an FP8 unit's register, with and without promotion."""

from __future__ import annotations

import pytest
import torch

from fp8core import E4M3FN, quantize
from fp8core.proof.adders import Register, accumulate


def codes(K: int, positive: bool, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """A [size, K] and B [K, size] of e4m3 values in float64, scaled tensorwise."""
    generator = torch.Generator().manual_seed(K)
    a, b = (torch.randn(size, K, generator=generator) for _ in range(2))
    a, b = (a.abs(), b.abs()) if positive else (a, b)
    return quantize(a, E4M3FN).qdata.double(), quantize(b, E4M3FN).qdata.double().t()


def one_by_one(a: list[float], b: list[float], promote: bool) -> float:
    """The model in Python's own floats, for one output element."""
    import math

    def cut(x: float, step: float) -> float:
        return math.trunc(x / step) * step

    def bit(x: float) -> float:
        return 2.0 ** (math.frexp(x)[1] - 1 - 13) if x else 1.0

    register, total = 0.0, 0.0
    for start in range(0, len(a), 32):
        products = [x * y for x, y in zip(a[start : start + 32], b[start : start + 32], strict=True)]
        step = bit(max(abs(v) for v in [*products, register]))
        register = sum(cut(v, step) for v in products) + cut(register, step)
        register = cut(register, bit(register))
        if promote and (start + 32) % 128 == 0:
            total, register = float(torch.tensor(total + register)), 0.0
    return float(torch.tensor(total + register))


@pytest.mark.parametrize("K", [1, 31, 128, 300, 512])
@pytest.mark.parametrize("promote_every", [0, 128])
def test_against_the_model_in_plain_python(promote_every: int, K: int) -> None:
    """Oracle: the definition, element by element."""
    for positive in (False, True):
        a, b = codes(K, positive, size=3)
        got = accumulate(a, b, Register(13, promote_every))
        for i in range(3):
            for j in range(3):
                assert got[i, j] == one_by_one(a[i].tolist(), b[:, j].tolist(), promote_every > 0)
