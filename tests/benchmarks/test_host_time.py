"""Time of an eager Float8Linear; run by `make bench`, never by `make test`.

Bars, of one forward and backward pass, both arms in this process and one thread, in rounds of alternating order:

    ours / nn.Linear    at most 2.2 at 16 x 16, kernels stubbed: what the library itself costs beside the GEMMs
    torchao / ours      at least 1.6 at 16 x 16, plain operators on a CPU; at least 1 at 1024^3, where both multiply by the
                        same operator and the gain is in casts (three against six)
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from host_time import SIZE, paired_ratio, python_calls, stubbed_kernels, training_step
from torch import nn

from fp8core import Float8Linear
from fp8core.recipe import recipe_named

pytestmark = pytest.mark.benchmark_bar


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """More would wait for each other in kernels that have nothing to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def linear(size: int = SIZE, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    return nn.Linear(size, size, bias=False, dtype=dtype)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_host_time_against_a_linear(name: str) -> None:
    base = linear()
    ours = Float8Linear.from_float(base, recipe_named(name).with_kernels("always"))
    with stubbed_kernels():
        calls = python_calls(training_step(ours)).total()
        ratio, mine, theirs = paired_ratio(training_step(ours), training_step(base))
    print(
        f"\n{name}: ours / nn.Linear = {ratio:.2f} ({mine:.0f} / {theirs:.0f} us, {calls} Python calls; bar 2.2)"
    )
    assert ratio <= 2.2


@pytest.mark.parametrize(
    ("size", "dtype", "bar"),
    [(SIZE, torch.bfloat16, 1.6), (1024, torch.bfloat16, 1.0), (1024, torch.float32, 1.0)],
    ids=str,
)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_a_layer_against_torchao(name: str, size: int, dtype: torch.dtype, bar: float) -> None:
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    torchao = pytest.importorskip("torchao.float8")
    from torchao.float8.float8_linear import Float8Linear as TheirLinear

    theirs = TheirLinear.from_float(linear(size, dtype), torchao.Float8LinearConfig.from_recipe_name(name))
    ours = Float8Linear.from_float(linear(size, dtype), name)
    steps = (training_step(layer, dtype) for layer in (theirs, ours))
    ratio, slow, fast = paired_ratio(*steps, *((1, 9) if size > SIZE else ()))
    print(f"\n{name}, {dtype}, {size}: torchao / ours = {ratio:.2f} ({slow:.0f} / {fast:.0f} us; bar {bar})")
    assert ratio >= bar
