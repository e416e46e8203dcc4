"""One optimizer step recorded as a CUDA graph and replayed: the kernels of eager mode without the host's part.

A small model's step is bound by its launches: each costs the host microseconds. A graph is
launched as one. What the host decided while it was recorded - addresses, shapes, which branch - is fixed, so:

    inputs     lie in tensors of their own, into which the batch of each step is copied
    weights    and the optimizer's state stay where they are; a graph lives no longer than they do (`residency`)
    gradients  and all that comes and goes within a step lie in memory that belongs to the graph
    results    are read from the tensors of the recording: a loss holds until the next step
    decisions  that a step makes once - kernels compiled, launch parameters tuned, delayed scales in use - are made by
               `WARM_UP` steps before it, on a stream of their own

A step that waits for the device, or copies from the host, can't be recorded; the driver refuses it, and the reason is
that of a failed row. Random numbers differ from replay to replay as from step to step (PyTorch counts them on), and
activation checkpointing may rewind them while it is recorded (pytorch#162505, release 2.10).

What must not happen meanwhile: https://docs.nvidia.com/dl-cuda-graph/torch-cuda-graph/quick-checklist.html (2026-11-21).
"""

from __future__ import annotations

import functools
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from harness.store.errors import SpoiledError, one_line, out_of_memory
from harness.timing.clock import gc_paused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from harness.training.setup import Trainee

    Microbatches = Sequence[tuple[Tensor, ...]]

WARM_UP = 3  # dynamic scales, then delayed ones, then once more with everything in its place


class CaptureError(SpoiledError):
    """A step can't be recorded; the message says why.

    The allocator goes on to count a recording that the driver refused as under way: it gives nothing back any more, so
    that later arms of this process would run out of memory that is there (CUDACachingAllocator, `captures_underway`).
    """


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class CudaTape:
    """A CUDA graph of the current device: records its work and does it again, in the same memory."""

    def __init__(self) -> None:
        # One for all: libraries keep a workspace for each stream that they have met, and would for each recording.
        self._stream = _stream(torch.cuda.current_device())
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """On the stream that will be recorded: libraries keep handles and workspaces for each, and so do gradients.

        A node of autograd that accumulates into a parameter remembers the stream it was made on. One that lives on in
        a cycle, from a step on the default stream, would drag that stream into the recording (pytorch#180090).
        """
        gc.collect()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # whatever failed, memory given back on the current stream may still be written on this one
            current.wait_stream(self._stream)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Cycles are not collected inside: what a destructor frees on the device would spoil the recording."""
        # The outer context gives the stream back where the inner one fails to end a recording that was refused.
        with gc_paused(), torch.cuda.stream(self._stream), torch.cuda.graph(self._graph, stream=self._stream):
            yield

    def replay(self) -> None:
        """Launches the graph on the current stream."""
        self._graph.replay()

    def erase(self) -> None:
        """After the last replay has ended."""
        torch.cuda.synchronize()
        self._graph.reset()


def refused(device: str, experts: str) -> str:
    """Why a step of such a set-up can't be recorded; "" where it can be tried."""
    if torch.device(device).type != "cuda":
        return f"a step is recorded as a CUDA graph; a {device} has none"
    if experts != "hp":
        return (
            f"experts={experts}: groups that no single kernel multiplies are cut by sizes read on the host, which a CUDA "
            "graph can't record; experts=hp"
        )
    return ""


@contextmanager
def recorded(
    trainee: Trainee, warm_up: Sequence[Microbatches], tape: CudaTape
) -> Iterator[Callable[[Microbatches], Tensor]]:
    """Takes the steps of `warm_up`, records the one after them, and yields what takes it, and each further one.

    Args:
        trainee: in the state to continue from; its memory must stay where it is inside of the context.
        warm_up: batches of at least one step.
        tape: a fresh one.

    Yields:
        As `Trainee.step`, of batches of the same shapes and dtypes (else ValueError). The loss that it returns, the
        gradients and `grad_norm` are overwritten by the next step.

    Raises:
        CaptureError: it can't be recorded. Memory that runs out is raised as it is.
    """
    inputs = [tuple(part.clone() for part in batch) for batch in warm_up[0]]
    with tape.beside():
        for batches in warm_up:
            _fill(inputs, batches)
            trainee.step(inputs)
    trainee.optimizer.zero_grad(set_to_none=True)  # so that the recording makes gradients of its own
    loss = _record(trainee, inputs, tape)

    def step(batches: Microbatches) -> Tensor:
        _fill(inputs, batches)
        tape.replay()
        return loss

    try:
        yield step
    finally:
        tape.erase()


def _record(trainee: Trainee, inputs: Microbatches, tape: CudaTape) -> Tensor:
    cause: Exception | None = None  # ending a recording that was refused is refused as well, and says less
    try:
        with tape.recording(), _capturable(trainee.optimizer):
            try:
                return trainee.step(inputs)
            except Exception as error:
                cause = error
                raise
    except Exception as error:
        cause = cause or error
        if out_of_memory(cause):
            raise cause from None
        raise CaptureError(f"the step can't be recorded as a CUDA graph: {one_line(cause)}") from error


def _fill(inputs: Microbatches, batches: Microbatches) -> None:
    for into, batch in zip(inputs, batches, strict=True):
        for kept, part in zip(into, batch, strict=True):
            if kept.shape != part.shape or kept.dtype != part.dtype:
                raise ValueError(
                    f"a batch of {list(part.shape)} {part.dtype}; recorded was {list(kept.shape)} {kept.dtype}"
                )
            kept.copy_(part)


@contextmanager
def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Says that the optimizer's state lies on the device, as that of a fused one does, recorded or not."""
    for group in optimizer.param_groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in optimizer.param_groups:
            group["capturable"] = False
