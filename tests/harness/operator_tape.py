"""A CUDA graph's stand-in for the CPU: operators are noted with their memory, and a replay runs them again in it.

It keeps what a capture keeps and refuses what a capture refuses (PyTorch's notes on CUDA graphs):

* While it records nothing happens: memory that was there before is put back as it was, random numbers too, and what was
  made meanwhile holds NaN (bits all 1) until a replay has written it.
* A replay runs no Python of the step: operators alone, with the very tensors of the recording, Python numbers as they
  were then. An operator that returns new memory writes it into that of the recording.
* Refused is what would wait for the device or copy from the host: reading a value (`item`, `tolist`, `if tensor`),
  shapes that depend on values, a tensor made of Python numbers.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

aten = torch.ops.aten
REFUSED = {
    aten._local_scalar_dense.default,  # item(), float(), bool(), if
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten.lift_fresh.default,  # torch.tensor(number): of a GPU's tensor a copy from the host
}
# On a CPU these read memory without an operator.
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}


class RefusedError(RuntimeError):
    """Stand for the driver's error: operation not permitted when stream is capturing."""


class Call(NamedTuple):
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Tensor | None]  # of its results, by place: new memory, or None for a view of what was given
    onednn: bool  # torch's switch, by which an operator on a CPU chooses its kernel; a CUDA graph keeps the kernel itself


class _Capturing:
    """The current stream."""

    def is_capturing(self) -> bool:
        return True


class OperatorTape:
    """A tape of `harness.training.cuda_graph`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.replays = 0
        self.erased = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        random = torch.get_rng_state()
        notes = _Notes(self.calls)
        capturing = {"is_available": lambda: True, "is_current_stream_capturing": lambda: True}
        try:
            with (
                mock.patch.multiple(torch.cuda, **capturing),
                # A build for CUDA has an optimizer ask here
                mock.patch.object(torch.accelerator, "current_stream", _Capturing),
                _NoReads(),
                notes,
            ):
                yield
        finally:
            torch.set_rng_state(random)
            notes.undo()

    def replay(self) -> None:
        assert not self.erased
        self.replays += 1
        enabled = torch.backends.mkldnn.enabled
        try:
            with torch.no_grad():
                for func, args, kwargs, made, onednn in self.calls:
                    torch._C._set_mkldnn_enabled(onednn)
                    for kept, result in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                        if kept is not None:
                            kept.copy_(result)
        finally:
            torch._C._set_mkldnn_enabled(enabled)

    def erase(self) -> None:
        self.erased = True
        self.calls.clear()


class _NoReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise RefusedError(f"{func.__name__} is not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


class _Notes(TorchDispatchMode):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.new: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, Tensor) and t not in (Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # a subclass of tensors takes itself apart; its operators come here
        kwargs = kwargs or {}
        if func in REFUSED:
            raise RefusedError(f"{func} is not permitted when stream is capturing")
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        if func._schema.is_mutable:
            for tensor in _tensors((args, kwargs)):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.new:
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        results = func(*args, **kwargs)
        made = [
            t if isinstance(t, Tensor) and _address(t) not in given else None for t in tree_leaves(results)
        ]
        self.new |= {_address(t): t.untyped_storage() for t in made if t is not None}
        if func._schema.is_mutable or any(t is not None for t in made):
            self.calls.append(Call(func, args, kwargs, made, torch._C._get_mkldnn_enabled()))
        return results

    def undo(self) -> None:
        for storage, copy in self.before.values():
            storage.copy_(copy)
        for storage in self.new.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
