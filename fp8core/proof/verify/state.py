"""A training step that leaves no trace: what it changes is put back, whether it ends or raises.

    gradients        set aside and put back; the step starts without any
    optimizers       find no gradients in their `step`, so they change neither weights nor their own state
    weights, buffers copied before an operator writes them (to the host, where they lie on a GPU), and put back. Which
                     ones is learnt from the first, eager pass; later passes copy the same ones beforehand
    amax histories   buffers as above, and what Python knows of them
    random numbers   of PyTorch (CPU and every GPU in use), Python and NumPy

What lies outside of the model and of these, the step's own function must not mind being called three times: a data
iterator, a learning-rate schedule, a gradient scaler.
"""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8core.arguments import PLAIN_TENSORS
from fp8core.history import AmaxMemory, tensors_of
from fp8core.proof.verify.operands import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn


class State:
    """The state of a model and of the generators, while `kept` runs; `restore` after each pass."""

    def __init__(self, model: nn.Module) -> None:
        self.grads = [(p, p.grad) for p in model.parameters()]
        self.memories = [
            (m, {name: value for name, value in vars(m).items() if name[0] != "_"})
            for m in model.modules()
            if isinstance(m, AmaxMemory)
        ]
        self.held = {_address(t): t for t in _tensors(model) if t.numel()}
        self.written: dict[int, torch.Tensor] = {}  # address -> copy
        self.versions: dict[int, int] = {}
        self.random = random_state(p.device for p, _ in self.grads)
        self.set_aside: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The block starts without gradients and leaves everything as it was."""
        handles = (
            register_optimizer_step_pre_hook(self._hide_gradients),
            register_optimizer_step_post_hook(self._show_gradients),
        )
        self.restore()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.restore()
            for p, grad in self.grads:
                p.grad = grad

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """An operator is about to write a tensor: keep what it holds, if it is the model's."""
        address = _address(tensor)
        if address in self.held and address not in self.written:
            held = self.held[address]
            self.written[address] = held.clone() if held.device.type == "cpu" else held.cpu()

    def restore(self) -> None:
        """Puts everything back but gradients, which are dropped."""
        self._show_gradients()
        with torch.no_grad():
            for address, copy in self.written.items():
                self.held[address].copy_(copy)
        for memory, known in self.memories:
            vars(memory).update(known)
        for p, _ in self.grads:
            p.grad = None
        set_random_state(self.random)
        self.versions = {address: t._version for address, t in self.held.items()}

    def unrestorable(self) -> int:
        """Tensors of the model that were written, in a way that no pass before showed, since `restore`."""
        unseen = self.held.keys() - self.written.keys()
        return sum(self.held[address]._version != self.versions[address] for address in unseen)

    def _hide_gradients(self, optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.set_aside.append((p, p.grad))
                    p.grad = None

    def _show_gradients(self, *_: Any) -> None:
        for p, grad in self.set_aside:
            p.grad = grad
        self.set_aside.clear()


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers as plain tensors: this rank's parts, without wrappers."""
    for t in tensors_of(model):
        local = plain(t)
        if type(local) in PLAIN_TENSORS and not local.is_meta:
            yield local


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor without memory of its own
        return 0


def random_state(used: Iterable[torch.device]) -> dict[str, Any]:
    """State of the generators of PyTorch (the CPU's and those of the GPUs in use), Python and NumPy."""
    devices = {device.index or 0 for device in used if device.type == "cuda"}
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "cuda": {index: torch.cuda.get_rng_state(index) for index in devices},
        "numpy": numpy and numpy.random.get_state(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Puts back what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    for index, value in state["cuda"].items():
        torch.cuda.set_rng_state(value, index)
    if state["numpy"]:
        sys.modules["numpy"].random.set_state(state["numpy"])
