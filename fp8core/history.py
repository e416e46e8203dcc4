"""What layers remember: delayed and static scaling the amaxes of their three tensors, stochastic rounding a count.

    forward, backward   pending = max(pending, amax of the tensor)                  where gradients are enabled
    update_scales       history = [pending, history without its last], pending = 0  for each role that was recorded
                        in_use  = max(history) or history[0]                        (delayed)
                        in_use  = pending, once                                     (static)

All casts of one optimizer step use the same scale, whatever the number of microbatches, the order of a
pipeline schedule and the recomputations of activation checkpointing: `pending` is a maximum, so recording an
amax twice changes nothing, and only `update_scales` changes `in_use`. Until its first call scales are dynamic.

An amax of 0, Inf or NaN never enters the history: history and `in_use` of that role then stay as they are. So do those
of a layer that did not run, such as an idle expert (Transformer Engine #825), and a pass without gradients, such as an
evaluation, leaves no trace.

Stochastic rounding takes its random numbers by address, see `fp8core.philox`: the recipe's seed, the rank, the layer's name, the
number of its forward pass, and the operand. Each pass with gradients takes the next number, and its backward pass goes by it;
a recomputation in eager mode takes none, and a pass without gradients leaves no trace. So a run repeats bit for bit.

Amaxes and counts belong to a training run, not to a model: `state_dict()` of a model holds none, so that it loads strictly into
the plain model and back, and a layer whose weight is loaded starts anew. `amax_state_dict` and `load_amax_state_dict` save and load
them.
"""

from __future__ import annotations

import math
import warnings
import zlib
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import library, nn

from fp8core import philox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fp8core.recipe import AmaxHistory, Recipe

_MAGNITUDE_BITS = 0x7FFF_FFFF  # all but the sign, which a NaN can have
ROLES: tuple[str, ...] = ("input", "weight", "grad_output")
_IN_FORWARD = -1  # id of no graph task
_MOST_PASSES = 2**32 - 1  # beyond it numbers come again, see `fp8core.philox`
_COMPILED = "_orig_mod."  # torch.compile(module) puts it into the names of what it wraps


class AmaxesMissingWarning(UserWarning):
    """A state dict was loaded without the amaxes of delayed or static scaling."""


class SharedDrawsWarning(UserWarning):
    """Layers of one model round stochastically by the same random numbers."""


