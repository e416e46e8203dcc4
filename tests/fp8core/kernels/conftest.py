"""Where kernel tests run, and what they share.

A test that asks for `device` launches kernels. In an ordinary process that takes a GPU, so such a test carries the
`gpu` marker and runs there or is skipped. In a process started with TRITON_INTERPRET=1, which
`test_in_interpreter.py` starts, the very same tests run on the CPU in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hard_inputs import hard_inputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent

Compare = Callable[[Any, Any], None]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not INTERPRETED and HERE in item.path.parents and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
        if INTERPRETED:  # Triton 3.6's interpreter turns loop bounds, arrays of one element, into integers
            item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"))


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """Where kernels run. NumPy, the interpreter's arithmetic, must not warn of the Inf and NaN that tests feed it."""
    with np.errstate(all="ignore"):
        yield torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def same_bytes() -> Compare:
    """Asserts equal shapes, strides, dtypes and bits of tensors or tuples of them; NaN compared as a class."""

    def check(got: Any, want: Any) -> None:
        got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
        assert len(got) == len(want)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            a = a.cpu()
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), f"output {i}"
            integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
            differs = (a.view(integers) != b.view(integers)) & ~(a.float().isnan() & b.float().isnan())
            where = differs.nonzero()[:4].tolist()
            assert not differs.any(), (
                f"output {i}: {int(differs.sum())} of {a.numel()} differ, first at {where}"
            )

    return check


@pytest.fixture(scope="session")
def all_bf16() -> torch.Tensor:
    """Every bfloat16: NaN, Inf, both zeros and all subnormals among them; [256, 256]."""
    return hard_inputs()["bf16"].view(256, 256)


@pytest.fixture(scope="session")
def hard_float32() -> torch.Tensor:
    """Values, ties and thresholds of all formats with their float32 neighbours; random bits; specials."""
    return hard_inputs()["fp32"]
