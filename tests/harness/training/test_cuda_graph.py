"""Recorded steps. Oracles: a tape of operators that refuses what CUDA refuses; a fake CUDA that notes each
call, against the order that torch.cuda documents.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import FakeGraphs
from operator_tape import OperatorTape
from tiny_lm import TinyLM, tokens
from torch import Tensor, nn

from harness.training import cuda_graph
from harness.training.setup import Setup, Trainee, prepare

if TYPE_CHECKING:
    from collections.abc import Callable


STEPS = cuda_graph.WARM_UP + 4


def trainee(make: Callable[[], nn.Module] = lambda: TinyLM(dropout=0.2), **changes: Any) -> Trainee:
    """Trainee with the same weights on every call."""
    torch.manual_seed(0)
    model = make()
    made = Setup(**({"model": "tiny", "batch": 4, "seq": 8, "compute": "fp32", "graph": True} | changes))
    return prepare(made, "cpu", model.to(made.weight_dtype))


def batches(accumulation: int = 1, steps: int = STEPS) -> list[list[tuple[Tensor, ...]]]:
    return [[tokens(step * accumulation + i) for i in range(accumulation)] for step in range(steps)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :4], r"a batch of \[4, 4\] torch.int64; recorded was \[4, 8\] torch.int64"),
        (lambda x: x[:1], r"a batch of \[1, 8\]"),  # which copy_ would repeat
        (lambda x: x.int(), r"a batch of \[4, 8\] torch.int32"),  # and this convert
    ],
)
def test_a_batch_of_another_kind_is_refused(change: Any, message: str) -> None:
    fed = batches()
    with (
        cuda_graph.recorded(trainee(), fed[: cuda_graph.WARM_UP], OperatorTape()) as step,
        pytest.raises(ValueError, match=message),
    ):
        step([tuple(map(change, batch)) for batch in fed[3]])


def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    cuda = FakeGraphs()
    for name, fake in cuda.functions.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(
        cuda_graph, "_stream", functools.cache(cuda_graph._stream.__wrapped__)
    )  # no fake outlives its test
    return cuda


def noting(cuda: FakeGraphs, made: Trainee, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainee.step

    def noted(self: Trainee, batches: Any) -> Tensor:
        cuda.note(f"step, cycles {'collected' if gc.isenabled() else 'left'}")
        if cuda.refuses and cuda.log[-2].startswith("begin"):
            raise ValueError("no, for a reason")
        return step(self, batches)

    monkeypatch.setattr(Trainee, "step", noted)


def test_all_recordings_share_a_stream_which_is_waited_for_whatever_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Libraries keep a workspace for each stream; and what a failed warm-up still writes must not be given back yet."""
    cuda = fake_graphs(monkeypatch)
    for _ in range(3):
        with contextlib.suppress(ValueError), cuda_graph.CudaTape().beside():
            raise ValueError
    assert cuda.streams == 1
    assert cuda.log == ["side waits for default on default", "default waits for side on default"] * 3


def test_what_is_asked_of_cuda_and_on_which_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: PyTorch's notes on CUDA graphs: a warm-up on a side stream, between two waits, then the capture."""
    cuda, made, fed = fake_graphs(monkeypatch), trainee(), batches()
    noting(cuda, made, monkeypatch)
    cycle = nn.Identity()
    cycle.itself = [cycle]
    left = weakref.ref(cycle)
    del cycle
    with cuda_graph.recorded(made, fed[: cuda_graph.WARM_UP], cuda_graph.CudaTape()) as step:
        for one in fed[cuda_graph.WARM_UP : cuda_graph.WARM_UP + 2]:
            step(one)
    assert cuda.log == [
        "side waits for default on default",
        *["step, cycles collected on side"] * cuda_graph.WARM_UP,
        "default waits for side on default",
        "begin on side",
        "step, cycles left on side",
        "end on side",
        *["replay on default"] * 2,
        "synchronize on default",
        "reset on default",
    ]
    assert gc.isenabled()
    assert left() is None, "what autograd left in cycles is gone before the warm-up"


def test_a_recording_that_cuda_refuses_gives_its_stream_back_and_the_first_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, made = fake_graphs(monkeypatch), trainee()
    cuda.refuses = True
    noting(cuda, made, monkeypatch)
    with (
        pytest.raises(cuda_graph.CaptureError, match=r"as a CUDA graph: ValueError: no, for a reason$"),
        cuda_graph.recorded(made, batches()[: cuda_graph.WARM_UP], cuda_graph.CudaTape()),
    ):
        pytest.fail("was recorded")
    assert cuda.current == "default"
    assert gc.isenabled()
