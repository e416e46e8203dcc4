"""Replaced: what an arm has changed of PyTorch itself for its whole process, and no process can reliably put back.

A library that replaces `torch.nn.functional.linear`, overrides an operator of the dispatcher, hooks every module or leaves a
thread running does so for all arms. Others may hold references to what it put there, so undoing it is no way out: such an
arm gets a process of its own (`harness.engine.remote_arm`).

Not seen: what C code changes by itself (a setting of a library, an allocator, a kernel that C++ registers for another operator
than those of `GEMMS`), a second kernel in place of an arm's first one for such an operator, and functions other than those of
`PLACES`. A peer that does such things says so: `own_process` of `harness.peers.Peer`.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import library, nn
from torch._functorch.predispatch import lazy_load_decompositions
from torch.nn.modules import linear, module

from harness.machine.processes import thread_owner

# Names in rows, and the modules and classes whose functions are compared: what arms compute with and are timed by.
PLACES: dict[str, Any] = {
    "torch": torch,
    "torch.nn": nn,
    "torch.nn.functional": nn.functional,
    "torch.nn.modules.linear": linear,
    "torch.nn.Module": nn.Module,
    "torch.nn.Linear": nn.Linear,
    "torch.nn.Embedding": nn.Embedding,
    "torch.nn.LayerNorm": nn.LayerNorm,
    "torch.nn.RMSNorm": nn.RMSNorm,
    "torch.Tensor": torch.Tensor,
    "torch.autograd": torch.autograd,
    "torch.autograd.Function": torch.autograd.Function,
    "torch.cuda": torch.cuda,
    "torch.cuda.Event": torch.cuda.Event,
    "torch.cuda.Stream": torch.cuda.Stream,
    "torch.linalg": torch.linalg,
    "torch._C._nn": torch._C._nn,
}
# Replaced by torch itself when its compiler is imported, or compiles for the first time
_BY_TORCH = {"torch.manual_seed", "torch.nn.Module.__init__", "torch.nn.Module.__setstate__"}
# Operators whose kernels of every dispatch key are compared, by where they were registered; about 15 us each
GEMMS = ("aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm")
# Whose threads wait for work of the arm that they were started for
_POOLS = ("torch", "concurrent", "multiprocessing", "tqdm", "harness", "threading")


class Names(NamedTuple):
    """What was replaced, by name; two are equal where the same objects, or kernels, are in the same places."""

    by_identity: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return ", ".join(name for name, _ in self.by_identity)


class _Place:
    """One module or class, as it is now and was at first."""

    def __init__(self, name: str, place: Any) -> None:
        self._name, self._place = name, place
        self._first = {key: value for key, value in vars(place).items() if callable(value)}
        self._seen: dict[str, object] = dict(vars(place))
        self._replaced: tuple[tuple[str, int], ...] = ()

    def replaced(self) -> tuple[tuple[str, int], ...]:
        """Names and identities of what is there in place of what was; some 2 us for 100 names that are as they were."""
        now = vars(self._place)
        if now != self._seen:
            self._seen = dict(now)
            named = ((f"{self._name}.{key}", now.get(key), value) for key, value in self._first.items())
            self._replaced = tuple(
                (name, id(there)) for name, there, was in named if there is not was and name not in _BY_TORCH
            )
        return self._replaced


def functions() -> Names:
    """Functions and classes of `PLACES` that are others than when this file was imported."""
    return Names(tuple(one for place in _PLACES for one in place.replaced()))


def operators() -> Names:
    """Operators of PyTorch's own that have other kernels than when this file was imported."""
    now = library._impls
    found = {} if now == _KERNELS else {key: 0 for key in now ^ _KERNELS if key.startswith("aten/")}
    for name in GEMMS:
        if (dump := torch._C._dispatch_dump(name)) != _DUMPS[name]:
            found[name] = hash(dump)
    return Names(tuple(sorted(found.items())))


def module_hooks() -> int:
    """Hooks that all modules of this process call."""
    return sum(map(len, _HOOKS))


def threads() -> str:
    """Names of Python threads that somebody other than PyTorch, a pool or this package has started, and that still run."""
    return ", ".join(thread.name for thread in threading.enumerate() if _is_foreign(thread))


def _is_foreign(thread: threading.Thread) -> bool:
    if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):
        return False
    return thread_owner(thread) not in _POOLS


def before_arms() -> str:
    """What has changed since this file was imported, where no arm is under way; "" for nothing.

    Workers import it before any suite, and so before any extension: what is found then, an import did.
    """
    named = [
        str(functions()),
        "operators" if str(operators()) else "",
        "module hooks" if module_hooks() else "",
    ]
    return ", ".join(filter(None, named))


_HOOKS = [
    hooks for name, hooks in vars(module).items() if name.startswith("_global_") and isinstance(hooks, dict)
]
_PLACES = tuple(_Place(name, place) for name, place in PLACES.items())
# Some batching rules are registered at the first `torch.vmap`, `torch.func.grad` or mask of flex_attention, and no arm's doing
lazy_load_decompositions()
_KERNELS = frozenset(library._impls)
_DUMPS = {name: torch._C._dispatch_dump(name) for name in GEMMS}
