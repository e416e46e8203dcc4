"""traffic: the declared bytes are those that the kernels move, and they keep the limits that speed rests on."""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from kernel_facts import calls

from fp8core.kernels import launch, ops
from fp8core.kernels.traffic import TRAFFIC

M, K = 128, 512


@pytest.mark.parametrize(
    ("operators", "limit"),
    [
        (("amax", "cast_both"), 6.0),
        (("cast_rowwise_both",), 6.0),
        (("cast_1x128_both",), 4.2),
        (("cast_128x128_both",), 4.2),
        (("cast_delayed_both",), 4.1),
        (("cast_both",), 4.0),  # the producer has the amax
    ],
)
def test_limits(operators: tuple[str, ...], limit: float) -> None:
    """Oracle: the byte counts that the project promises."""
    assert sum(TRAFFIC[name].bytes_per_element(2) for name in operators) <= limit


def test_table_is_complete() -> None:
    assert set(TRAFFIC) == set(ops.OPERATORS) - {"matmul"}
    assert TRAFFIC["cast_both"].bytes_per_element(4) == 6


@pytest.mark.parametrize("name", TRAFFIC)
def test_declared_is_moved(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: every load and store of the interpreter, counted by its mask.

    Exact for tensors of elements. Numbers of four bytes are scales (declared) and the maxima and scalars that caches
    answer (not declared): they may add at most 0.2 bytes at this small size.
    """
    if device.type != "cpu":
        pytest.skip("counts the interpreter's accesses; on a GPU, hardware counters do")
    from triton.runtime import interpreter

    real, moved = interpreter._interpreter, Counter[tuple[str, int | str]]()

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        moved["load", np.dtype(dtype).itemsize] += int(np.sum(mask)) * np.dtype(dtype).itemsize
        return real.load(pointers, mask, other, dtype)

    def store(pointers: Any, value: Any, mask: Any) -> Any:
        kind = (
            "codes" if value.dtype in (np.uint8, np.uint32) else value.dtype.itemsize
        )  # bytes, or words of 4
        moved["store", kind] += int(np.sum(mask)) * value.dtype.itemsize
        return real.store(pointers, value, mask)

    counting = types.SimpleNamespace(**{n: getattr(real, n) for n in dir(real) if not n.startswith("__")})
    counting.load, counting.store = load, store
    monkeypatch.setattr(interpreter, "_interpreter", counting)
    getattr(ops, name)(*calls(torch.randn(M, K).bfloat16())[name])

    declared, elements = TRAFFIC[name], M * K
    # A norm's weight is read, and its gradient's partial sum written, once by each program: no tensors of x's size.
    programs = launch.INTERPRETER.processors * launch.PROGRAMS_PER_PROCESSOR
    weight_reads = programs * K * 2 if "rms_norm" in name else 0
    one_byte = declared.codes + (declared.scales if "mx" in name else 0)
    assert moved["load", 2] - weight_reads == declared.read * 2 * elements
    assert moved["store", 2] == declared.written * 2 * elements
    assert moved["store", "codes"] == one_byte * elements
    partial_sums = programs * K * 4 if name.endswith("rms_norm_backward") else 0
    four_bytes = (moved["load", 4] + moved["store", 4] - partial_sums) / elements
    assert four_bytes <= (0 if "mx" in name else declared.scales) + 0.2
    assert moved["load", 1] == 0
