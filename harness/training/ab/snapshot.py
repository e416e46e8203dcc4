"""What a trial puts back at its end, so that training goes on as if it had not been."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn

from fp8core.history import AmaxMemory
from fp8core.verify.state import random_state, set_random_state
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SPARE = 0.9  # share of the free host memory that a snapshot may take


class Snapshot:
    """Copies, in host memory, of a model, of the random numbers, and of whatever else has a `state_dict`.

    Args:
        model: its parameters, buffers (those that no `state_dict` holds too), gradients and amax histories.
        others: objects with `state_dict` and `load_state_dict`: optimizer, scheduler, stateful loader.

    Attributes:
        size_bytes: of the tensors that were copied.
        names: what is put back.

    Raises:
        UsageError: an object without a state, or too little host memory for the copies; nothing was copied.
    """

    def __init__(self, model: nn.Module, others: Sequence[Any]) -> None:
        for each in others:
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise UsageError(
                    f"restore: a {type(each).__name__} has no state_dict and load_state_dict, so it cannot be put back; leave it "
                    "out and restore=[] says what is not restored"
                )
        self._model, self._others = model, list(others)
        states = [each.state_dict() for each in self._others]
        self._held = [t.detach() for t in (*model.parameters(), *model.buffers())]
        grads = [p.grad for p in model.parameters()]
        self.size_bytes = sum(_size(each) for each in (self._held, grads, states))
        free = psutil.virtual_memory().available
        if self.size_bytes > _SPARE * free:
            raise UsageError(
                f"restore: the copies take {self.size_bytes / 2**30:.1f} GiB of host memory and {free / 2**30:.1f} GiB are free; "
                "leave restore= out, and start again from a checkpoint after the trial"
            )
        self.names = ("model", "random numbers", *(type(each).__name__ for each in self._others))
        self._copies = [_copied(t) for t in self._held]
        self._grads = [None if grad is None else _copied(grad) for grad in grads]
        self._states = [_deep_copied(state) for state in states]
        self._memories = [
            (
                m,
                copy.deepcopy(
                    {k: v for k, v in vars(m).items() if isinstance(v, bool | int | float | str | frozenset)}
                ),
            )
            for m in model.modules()
            if isinstance(m, AmaxMemory)
        ]
        self._random = random_state(p.device for p in model.parameters())

    def restore(self) -> None:
        """Puts everything back, in place: parameters and buffers stay the objects that they are."""
        with torch.no_grad():
            for tensor, kept in zip(self._held, self._copies, strict=True):
                tensor.copy_(kept)
            for parameter, grad in zip(self._model.parameters(), self._grads, strict=True):
                parameter.grad = None if grad is None else grad.to(parameter.device, copy=True)
        for memory, known in self._memories:
            vars(memory).update(known)
        for each, state in zip(self._others, self._states, strict=True):
            each.load_state_dict(_deep_copied(state))
        set_random_state(self._random)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().to("cpu", copy=True)


def _deep_copied(state: Any) -> Any:
    """A copy of nested containers, whose tensors lie in host memory."""
    if isinstance(state, Tensor):
        return _copied(state)
    if isinstance(state, dict):
        return type(state)((k, _deep_copied(v)) for k, v in state.items())
    if isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        return type(state)(_deep_copied(v) for v in state)
    return copy.deepcopy(state)


def _size(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(_size(v) for v in state.values())
    return sum(_size(v) for v in state) if isinstance(state, list | tuple) else 0
