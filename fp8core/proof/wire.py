"""What goes over the wire: every collective that this process takes part in, with dtype and size.

    with count_collectives() as counts:
        step()
    counts.bytes["all_gather", "uint8"]       # FP8 codes travel as uint8, see `fp8core.distributed.fsdp`
    counts.calls["reduce_scatter", "float32"]
    counts.scale_reductions

Counted at the operators `c10d::*`, through which PyTorch hands each tensor to NCCL, gloo or a fake process group: the
calls of FSDP2, DDP's buckets, pipeline sends, functional collectives and those that a DTensor makes inside of one of
its own operators. What compiled code sends is seen only where the compiler leaves the call to eager PyTorch, so a count
belongs around an eager step.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8core.arguments import PLAIN_TENSORS
from fp8core.observers import SCALE_REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

# Operator -> (what it is called here, position of what this rank gives). One name whatever the variant: a coalesced call
# or one with lists of tensors is still the same collective.
_COLLECTIVES: dict[str, tuple[str, int]] = {
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::allgather_coalesced_": ("all_gather", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::gather_": ("gather", 1),
    "c10d::scatter_": ("scatter", 1),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
}


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


@dataclass
class Collectives:
    """What one rank gave to collectives.

    Attributes:
        sent: in the order of the calls.
        scale_reductions: how many of the all-reduces found scales of sharded weights (`fp8core.distributed.weight_scales`).
    """

    sent: list[Sent] = field(default_factory=list)
    scale_reductions: int = 0

    def scales_reduced(self) -> None:
        """The all-reduce just made was for scales."""
        self.scale_reductions += 1

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        """(collective, dtype) -> calls."""
        return Counter((each.collective, each.dtype) for each in self.sent)

    @property
    def bytes(self) -> Counter[tuple[str, str]]:
        """(collective, dtype) -> bytes."""
        total: Counter[tuple[str, str]] = Counter()
        for each in self.sent:
            total[each.collective, each.dtype] += each.size_bytes
        return total

    def of(self, collective: str) -> dict[str, int]:
        """dtype -> bytes of one collective."""
        return {dtype: size for (name, dtype), size in self.bytes.items() if name == collective}


_ENDS = (*PLAIN_TENSORS, FakeTensor)  # tensors whose operators lead to no others


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Counts this process's collectives while the block runs, backward passes included; blocks may be nested."""
    counts = Collectives()
    SCALE_REDUCTIONS.append(counts.scales_reduced)
    try:
        with _Counting(counts):
            yield counts
    finally:
        SCALE_REDUCTIONS.remove(counts.scales_reduced)


class _Counting(TorchDispatchMode):
    def __init__(self, counts: Collectives) -> None:
        super().__init__()
        self.counts = counts

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Or `torch.compile` would fall back to eager mode while this counts."""
        return True

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in _ENDS for kind in types):
            # A DTensor's operator must first become what it does, collectives included: modes come before subclasses
            return NotImplemented
        found = _COLLECTIVES.get(op.name().partition(".")[0])
        if found is not None:
            collective, position = found
            given = [leaf for leaf in tree_leaves(args[position]) if isinstance(leaf, torch.Tensor)]
            dtypes = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in given)
            size = sum(t.numel() * t.element_size() for t in given)
            self.counts.sent.append(Sent(collective, "+".join(dtypes), size))
        return op(*args, **(kwargs or {}))
