"""The recorder: one dispatch mode that sees every operator of a step, on real or on fake tensors, and keeps a row of each.

    with Recorder(model) as recorder:
        step()
    recorder.rows       # operator, module, pass, products, bytes by storage, collective

Products, traffic, peak memory and bytes on the wire are sums over these rows. What needs the tensors themselves looks at
them as they pass: a function in `before` is called with each operator and its arguments, one in `after` with its row, its
arguments and its result.

A tensor subclass is asked to run its own operators first, since modes come before subclasses: what is seen are the
operators on plain tensors that really run. Operators inside of another are not seen, so nothing counts twice.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core.arguments import PLAIN_TENSORS
from fp8core.proof.formulas import Product, products

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Phase = Literal["forward", "backward", "recompute", "outside"]
IN_FORWARD = -1  # id of no graph task
_ENDS = (*PLAIN_TENSORS, FakeTensor)  # tensors whose operators lead to no others

# What part of an operator's name it is called here, whatever the variant: a coalesced call, or one with lists of tensors, is
# still the same collective. The first that fits
_COLLECTIVES = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
)


class Sent(NamedTuple):
    """One collective.

    Attributes:
        collective: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send" ...
        dtype: of the tensor that this rank gave, without "torch."; several are joined by "+".
        size_bytes: of what this rank gave; of a "recv", of what it took. An all-gather over n ranks delivers n times that.
    """

    collective: str
    dtype: str
    size_bytes: int


@dataclass(slots=True, eq=False)
class OperatorRow:
    """One operator that ran.

    Attributes:
        operator: as the dispatcher has it.
        owner: fully qualified name of the module that ran.
        phase: "forward", "backward", or "recompute": a forward pass again for the backward one.
        products: matrix products; None where it may have some and no formula is known.
        read, written: bytes by storage, whose number belongs to no other of this recording.
        born: bytes of the storages that it made.
        died: bytes of those storages of the recording that were freed before the next row.
        sent: to a collective.
    """

    operator: Any
    owner: str
    phase: Phase
    products: tuple[Product, ...] | None
    read: Mapping[int, int]
    written: Mapping[int, int]
    born: int
    died: int = 0
    sent: Sent | None = None


class Recorder(TorchDispatchMode):
    """Keeps a row of each operator that runs within the block.

    Args:
        model: whose modules own the operators; None: no owner is known.
        compiled: `torch.compile` goes on compiling within the block, and what compiled code runs is not seen. Without,
            what is compiled runs in eager mode.
        collectives: keep no rows but those of collectives: a row takes about 0.7 kB.

    Attributes:
        rows: of the operators so far, or of the collectives among them.
        before: called with each operator, its arguments and keywords, before it runs.
        after: called with its row, arguments, keywords and result.
        entered: called with name and module before its forward.
        running: name and module, and whether a backward pass entered it; the innermost module last.
        raised: name of the innermost module that the last exception left.
    """

    supports_higher_order_operators = True

    def __init__(
        self, model: nn.Module | None = None, *, compiled: bool = False, collectives: bool = False
    ) -> None:
        super().__init__()
        self.rows: list[OperatorRow] = []
        self.before: list[Callable[[Any, Any, Any], None]] = []
        self.after: list[Callable[[OperatorRow, Any, Any, Any], None]] = []
        self.entered: list[Callable[[str, nn.Module], None]] = []
        self.running: list[tuple[str, nn.Module, bool]] = []
        self.raised = ""
        self._model = nn.Module() if model is None else model
        self._compiled, self._collectives = compiled, collectives
        self._is_fake = False
        self._hooks: list[Any] = []
        # Address of a storage that lives -> its number, and what tells of its end
        self._numbers: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._count = itertools.count()

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]  # torch asks the mode, not its class
        """Or `torch.compile` would fall back to eager mode."""
        return self._compiled

    def __enter__(self) -> Recorder:
        self._is_fake = detect_fake_mode(list(self._model.parameters())) is not None
        for fqn, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._entered(fqn)))
            self._hooks.append(module.register_forward_hook(self._left, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._numbers.clear()  # whose callbacks hold this recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _ENDS for kind in types) or func is torch.ops.prim.device.default:
            return NotImplemented
        if not self._is_fake and any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # DTensor asks for the shape of a result
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload) and func._can_decompose():
            super().__enter__()
            try:  # inference mode hands composite operators on whole
                whole = func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
            if whole is not NotImplemented:
                return whole
        for look in self.before:
            look(func, args, kwargs)
        out = func(*args, **kwargs)
        row = self._row(func, args, kwargs, out)
        if row.sent is not None or not self._collectives:
            self.rows.append(row)
        for see in self.after:
            see(row, args, kwargs, out)
        return out

    def number_of(self, x: Tensor) -> int:
        """The number of its storage."""
        return self._number(x.untyped_storage(), 0)

    def phase(self) -> Phase:
        """The pass that runs."""
        if torch._C._current_graph_task_id() == IN_FORWARD:
            return "forward"
        again = torch.is_grad_enabled() or any(inside for _, _, inside in self.running)
        return "recompute" if again else "backward"

    def owner(self) -> str:
        """Name of the module that runs; "" outside of all."""
        return self.running[-1][0] if self.running else ""

    def _row(self, func: Any, args: Any, kwargs: Any, out: Any) -> OperatorRow:
        read = {self.number_of(x): size_of(x) for x in tensors_in((args, *kwargs.values()))}
        written, born = {}, 0
        for x in tensors_in(out):
            storage = x.untyped_storage()
            size = storage.nbytes() if storage._cdata not in self._numbers else 0
            born += size
            written[self._number(storage, size)] = size_of(x)
        found = products(func, args, kwargs, out)
        return OperatorRow(
            func, self.owner(), self.phase(), found, read, written, born, sent=_sent(func, args)
        )

    def _number(self, storage: torch.UntypedStorage, size: int) -> int:
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = next(self._count), weakref.ref(storage, partial(self._freed, key, size))
        return self._numbers[key][0]

    def _freed(self, key: int, size: int, _: object) -> None:
        if self._numbers.pop(key, None) is not None and self.rows:
            self.rows[-1].died += size

    def _entered(self, fqn: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, _: Any) -> None:
            self.raised = ""
            self.running.append((fqn, module, torch._C._current_graph_task_id() != IN_FORWARD))
            for see in self.entered:
                see(fqn, module)

        return hook

    def _left(self, module: nn.Module, *_: Any) -> None:
        if sys.exc_info()[0] is not None:
            self.raised = self.raised or self.owner()
        while self.running:
            if self.running.pop()[1] is module:
                return


def alive_and_most(rows: Iterable[OperatorRow]) -> tuple[int, int]:
    """Bytes of the storages that a recording's operators made: (alive at the end, the most at once)."""
    alive = most = 0
    for row in rows:
        alive += row.born
        most = max(most, alive)
        alive -= row.died
    return alive, most


