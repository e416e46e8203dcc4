"""Casts of a weight kept across microbatches: with gradient accumulation a weight changes once in many passes.

    with microbatches(model):                  casts of weights are kept from here ...
        for x, y in batches:
            loss(model(x), y).backward()
    optimizer.step()                           ... to here, where they are dropped

Outside of such a scope nothing is kept. Inside, kept casts are used only while all of this holds; else the weight
is cast anew, so results are those without the scope, bit for bit:

    the same tensor, address, shape and version     load_state_dict, in-place updates, foreach optimizers
    no optimizer has stepped                        fused optimizers don't change a tensor's version (torch 2.13)
    no `update_scales`                              delayed scales move on, also where a loss scaler skips the step
    the same bits                                   writes through `p.data` leave no other trace
    its memory was not given back                   FSDP2 frees a gathered weight where it reshards

So FSDP2 with `reshard_after_forward` casts in each microbatch, as it gathers in each; `set_reshard_after_forward(False)` and
`set_reshard_after_backward(False)` until the window's last microbatch keep the gathered weight and so its casts, or its
codes where they are what was gathered. A weight that tensor parallelism has cut is cast in each microbatch. The first
two are asked at each use and cost nothing. The bits are compared through the sums of all rows and of
all columns, as integers; only a change that keeps every one of these sums passes unseen. On a GPU this waits for
the device, so it is done once for each call of `model`, for all weights together, and covers that call and the
backward passes after it. A layer called by other ways than through `model` checks for itself. Hence: a write
through `p.data` that happens in the middle of a forward pass is seen by the next one.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8core.arguments import check_type
from fp8core.gemm.layout import Operand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WeightOperands = tuple[Operand | torch.Tensor, Operand | torch.Tensor]


class _Digest(NamedTuple):
    """Sums of a matrix's bit patterns: int64 [rows] and [columns]."""

    rows: torch.Tensor
    columns: torch.Tensor

    def differs(self, other: _Digest) -> torch.Tensor:
        """Bool, 0-dimensional, on the device."""
        return (self.rows != other.rows).any() | (self.columns != other.columns).any()


@dataclass
class _Entry:
    """Casts, and the state of the weight that they were made from.

    `alias` shares the weight's memory, which can therefore not be given to another tensor in the meantime.
    """

    weight: torch.Tensor
    alias: torch.Tensor
    version: int
    digest: _Digest | None
    operands: WeightOperands


class WeightCache:
    """One layer's share of a `microbatches` scope.

    Attributes:
        hits, misses: uses that found a kept cast, and casts.
    """

    def __init__(self, scope: _Scope) -> None:
        self.scope = scope
        self.entry: _Entry | None = None
        self.hits = self.misses = 0

    def operands(self, weight: torch.Tensor, cast: Callable[[], WeightOperands]) -> WeightOperands:
        """The weight's two operands: kept ones if they still hold, else what `cast` returns."""
        entry = self.entry
        if entry is None or not self._holds(entry, weight):
            digest = _digest(weight) if self.scope.check_content else None
            entry = _Entry(weight, weight.detach(), weight._version, digest, cast())
            self.entry = entry
            self.misses += 1
        else:
            self.hits += 1
        return entry.operands

    def _holds(self, entry: _Entry, weight: torch.Tensor) -> bool:
        same = entry.weight is weight and entry.version == weight._version
        if not same or entry.alias.data_ptr() != weight.data_ptr() or entry.alias.shape != weight.shape:
            return False
        if entry.digest is None or self.scope.covered():
            return True
        return not bool(entry.digest.differs(_digest(weight)))


class _Scope:
    """An open `microbatches` block; hooks of the model and of optimizers report to it."""

    def __init__(self, check_content: bool) -> None:
        self.check_content = check_content
        self.caches: list[WeightCache] = []
        self.depth = 0  # calls of the model under way

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles of the model, which bring its hooks along: a block that keeps nothing."""
        return type(self), (False,)

    def covered(self) -> bool:
        """Whether the bits were compared at the start of the pass under way."""
        return self.depth > 0 or torch._C._current_graph_task_id() != -1

    def drop(self) -> None:
        """Forgets every cast."""
        for cache in self.caches:
            cache.entry = None

    def enter_model(self, *_: Any) -> None:
        """Before each call of the model: compares all kept weights, with one wait for the device."""
        self.depth += 1
        if self.depth > 1:
            return
        differs: dict[WeightCache, torch.Tensor] = {}
        for cache in self.caches:
            entry = cache.entry
            if entry is None or entry.digest is None:
                continue
            if entry.weight.shape == entry.alias.shape and not _freed(entry.weight):
                differs[cache] = entry.digest.differs(_digest(entry.weight))
            else:
                cache.entry = None
        if differs:
            device = next(iter(differs.values())).device
            together = torch.stack([flag.to(device) for flag in differs.values()]).tolist()
            for cache, changed in zip(differs, together, strict=True):
                if changed:
                    cache.entry = None

    def leave_model(self, *_: Any) -> None:
        """After each call of the model, also a failed one."""
        self.depth -= 1


@contextmanager
def microbatches(model: nn.Module, check_content: bool = True) -> Iterator[None]:
    """Keeps the casts of the model's Float8Linear weights while the block runs; see the module docstring.

    Compiled layers cast as ever: what is kept is Python state that a graph can't hold.

    Args:
        model: whose layers keep casts. Calls of this very module are what the check of the bits follows.
        check_content: False leaves that check out: for a program that never writes through `p.data` (or
            dlpack or numpy) inside of the block, and where a CUDA graph records it, which can't wait for the device.

    Raises:
        RuntimeError: a layer is already in such a block.
        TypeError: the model is no module.
    """
    check_type("model", model, nn.Module, "microbatches(model)")
    scope = _Scope(check_content)
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "weight_cache")]  # Float8Linear
    if any(layer.weight_cache is not None for layer in layers):
        raise RuntimeError("a layer of this model is already inside of a microbatches block; don't nest them")
    for layer in layers:
        scope.caches.append(WeightCache(scope))
        layer.weight_cache = scope.caches[-1]
    hooks = (
        model.register_forward_pre_hook(scope.enter_model),
        model.register_forward_hook(scope.leave_model, always_call=True),
        register_optimizer_step_post_hook(lambda *_: scope.drop()),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            layer.weight_cache = None


def _freed(weight: torch.Tensor) -> bool:
    """Whether FSDP has given a weight's memory back: its shards are gathered anew, through no version counter."""
    return weight.numel() > 0 and weight.untyped_storage().size() == 0


def _digest(weight: torch.Tensor) -> _Digest:
    bits = weight.detach().view(torch.int32 if weight.element_size() == 4 else torch.int16)
    return _Digest(bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64))