class LayerMemory(nn.Module):
    """Buffers of one layer that belong to a run; they move with it and keep their dtype. `amax_state_dict` saves them.

    Attributes:
        SAVED: names of those that a checkpoint needs.
        lacking: a state dict was loaded since, and none of them were.
    """

    SAVED: ClassVar[tuple[str, ...]]
    lacking = False

    def reset(self, device: torch.device | None = None) -> None:
        """Forgets everything; buffers on "meta" are made anew on `device`."""
        for name, buffer in list(self.named_buffers()):
            if buffer.is_meta and device is not None:
                setattr(self, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))
            else:
                buffer.zero_()
        self.lacking = False

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> LayerMemory:
        """Follows the layer to its device and keeps values and dtypes, whatever fn does: rounded down to bfloat16 an amax would
        saturate, and `to_empty` leaves what the memory held before. On "meta" there are no values, so it starts afresh."""
        buffers = dict(self.named_buffers())
        first = next(iter(buffers.values()))
        if first.is_meta:
            self.reset(fn(first).device)
        for name, buffer in list(self.named_buffers()):
            setattr(self, name, buffer.to(fn(buffer).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes its buffers of a checkpoint where it has them, in their own dtype whatever that of the checkpoint and `assign`."""
        *_, missing_keys, _, error_msgs = args  # as nn.Module has them
        found = {name: state_dict[prefix + name] for name in self.SAVED if prefix + name in state_dict}
        self.lacking = not found and not self._is_known()
        for name in self.SAVED if found else ():
            value, buffer = found.get(name), getattr(self, name)
            if value is None:
                missing_keys.append(prefix + name)
            elif value.shape != buffer.shape:
                error_msgs.append(
                    f"{prefix}{name} has shape {list(value.shape)}; expected {list(buffer.shape)}: the recipe's history "
                    "has another length than the checkpoint's"
                )
            else:
                self._check(prefix + name, value)
                buffer.copy_(value)
        if found:
            self._has_loaded()

    def _check(self, key: str, value: torch.Tensor) -> None:
        """Refuses what no run has saved, before it is taken."""

    def _is_known(self) -> bool:
        """Whether there is something to go on by without a checkpoint."""
        return False

    def _has_loaded(self) -> None:
        """Called once buffers came from a checkpoint."""


class PassCount(LayerMemory):
    """How many forward passes of a layer took random numbers.

    Attributes:
        count: int64, 0-dimensional.
        layer: a number for the layer's name.
    """

    SAVED = ("count",)
    count: torch.Tensor

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.layer = 0
        with torch.inference_mode(False):
            self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device), persistent=False)

    def _check(self, key: str, value: torch.Tensor) -> None:
        if value.is_floating_point() or not 0 <= int(value) <= _MOST_PASSES:
            raise ValueError(
                f"{key} is {value.item()}; expected a whole number from 0, below 2**32: the count that amax_state_dict saved"
            )

    def belongs_to(self, fqn: str) -> None:
        """Takes the name of its layer."""
        self.layer = zlib.crc32(fqn.encode())

    def draws(self, seed: int, gradients: bool) -> Draws:
        """Random numbers for a forward pass that begins, and for its backward pass.

        Args:
            seed: of the recipe.
            gradients: they are enabled, so that the pass counts.
        """
        if self.lacking and gradients and not torch.compiler.is_compiling():
            _warn_of_missing({f"number {self.layer}": self})
        if torch.compiler.is_compiling():
            number = _next_pass(self.count) if gradients else self.count.clone()
        else:
            number = self.count.clone()
            if not _is_recomputed():  # a gradient goes by the number of the first run
                self.count += gradients
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return Draws(number, seed, rank, self.layer)


class Draws(NamedTuple):
    """Where the random numbers of one pass of one layer are.

    Attributes:
        number: of the pass, int64, 0-dimensional.
        seed, rank, layer: whole numbers below 2**32.
    """

    number: torch.Tensor
    seed: int
    rank: int = 0
    layer: int = 0

    def of(self, x: torch.Tensor, role: str, dim: int) -> torch.Tensor:
        """float32 in [0, 1) for each element of x, whose cast along `dim` takes others than that along another."""
        key = (self.seed | self.rank << 32, self.layer, 0, 2 * ROLES.index(role) + dim)
        parts = [torch.full_like(self.number, part) for part in key]
        parts[2] = self.number
        return philox.uniform(x.shape, torch.stack(parts), x.device)


def _is_recomputed() -> bool:
    """Whether torch.utils.checkpoint runs a forward pass again whose first run had gradients and so was counted: by hooks of its
    own within a backward pass. The reentrant kind has none, and its first run no gradients."""
    if torch._C._current_graph_task_id() == _IN_FORWARD:
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


@library.custom_op("fp8core::next_pass", mutates_args=("count",))
def _next_pass(count: torch.Tensor) -> torch.Tensor:
    """The number of a pass, in one operator with the step to the next: AOTAutograd moves a copy of a graph's argument into the
    backward pass that reads it, when the count has moved on already (torch 2.13)."""
    number = count.clone()
    count += 1
    return number


_next_pass.register_fake(torch.empty_like)


class AmaxMemory(LayerMemory):
    """The amaxes of one layer, in float32.

    Attributes:
        history: float32 [3, length], newest first; a row for each of `ROLES`. Empty for static scaling.
        in_use: float32 [3]; 0 = none yet, the cast is dynamic.
        pending: float32 [3], the largest since the last `advance`.
        gathered: float32, 0-dimensional: amax of the weight, noted where FSDP2 gathered its codes; a pass with gradients
            that reads the codes records it.
        ready: roles for which `in_use` holds. Known to Python, so that no cast waits for the device.
        updates: calls of `advance` that changed what is in use.
        compared: it was found that all ranks hold the same layers.
    """

    SAVED = ("history", "in_use")  # between two steps the other buffers hold nothing
    history: torch.Tensor
    in_use: torch.Tensor
    pending: torch.Tensor
    gathered: torch.Tensor

    def __init__(self, recipe: Recipe, device: torch.device | str | None = None) -> None:
        """Buffers for a recipe whose `scaling` is "delayed" or "static"."""
        super().__init__()
        self.delayed = recipe.scaling == "delayed"
        self.settings = recipe.history
        self.ready: frozenset[str] = frozenset()
        self.updates = 0
        self.compared = False
        length = self.settings.length if self.delayed else 0
        with torch.inference_mode(False):  # else no later pass could write to them
            for name, shape in (("history", (3, length)), ("in_use", (3,)), ("gathered", ())):
                self.register_buffer(name, torch.zeros(shape, device=device), persistent=False)
            self.pending = torch.zeros(3, device=device)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """With `pending`, for FSDP2, which asks each module and moves what it names. DDP asks the model, which does not name it,
        and so does not overwrite what each rank's own microbatches held with rank 0's; `update_scales` takes the largest."""
        yield from super().named_buffers(*args, **kwargs)
        yield "pending", self.pending

    def reset(self, device: torch.device | None = None) -> None:
        """Forgets everything, so that scales are dynamic again."""
        super().reset(device)
        self.ready = frozenset()

    def of(self, role: str) -> torch.Tensor | None:
        """float32, 0-dimensional: the amax to scale `role` by; None while there is none."""
        return self.in_use[ROLES.index(role)] if role in self.ready else None

    def record(self, role: str, amax: torch.Tensor) -> None:
        """Notes the amax (float32, 0-dimensional) of a tensor that was cast."""
        pending = self.pending[ROLES.index(role)]
        pending.copy_(torch.maximum(pending, amax))

    def record_gathered(self) -> None:
        """Notes the amax of a weight whose codes FSDP2 has gathered."""
        self.record("weight", self.gathered)

    def advance(self) -> None:
        """Ends a step, see the module docstring; `look` must follow."""
        usable = self.pending.isfinite() & (self.pending > 0)
        if self.delayed:
            rolled = torch.cat((self.pending[:, None], self.history[:, :-1]), dim=1)
            self.history.copy_(torch.where(usable[:, None], rolled, self.history))
            best = self.history.amax(1) if self.settings.algorithm == "max" else self.pending
            self.in_use.copy_(torch.where(usable, best, self.in_use))
        else:
            self.in_use.copy_(torch.where(usable & (self.in_use == 0), self.pending, self.in_use))
        self.pending.zero_()
        self.updates += self.delayed or len(self.ready) < len(ROLES)

    def _is_known(self) -> bool:
        return bool(self.ready)

    def _has_loaded(self) -> None:
        self.pending.zero_()
        self.ready = frozenset()
        mark_ready(self)


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """What a step may write: parameters, buffers, and amaxes that wait for `update_scales`, which `model.buffers()` lacks."""
    pending = [m.pending for m in model.modules() if isinstance(m, AmaxMemory)]
    return [*model.parameters(), *model.buffers(), *pending]


class InUse(NamedTuple):
    """A layer's amaxes for a pass without gradients: read, never recorded."""

    memory: AmaxMemory

    @property
    def settings(self) -> AmaxHistory:
        """The recipe's settings."""
        return self.memory.settings

    def of(self, role: str) -> torch.Tensor | None:
        """`AmaxMemory.of`."""
        return self.memory.of(role)

    def record(self, role: str, amax: torch.Tensor) -> None:
        """Does nothing."""


Amaxes = AmaxMemory | InUse


def amaxes_of_pass(memory: AmaxMemory | None, gradients: bool) -> Amaxes | None:
    """What the casts of a pass go by: with gradients the memory itself, else what only reads it."""
    return memory if memory is None or gradients else InUse(memory)


def mark_ready(*memories: AmaxMemory) -> None:
    """Finds out for which roles there are amaxes in use now; one wait for the device, none if all were there before.

    A role that is never cast, because its GEMMs are in high precision or nothing trains, never gets one.

    Raises:
        ValueError: one that is negative, Inf or NaN, which nothing here puts there.
    """
    waiting = [m for m in memories if len(m.ready) < len(ROLES)]
    if waiting:
        found = torch.stack([m.in_use for m in waiting]).tolist()
        for memory, amaxes in zip(waiting, found, strict=True):
            if not all(0 <= amax < math.inf for amax in amaxes):
                raise ValueError(
                    f"amaxes in use are {amaxes}; expected finite numbers from 0: they were loaded or written so; call "
                    "AmaxMemory.reset(), or load_amax_state_dict with a state that holds none"
                )
            memory.ready = frozenset(role for role, amax in zip(ROLES, amaxes, strict=True) if amax)


def max_over_ranks(amaxes: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The largest of all ranks, by one all-reduce; NaN on one rank is NaN on all.

    The bits are compared as integers: the order of non-negative floats is that of their bits, Inf above all numbers and
    NaN above Inf. As floats, a maximum with NaN is what the backend makes of it, and need not be the same on all ranks.

    Args:
        amaxes: float32, non-negative or NaN, any shape.
        group: None: all ranks.

    Returns:
        float32 of the same shape.
    """
    bits = amaxes.view(torch.int32) & _MAGNITUDE_BITS
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)


def _compare_names(named: dict[str, AmaxMemory], group: dist.ProcessGroup | None) -> None:
    """Refuses to take the largest of what belongs to different layers; once for a model, by one small all-reduce."""
    digest = zlib.crc32("\n".join(named).encode())
    device = next(iter(named.values())).pending.device
    bounds = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    if bounds.tolist() != [digest, -digest]:
        raise ValueError(
            f"update_scales: not the same layers on all ranks of the group remember amaxes (here {len(named)}, the first "
            f"is {next(iter(named))!r}); with pipeline parallelism pass group=, the ranks of one stage"
        )
    for memory in named.values():
        memory.compared = True


def update_scales(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Call once after each optimizer step: delayed scaling moves on, static scaling is fixed at the first call.

        loss.backward(); optimizer.step(); update_scales(model)

    A model of dynamic recipes is left alone, so the call may stay in any loop. While a CUDA graph records, nothing has
    run that could be looked at: each tensor's scale stays delayed, or dynamic, as it was in the step before.

    Args:
        model: any module.
        group: whose ranks share scales; None: all ranks if torch.distributed runs. One all-reduce for the
            whole model takes the largest amax of all ranks, so that their scales stay equal. With pipeline
            parallelism the ranks of one stage, since stages hold different layers.

    Returns:
        How many layers remember amaxes.

    Raises:
        ValueError: at the first call, where layers of other names remember amaxes on other ranks.
    """
    every = _memories(model)
    named = {name: m for name, m in every.items() if isinstance(m, AmaxMemory)}
    memories = list(named.values())
    lacking = {name: m for name, m in every.items() if m.lacking}
    if lacking:
        _warn_of_missing(lacking)
    if memories and dist.is_available() and dist.is_initialized():
        if not memories[0].compared:
            _compare_names(named, group)
        together = max_over_ranks(torch.stack([m.pending for m in memories]), group)
        for memory, pending in zip(memories, together, strict=True):
            memory.pending.copy_(pending)
    for memory in memories:
        memory.advance()
    for module in model.modules():
        kept = getattr(module, "weight_cache", None)
        if kept is not None and module.amaxes is not None:
            kept.entry = None  # cast by the scale that was, and the weight's amax is to be recorded anew
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        mark_ready(*memories)
    return len(memories)


def _warn_of_missing(lacking: Mapping[str, LayerMemory]) -> None:
    """Once after a load."""
    warnings.warn(
        f"a state dict was loaded without the amaxes, or counts of passes, of {len(lacking)} layers, the first is {next(iter(lacking))}: their scales "
        "start anew, as dynamic ones, and counts of passes at 0. A resumed run needs load_amax_state_dict(model, state) after it, or "
        "a callback of fp8core.callbacks, which saves and loads them; for initial weights reset() of the memories says that none "
        "are meant",
        AmaxesMissingWarning,
        stacklevel=3,
    )
    for memory in lacking.values():
        memory.lacking = False


def amax_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of delayed or static scaling, or of stochastic rounding, needs beside `model.state_dict()`.

        torch.save({"model": model.state_dict(), "amaxes": amax_state_dict(model)}, path)

    A run resumed without it starts with dynamic scales, as a new run does. All ranks hold the same amaxes after
    `update_scales`, so one rank's suffice.

    Args:
        model: any module; between `update_scales` and the next step.

    Returns:
        For each layer that remembers amaxes, by fully qualified name, in float32: `NAME.amaxes.history` [3, length] and
        `NAME.amaxes.in_use` [3], a row for each of `ROLES`; or, of stochastic rounding, int64 `NAME.passes.count`. They share
        memory with the model, as in `state_dict()`.
    """
    return {
        prefix + name: getattr(memory, name).detach()
        for prefix, memory in _memories(model).items()
        for name in memory.SAVED
    }


def load_amax_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
    """Loads what `amax_state_dict` returned; after `load_state_dict`, which makes amaxes start afresh.

    Args:
        model: whose layers remember amaxes.
        state: of any floating dtype and device; kept in float32.
        strict: False: layers that `state` lacks stay as they are, and its other keys are ignored.

    Raises:
        RuntimeError: keys that are missing or not expected, or another shape, as `load_state_dict` reports them.
        ValueError: amaxes that are negative, Inf or NaN; a count that is no whole number from 0, below 2**32.
    """
    memories = _memories(model)
    expected = [prefix + name for prefix, memory in memories.items() for name in memory.SAVED]
    errors: list[str] = []
    for prefix, memory in memories.items():
        memory._load_from_state_dict(dict(state), prefix, {}, strict, [], [], errors)
    for kind, keys in (
        ("missing", [key for key in expected if key not in state]),
        ("unexpected", [key for key in state if key not in expected]),
    ):
        if strict and keys:
            errors.append(f"{kind} keys: {', '.join(keys)}")
    if errors:
        raise RuntimeError(f"load_amax_state_dict: {'; '.join(errors)}")


def _memories(model: nn.Module) -> dict[str, LayerMemory]:
    """By prefix of their keys, without the names of wrappers, which checkpoints leave out too; warns of random numbers with one
    address."""
    found: dict[str, LayerMemory] = {}
    layers: dict[int, str] = {}
    for fqn, memory in model.named_modules():
        if isinstance(memory, LayerMemory):
            for wrapper in (_COMPILED, "_checkpoint_wrapped_module."):
                fqn = fqn.replace(wrapper, "")
            found[f"{fqn}." if fqn else ""] = memory
            if isinstance(memory, PassCount) and (first := layers.setdefault(memory.layer, fqn)) != fqn:
                warnings.warn(
                    f"{first} and {fqn} round stochastically by the same random numbers: layers that have no name, or were converted "
                    "one by one under the same; convert the whole model at once, or call belongs_to(name) of each",
                    SharedDrawsWarning,
                    stacklevel=3,
                )
    return found