def layer_shapes(rows: Iterable[OperatorRow]) -> list[tuple[str, int, int, int]]:
    """(module, M, K, N) of each product of matrices in the forward pass, once: as JSON, a file that `sweep=gemm shapes=FILE` takes."""
    forward = (row for row in rows if row.phase == "forward" and row.owner)
    found = ((row.owner, *p.sizes) for row in forward for p in row.products or () if p.sizes)
    return list(dict.fromkeys(found))


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Tensors with a storage among arguments or results, in order."""
    if type(given) in _ENDS:
        if given.layout is torch.strided:
            yield given
    elif isinstance(given, tuple | list):
        for part in given:
            yield from tensors_in(part)


def size_of(x: Tensor) -> int:
    """Bytes that are read or written of a tensor: an expanded one lies in memory once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _sent(func: Any, args: Any) -> Sent | None:
    if not isinstance(func, OpOverload) or func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func.overloadpacket.__name__.replace("_", "")
    found = next((each for each in _COLLECTIVES if each.replace("_", "") in name), None)
    if found is None:
        return None
    results_first = func._schema.arguments[0].name.startswith("output")
    given = list(tensors_in(args[results_first]))
    dtypes = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in given)
    return Sent(found, "+".join(dtypes), sum(x.numel() * x.element_size() for x in given))
