"""Reasons of rows. Oracle: the exceptions that torch itself raises."""

from __future__ import annotations

import pytest
import torch

from harness.store.errors import one_line, out_of_memory


def test_any_error_is_one_line_with_its_name() -> None:
    assert one_line(ValueError("two\n  lines")) == "ValueError: two lines"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(one_line(ValueError("x" * 10_000))) < 600


def test_memory_that_ran_out_is_named_first() -> None:
    assert one_line(torch.OutOfMemoryError("CUDA out of memory.")) == "out of memory: CUDA out of memory."
    assert one_line(MemoryError()) == "out of memory: MemoryError"
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert one_line(raised.value).startswith("out of memory: ")
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
