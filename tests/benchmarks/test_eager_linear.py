"""Speed bar of Float8Linear on CPU; run by `make bench`, never by `make test`.

Bar: forward and backward of eager Float8Linear at 1024^3 is no slower than torchao's eager Float8Linear of the same
recipe. Both run in this process, in pairs of alternating order; the bar is on the median of the paired ratios. The
gain is in casts (three against six); both multiply by the same `torch._scaled_mm`.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from typing import Any

import pytest
import torch
from torch import nn

from fp8core import Float8Linear

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
torchao = pytest.importorskip("torchao.float8")

pytestmark = pytest.mark.benchmark_bar

SIZE = 1024
PAIRS = 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_eager_layer_against_torchao(benchmark: Any, name: str, dtype: torch.dtype) -> None:
    from torchao.float8.float8_linear import Float8Linear as TheirLinear

    base = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)
    theirs = TheirLinear.from_float(copy.deepcopy(base), torchao.Float8LinearConfig.from_recipe_name(name))
    layers = {"ours": Float8Linear.from_float(base, name), "torchao": theirs}
    x = torch.randn(SIZE, SIZE, dtype=dtype, requires_grad=True)
    grad = torch.randn(SIZE, SIZE, dtype=dtype)

    def step(layer: nn.Module) -> float:
        started = time.perf_counter()
        torch.autograd.grad(layer(x), (x, layer.weight), grad)
        return time.perf_counter() - started

    ratios: list[float] = []

    def pairs() -> None:
        for layer in layers.values():
            step(layer)
        for index in range(PAIRS):
            order = list(layers) if index % 2 else list(reversed(layers))
            seconds = {which: step(layers[which]) for which in order}
            ratios.append(seconds["torchao"] / seconds["ours"])

    benchmark.pedantic(pairs, rounds=1, iterations=1)
    ratio = statistics.median(ratios)
    benchmark.extra_info["torchao_over_ours"] = ratio
    low, high = min(ratios), max(ratios)
    print(f"\n{name}, {dtype}: torchao / ours = {ratio:.2f} (pairs {low:.2f} to {high:.2f}; bar 1.00)")
    assert ratio >= 1.0
