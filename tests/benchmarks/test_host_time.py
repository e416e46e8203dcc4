"""Host time of an eager Float8Linear; run by `make bench`, never by `make test`.

Bars, of one forward and backward pass of a 16 x 16 layer, both arms in this process in rounds of alternating order:

    ours / nn.Linear    at most 2.2, kernels stubbed: what the library itself costs beside the GEMMs
    torchao / ours      at least 1.6, plain operators on a CPU
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from host_time import SIZE, BareLinear, paired_ratio, python_calls, stubbed_kernels, training_step
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


def linear() -> nn.Linear:
    return nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)


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


def test_floor_of_an_autograd_function() -> None:
    """What no layer of this design can go below: the same calls into torch, without a check or a choice."""
    base = linear()
    bare = BareLinear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
    with stubbed_kernels():
        ratio, mine, theirs = paired_ratio(training_step(bare), training_step(base))
    print(f"\nfloor: bare autograd.Function / nn.Linear = {ratio:.2f} ({mine:.0f} / {theirs:.0f} us)")
    assert ratio <= 2.2, "the bar would be out of reach"


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_small_layer_against_torchao(name: str) -> None:
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    torchao = pytest.importorskip("torchao.float8")
    from torchao.float8.float8_linear import Float8Linear as TheirLinear

    theirs = TheirLinear.from_float(linear(), torchao.Float8LinearConfig.from_recipe_name(name))
    ours = Float8Linear.from_float(linear(), name)
    ratio, slow, fast = paired_ratio(training_step(theirs), training_step(ours))
    print(f"\n{name}: torchao / ours = {ratio:.2f} ({slow:.0f} / {fast:.0f} us; bar 1.60)")
    assert ratio >= 1.6
