"""What the package brings is right before it is timed. Oracles: float64, and the harness's own tables."""

from __future__ import annotations

import torch
from fp8_harness_example.backend import BACKEND

import fp8core
from harness.peers import PEERS
from harness.suites import SUITES
from harness.training.models import MODELS


def test_the_harness_has_all_five() -> None:
    assert fp8core.BACKENDS["example_kernel"] is BACKEND
    assert fp8core.RECIPES["example_e4m3"].backend == "example_kernel"
    assert PEERS["example"].missing("cpu") is None
    assert MODELS["example_tiny"].layers == 1
    assert set(SUITES["example_transpose"].ARMS) == {"example_copy", "example_transposed"}


def test_the_product_of_small_integers_is_exact() -> None:
    a, b = torch.randint(-4, 5, (16, 32)).double(), torch.randint(-4, 5, (48, 32)).double()
    one = torch.ones(())
    codes = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    assert torch.equal(BACKEND.matmul(*codes, one, one, torch.float32, False).double(), a @ b.t())
