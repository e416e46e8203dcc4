"""What runs while a module is traced: which layer is called with what, and what each operator reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from harness.advise.model import Linear, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.utils.hooks import RemovableHandle

ATTENTION = "scaled_dot_product"
_FREE = ("empty", "_unsafe_view", "detach", "device", "lift_fresh", "alias")  # operators that move no data
_LOOKUPS = ("embedding", "index_select", "gather", "index")  # they read what they return, not the table


class Watch:
    """Which layer is running, and what each Linear was called with. Keeps their inputs alive, so that ids stay apart."""

    def __init__(self, module: nn.Module, barred: Mapping[str, Mapping[str, str]]) -> None:
        self.layers: list[Linear] = []
        self._barred = barred
        self._running: list[str] = []
        self._inputs: list[Tensor] = []
        self._index: dict[str, int] = {}
        self._hooks: list[RemovableHandle] = []
        for fqn, part in module.named_modules():
            self._hooks.append(part.register_forward_pre_hook(self._entered(fqn)))
            self._hooks.append(part.register_forward_hook(self._left))

    @property
    def innermost(self) -> str:
        """Innermost layer that is still running."""
        return next((name for name in reversed(self._running) if name), "")

    @property
    def in_linear(self) -> bool:
        """Whether a Linear is running, whose products are counted by its sizes."""
        return bool(self._running) and self._running[-1] in self._index

    def close(self) -> None:
        """The forward pass is over: what checkpointing runs again is no other use of a layer."""
        for hook in self._hooks:
            hook.remove()

    def _entered(self, fqn: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(part: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.append(fqn)
            if isinstance(part, nn.Linear) and args and isinstance(args[0], Tensor):
                self._called(fqn, part, args[0])

        return hook

    def _left(self, *_: object) -> None:
        self._running.pop()

    def _called(self, fqn: str, layer: nn.Linear, x: Tensor) -> None:
        rows = x.numel() // layer.in_features
        if fqn in self._index:
            before = self.layers[self._index[fqn]]
            self.layers[self._index[fqn]] = replace(before, tokens=before.tokens + rows)
            return
        place = next((i for i, other in enumerate(self._inputs) if _same(other, x)), len(self._inputs))
        if place == len(self._inputs):
            self._inputs.append(x)
        self._index[fqn] = len(self.layers)
        sizes = (layer.in_features, layer.out_features, rows)
        self.layers.append(Linear(fqn, *sizes, place, self._barred.get(fqn, {})))


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that was made between products: its bytes, and the storages it was made of with theirs."""

    size: int
    origin: dict[int, int]


@dataclass(slots=True)
class _Phase:
    """Forward or backward pass: what its operators move, and what is made between each two products."""

    eager_bytes: float = 0.0
    eager_kernels: int = 0
    products: int = 0
    kernels: dict[int, dict[int, _Made]] = field(default_factory=dict)  # each: storage -> what it is

    def traffic(self, used: set[int]) -> Traffic:
        """A kernel reads what the tensors that are used were made of, and writes those; one without any need not run."""
        moved, launched = 0.0, self.products
        for kernel in self.kernels.values():
            written = [made for storage, made in kernel.items() if storage in used]
            read: dict[int, int] = {}
            for made in written:
                read |= made.origin
            moved += sum(made.size for made in written) + sum(read.values())
            launched += bool(written)
        return Traffic(self.eager_bytes, moved, self.eager_kernels, launched)


class Recorder(TorchDispatchMode):
    """Adds up what operators read and write; matrix products apart.

    What can run once a product is done, and before the next whose result it needs, is one fused kernel: it reads each
    storage from outside once. What it makes is written if a product or another kernel reads it, or if it is a result. A
    later kernel makes it again from what it was made of, as a compiler does, if that is less to read than writing it and
    reading it back.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.attention = self.other = 0.0
        self.grouped = False
        self.forward, self.backward = _Phase(), _Phase()
        self.used: set[int] = set()
        self._watch = watch
        self._phase = self.forward
        self._made: dict[int, _Made] = {}
        self._reads: dict[int, set[int]] = {}  # kernel -> storages
        self._ready: dict[int, int] = {}  # storage -> the kernel that makes it, or the first that can read it
        self._next = self._first = (
            0  # the kernel that can read the last product, and the first one of the phase
        )
        self._lookups = 0
        self._kept: list[torch.UntypedStorage] = []  # or an address could be given to another

    def turn(self) -> None:
        """The forward pass is over."""
        self._phase = self.backward
        self._next = self._first = self._next + 1

    def finish(self, results: Iterable[Tensor]) -> tuple[Traffic, Traffic]:
        """Traffic forward and backward; `results` are read by whoever comes next."""
        self.used |= {_storage(tensor) for tensor in results}
        return self.forward.traffic(self.used), self.backward.traffic(self.used)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = [t for t in tree_iter(result) if isinstance(t, Tensor)]
        # Storages, not tensors: autograd copies a gradient that someone else holds.
        self._kept += [tensor.untyped_storage() for tensor in made]
        if func.is_view or name.startswith(_FREE) or func.namespace == "prim":
            return result
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        self._phase.eager_kernels += 1
        if ATTENTION in name or func.overloadpacket in flop_registry:
            self._product(func.overloadpacket, name, given, args, made)
        else:
            self._between(name, given, made)
        return result

    def _product(self, op: Any, name: str, given: list[Tensor], args: Any, made: list[Tensor]) -> None:
        self._next += 1
        self._ready |= dict.fromkeys(map(_storage, made), self._next)
        self._phase.products += 1
        self.used |= {_storage(tensor) for tensor in given}
        if self._phase is self.backward:
            return
        if ATTENTION in name:
            q, k, v = given[:3]
            share = (
                0.5 if any(argument is True for argument in args) else 1.0
            )  # the only such argument: is_causal
            pairs = q.shape[:-2].numel() * q.shape[-2] * k.shape[-2]
            self.attention += 2.0 * share * pairs * (q.shape[-1] + v.shape[-1])
        elif not self._watch.in_linear:
            self.other += float(flop_registry[op](*args, out_val=made[0]))
            self.grouped = self.grouped or "grouped" in name

    def _between(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        written = sum(map(_bytes, made))
        reads = {_storage(t): _bytes(t) for t in given}
        if name.startswith(_LOOKUPS) and not name.endswith("backward"):
            self._lookups += 1
            reads = {-self._lookups: written}
        self._phase.eager_bytes += written + sum(reads.values())
        place = max([self._first, *(self._ready.get(storage, 0) for storage in reads)])
        origin: dict[int, int] = {}
        for storage, size in reads.items():
            origin |= self._source(storage, size, place)
        self._reads.setdefault(place, set()).update(origin)
        for tensor in made:
            storage = _storage(tensor)
            self._made[storage] = _Made(_bytes(tensor), origin)
            self._ready[storage] = place
            self._phase.kernels.setdefault(place, {})[storage] = self._made[storage]

    def _source(self, storage: int, size: int, kernel: int) -> dict[int, int]:
        """What a kernel reads to have a tensor."""
        made = self._made.get(storage)
        if made is not None and self._ready[storage] == kernel:
            return made.origin
        if made is not None and storage not in self.used:
            reads = self._reads.get(kernel, set())
            if sum(amount for source, amount in made.origin.items() if source not in reads) < 2 * size:
                return made.origin
        self.used.add(storage)
        return {storage: size}


def _same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    place = (one.shape, one.stride(), one.storage_offset())
    return _storage(one) == _storage(other) and place == (other.shape, other.stride(), other.storage_offset())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    """What is read or written of it: an expanded tensor lies in memory once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
