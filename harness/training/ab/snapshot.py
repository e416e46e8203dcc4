"""What a trial puts back at its end, so that training goes on as if it had not been."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp8core.arguments import is_dtensor
from fp8core.distributed.fsdp_state import end_pass
from fp8core.history import AmaxMemory, tensors_of
from fp8core.verify.state import random_state, set_random_state
from harness.store.errors import UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

_SPARE = 0.9  # share of the free host memory that a snapshot may take


class Snapshot:
    """Copies, in host memory, of a model, of the random numbers, and of whatever else has a `state_dict`.

    The states and the random numbers are those of the moment when it is made: a loader has given its first batch by the
    first step. The model's are taken by `take`, so that it may still be moved or sharded in between.

    Args:
        model: its parameters, buffers (those that no `state_dict` holds too), gradients and amax histories.
        others: objects with `state_dict` and `load_state_dict`: optimizer, scheduler, stateful loader.

    Attributes:
        names: what is put back.

    Raises:
        UsageError: an object without a state, or too little host memory for the copies.
    """

    def __init__(self, model: nn.Module, others: Sequence[Any]) -> None:
        if not isinstance(others, list | tuple):
            raise UsageError(
                f"restore={type(others).__name__}: expected a list of objects, such as restore=[optimizer]"
            )
        for each in others:
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise UsageError(
                    f"restore: a {type(each).__name__} has no state_dict and load_state_dict, so it cannot be put back; leave it "
                    "out and restore=[] says what is not restored"
                )
        self._model, self._others = model, list(others)
        self.names = ("model", "random numbers", *(type(each).__name__ for each in others))
        states = [each.state_dict() for each in others]
        grads = [p.grad for p in model.parameters()]
        size = sum(
            _size(t) for t in tree_leaves([tensors_of(self._model), grads, states]) if isinstance(t, Tensor)
        )
        # Ranks of one host share its memory
        free = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if size > _SPARE * free:
            raise UsageError(
                f"restore: the copies take {size / 2**30:.1f} GiB of host memory and {free / 2**30:.1f} GiB are free for this "
                "process; leave restore= out, and start again from a checkpoint after the trial"
            )
        self._states = [_in_host_memory(state) for state in states]
        self._random = random_state(p.device for p in model.parameters())

    def take(self) -> None:
        """Copies the model as it is now."""
        # Kept alive: what takes the place of a tensor that is gone may get its id
        self._held = tensors_of(self._model)
        self._places = [_place(t) for t in self._held]
        self._copies = [_copied(t) for t in self._held]
        self._grads = [None if p.grad is None else _copied(p.grad) for p in self._model.parameters()]
        # What Python knows of an amax history; its buffers are among the tensors
        self._memories = [(m, dict(vars(m))) for m in self._model.modules() if isinstance(m, AmaxMemory)]

    def restore(self, *, mid_step: bool = False) -> None:
        """Puts everything back, in place: parameters and buffers stay the objects that they are.

        Args:
            mid_step: a step has raised, so that FSDP2 may stand in the middle of a pass.

        Raises:
            RuntimeError: the model has other parameters than when the copies were taken, and nothing was put back; or an
                object refused its state, and the message names what was put back before it: never the model.
        """
        if mid_step:
            end_pass(self._model)
        if [_place(t) for t in tensors_of(self._model)] != self._places:
            raise RuntimeError("the model's tensors were moved or replaced during the trial")
        # Code of anyone's, which may raise: before the model is touched
        for index, (each, state) in enumerate(zip(self._others, self._states, strict=True), 2):
            try:
                each.load_state_dict(_in_host_memory(state))
            except Exception as error:
                raise RuntimeError(
                    f"{self.names[index]}.load_state_dict raised {one_line(error)}; put back before it: "
                    f"{', '.join(self.names[2:index]) or 'nothing'}; as the trial left them: "
                    f"{', '.join((*self.names[:2], *self.names[index:]))}"
                ) from error
        with torch.no_grad():
            for tensor, kept in zip(self._held, self._copies, strict=True):
                tensor.copy_(kept)
            for parameter, grad in zip(self._model.parameters(), self._grads, strict=True):
                parameter.grad = None if grad is None else grad.to(parameter.device, copy=True)
        for memory, known in self._memories:
            vars(memory).update(known)
        set_random_state(self._random)


def _size(tensor: Tensor) -> int:
    """Bytes of this rank's part; of a sparse one, such as a gradient of an embedding, what it would take in full."""
    tensor = tensor.detach()
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return local.numel() * local.element_size()


def _place(tensor: Tensor) -> tuple[object, ...]:
    return id(tensor), tensor.device, tensor.dtype, tensor.shape


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().to("cpu", copy=True)


def _in_host_memory(state: Any) -> Any:
    """A deep copy of nested containers, whose tensors lie in host memory."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return copy.deepcopy(state, {id(tensor): _copied(tensor) for tensor in tensors})
