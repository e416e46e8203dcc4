"""Backend "torch" on a CPU with AMX, where torch 2.13 multiplies FP8 through oneDNN. On other CPUs its own loops answer."""

from __future__ import annotations

from threading import Barrier, Event, Thread, current_thread

import pytest
import torch

from fp8core import E4M3FN, quantize, scaled_mm
from fp8core.gemm import torch_mm


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_no_terms_add_up_to_zero_in_compiled_code(granularity: str) -> None:
    """Oracle: the definition. An expert without tokens has such a grad_weight; oneDNN left its memory unwritten."""
    qa = quantize(torch.zeros(16, 0), E4M3FN, granularity, dim=1)
    qb = quantize(torch.zeros(16, 0), E4M3FN, granularity, dim=1).t()
    torch.full((1024,), 7.0)  # memory that is given back and not empty
    product = torch.compile(lambda: scaled_mm(qa, qb, backend="torch"), backend="aot_eager")()
    assert product.shape == (16, 16)
    assert not product.any()


def test_onednn_is_off_within_a_product_and_back_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's own switch, read in the call."""
    seen = []
    real = torch._scaled_mm

    def spied(*args: object, **kwargs: object) -> torch.Tensor:
        seen.append(torch.backends.mkldnn.enabled)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", spied)
    a = quantize(torch.ones(16, 16), E4M3FN)
    assert torch.backends.mkldnn.enabled
    scaled_mm(a, a.t(), backend="torch")
    assert (seen, torch.backends.mkldnn.enabled) == ([False], True)
    with pytest.raises(ZeroDivisionError), torch_mm._WITHOUT_ONEDNN:
        1 / 0  # noqa: B018 - what fails within
    assert torch.backends.mkldnn.enabled


def test_threads_that_multiply_at_once_leave_onednn_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's switch. The first to begin ends first; with a switch of each thread's own it would stay off for good."""
    a = quantize(torch.ones(16, 16), E4M3FN)
    both = Barrier(2)
    first_left = Event()
    real = torch._scaled_mm
    on_in_the_second = []

    def spied(*args: object, **kwargs: object) -> torch.Tensor:
        if current_thread().name == "first":
            first_within.set()
            both.wait(60)
        else:
            both.wait(60)
            assert first_left.wait(60)
            on_in_the_second.append(torch.backends.mkldnn.enabled)
        return real(*args, **kwargs)

    def first() -> None:
        scaled_mm(a, a.t(), backend="torch")
        first_left.set()

    first_within = Event()
    monkeypatch.setattr(torch, "_scaled_mm", spied)
    thread = Thread(target=first, name="first")
    thread.start()
    assert first_within.wait(60)
    scaled_mm(a, a.t(), backend="torch")
    thread.join()
    assert torch.backends.mkldnn.enabled
    assert on_in_the_second == [False]
