"""A trainee's memory, on its device only while it is needed.

Several arms of one case are timed in turns, but together they would not fit: each holds weights, gradients, two
moments and activations. So an arm gives its memory back at the end of its block and takes it again at the start of the
next one, in place: the parameters stay the objects that compiled code and the optimizer know, and only their storages
shrink to nothing and grow again. There is one rule for all models and devices, also where everything would have fit.

Entering puts back the same state each time: initial weights (kept once for all arms, `keep`), empty optimizer,
FP8 amaxes as they were, random numbers of the seed. So every block times the same steps.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8core import amax_state_dict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

    from harness.training.setup import Trainee


def keep(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name, in host memory."""
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}


class Residency:
    """Holds the memory of one trainee; `with residency():` it is there. It begins as given up.

    Args:
        trainee: whose memory; it must not be used outside of the context.
        initial: weights to put back, by name of parameter. Trainees of the same model may share them.
        device: of the random numbers.
    """

    def __init__(self, trainee: Trainee, initial: Mapping[str, Tensor], device: str) -> None:
        self._trainee, self._initial, self._device = trainee, initial, torch.device(device)
        model = trainee.model
        self._parameters = dict(model.named_parameters())
        self._storages = [(storage, storage.nbytes()) for storage in _storages(self._parameters.values())]
        # A state_dict has a parameter under each of its names; copies of those would be weights that never leave.
        tied = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = {
            name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value in (model.state_dict() | amax_state_dict(model)).items()
            if name not in tied
        }
        self._leave()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The trainee is in its initial state, on its device."""
        gpus = [self._device.index or 0] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(self._trainee.setup.seed)
            try:
                self._enter()
                yield
            finally:
                self._leave()

    def _enter(self) -> None:
        for storage, size in self._storages:
            storage.resize_(size)
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.copy_(self._initial[name])
        if self._buffers:
            self._trainee.model.load_state_dict(self._buffers, strict=False)

    def _leave(self) -> None:
        trainee = self._trainee
        trainee.optimizer.zero_grad(set_to_none=True)
        trainee.optimizer.state.clear()
        trainee.grad_norm = None
        for storage, _ in self._storages:
            storage.resize_(0)


def _storages(parameters: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of parameters, each once; memory that is not the allocator's own (NumPy's) is moved into such."""
    moved: dict[int, torch.UntypedStorage] = {}
    for p in parameters:
        storage = p.untyped_storage()
        if storage._cdata not in moved:
            moved[storage._cdata] = storage if storage.resizable() else storage.clone()
        if not storage.resizable():
            place = torch.empty(0, dtype=p.dtype, device=p.device)
            p.data = place.set_(moved[storage._cdata], p.storage_offset(), p.size(), p.stride())
    return list(moved.values())
