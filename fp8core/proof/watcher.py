"""watch: what FP8 does to each tensor of a training that runs, every n steps.

    with fp8core.watch(model, every=50, to="casts.jsonl") as watcher:
        for batch in loader:
            ... forward, backward, optimizer.step(), update_scales ...
            watcher.step()                      # once for each optimizer step, after it

`fp8core.proof.cast_stats` says how each figure is defined and where it is taken.
"""

from __future__ import annotations

import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fp8core.arguments import check_type
from fp8core.experts.moe import GroupedMatmul
from fp8core.observers import WATCHED
from fp8core.proof.audit import fp8_modules
from fp8core.proof.cast_records import Sink, records_of, sink_of
from fp8core.proof.cast_stats import HIGH_PRECISION, NOT_SEEN, StepStats
from fp8core.proof.sampled_places import SampledPlaces

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from fp8core.proof.cast_records import CastRecord, ScalarWriter
    from fp8core.proof.cast_stats import CallStats
    from fp8core.recipe import Recipe

_NEVER_STEPPED = (
    "watcher.step() was never called, so nothing was recorded; keep what watch() returns and call its step() after each "
    "optimizer step"
)
_EAGER = "pass eager_steps=True, which runs each watched step in eager mode"


def watch(
    model: nn.Module,
    every: int = 50,
    to: Callable[[CastRecord], object] | ScalarWriter | str | os.PathLike[str] | None = None,
    *,
    samples: int = 4096,
    first_step: int = 0,
    eager_steps: bool = False,
) -> Watcher:
    """Watches the casts of a model's FP8 layers in every n-th training step.

        watcher = fp8core.watch(model, every=50, to="casts.jsonl")

    The figures are those of the very tensors, codes and scales that the step's GEMMs receive. The training stays the
    same, bit for bit: nothing is cast again, no random number is drawn, no amax is recorded. Between watched steps
    nothing is left on.

    Cost: a watched step reads each cast tensor once more for its amax, copies `samples` elements of it with their codes
    and scales, counts the copies of several casts together, and waits for the device once. With every=50 that was 0.05
    to 0.3 % of the CPU time of a training with steps of over 100 ms, and 1.3 to 1.8 % with steps of 10 to 14 ms
    (docs/numerics.md); never measured on a GPU. Memory on the device: about 100 bytes for each of 32,768 samples that
    wait (3 MB), or of one cast's where `samples` is larger; 72 bytes a cast until the step ends; and as long as the
    watcher lives up to 128 sets of places, 8 bytes a sample and dimension (8 MB).

    What counts: each forward pass with its first backward pass. Of a graph that is kept for several backward passes
    (`retain_graph=True`) the later ones are left out; a microbatch that is run again after its backward pass counts twice.

    Distributed: no collective runs, so nothing can hang. Each rank reports its own part under its own `rank`: of a tensor
    cut by tensor parallelism the part's amax, and the scale that all parts share. Weights that FSDP2 gathers in FP8 are
    "codes only". Each rank needs its own sink; a path gets ".rankN" before its suffix where there are several ranks.

    Compiled code shows no tensors, and such a model is refused. With `eager_steps` each watched step runs in eager mode
    (`torch.compiler.set_stance`): slower, with more memory, and where the compiler rounds otherwise than eager mode not
    bitwise the same training. All ranks must then watch the same steps.

    Args:
        model: with FP8 layers or experts; may be wrapped by DDP or FSDP2.
        every: steps from one watched step to the next; the first one is `first_step`, if it is a multiple.
        to: called with each `CastRecord`; or an object with `add_scalar`, such as TensorBoard's SummaryWriter (tags
            "fp8/LAYER/OPERAND/GEMM/FIGURE"); or "tensorboard", "wandb" or "mlflow" (`fp8core.proof.cast_records`); or the path of a file to which a JSON line is appended for each record.
            None: read `Watcher.latest`.
        samples: elements of each tensor, in each call, that shares and SQNR are estimated from: one in each of as many
            equal parts, always the same ones.
        first_step: number of the step that comes next, in a run that is resumed.
        eager_steps: see above.

    Returns:
        The watcher; call its `step` after each optimizer step. It is a context manager, too.

    Raises:
        TypeError: an argument of another type.
        ValueError: no FP8 layer, a compiled model, numbers out of range, or layers of another watcher that was neither
            closed nor dropped. In a notebook call its `close` before `watch` is run again.
        OSError: the file can't be opened.
        ImportError: the library that `to` names is not installed.
    """
    return Watcher(model, every, to, samples, first_step, eager_steps)


class Watcher:
    """What `watch` returns.

    Attributes:
        latest: records of the last watched step.
        steps: number of the step under way.
        problem: why nothing, or not all, is recorded; "" while all is well. Each kind of problem is warned of once. If a
            sink fails the training goes on, and watching has ended.

    A copy (deepcopy or pickle, also of a model that holds its watcher) is closed, and says so.
    """

    latest: tuple[CastRecord, ...] = ()
    problem = ""
    _every = 1
    _sink: Sink | None = None
    _is_copy = False

    def __init__(
        self, model: nn.Module, every: int, to: Any, samples: int, first_step: int, eager_steps: bool
    ) -> None:
        check_type("model", model, nn.Module, "watch(model, every=50, to=...)")
        for name, value, least in (
            ("every", every, 1),
            ("samples", samples, 1),
            ("first_step", first_step, 0),
        ):
            if isinstance(value, bool):
                raise TypeError(f"{name} is a bool; expected int")
            check_type(name, value, int)
            if value < least:
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")
        self.steps = first_step
        self._model, self._every, self._eager_steps = model, every, eager_steps
        self._warned: set[str] = set()
        obstacle = self._obstacle()
        if obstacle:
            raise ValueError(obstacle)
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._sink = sink_of(to, self._rank)
        self._on = _On(samples)
        weakref.finalize(self, _dropped, self._on)
        self._hold()
        self._begin()

    def step(self) -> None:
        """An optimizer step has ended, `update_scales` included; after a watched one its records go out."""
        self._on.was_stepped = True
        if self._is_copy:
            self._warn(self.problem)
        if self._on.stats is not None:
            self._end(self._on.stats)
        self.steps += 1
        self._begin()

    def close(self) -> None:
        """Ends watching; a step under way is not recorded. May be called twice."""
        if not self._on.was_stepped and not self.problem:
            self._warn(_NEVER_STEPPED)
        self._stop()

    def __reduce__(self) -> tuple[Any, ...]:
        return _closed_copy, (self.steps,)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._on.was_stepped |= kind is not None  # what ended the block is news enough
        self.close()

    def _obstacle(self) -> str:
        """Why the step that comes can't be watched; "" if it can."""
        layers = fp8_modules(self._model)
        if not layers:
            return "the model has no FP8 layer to watch; call convert_to_float8_training(model) before watch(model)"
        if not self._eager_steps and (name := compiled_part(self._model)) is not None:
            return f"{name} is compiled, and compiled code shows no tensors; {_EAGER}"
        taken = next((fqn for fqn, layer in layers.items() if _holder(layer) not in (None, self)), None)
        if taken is not None:
            return f"{taken or 'the model'} is watched by another watcher; close() that one first"
        return ""

    def _hold(self) -> None:
        """The layers are this watcher's until it is closed or dropped; some may have come since the last call."""
        for layer in fp8_modules(self._model).values():
            _HOLDERS[layer] = weakref.ref(self)

    def _begin(self) -> None:
        """Looks at the step that comes, if it is one to watch."""
        if self._sink is None or self.steps % self._every:
            return
        obstacle = self._obstacle()
        if obstacle:
            self._fail(obstacle)
        else:
            self._hold()
            self._on.watch(self._model, self._eager_steps)

    def _end(self, stats: StepStats) -> None:
        """Hands what the step showed to the sink."""
        recipes = self._on.recipes  # a schedule may have moved on since the backward pass
        self._on.release()
        assert self._sink is not None
        try:
            if stats.failure:
                raise RuntimeError(stats.failure)
            self.latest = tuple(records_of(stats, self.steps, self._rank, recipes))
            for record in self.latest:
                self._sink.write(record)
        except Exception as error:  # noqa: BLE001  # neither a full disk nor a callback may end the training
            self._fail(f"step {self.steps}: {type(error).__name__}: {error}")
            return
        expected = [record.status for record in self.latest if record.status != HIGH_PRECISION]
        if not expected or set(expected) != {NOT_SEEN}:
            return
        if stats.calls:
            kind = "FP8 layers ran forward, and no backward pass of theirs was seen before watcher.step()"
        else:
            kind = "no FP8 layer ran a forward pass with gradients that could be seen"
            if not self._eager_steps:
                kind += f"; if the step is compiled, {_EAGER}"
        self._warn(f"step {self.steps}: {kind}", kind)

    def _stop(self) -> None:
        self._on.release()
        sink, self._sink = self._sink, None
        if sink is None:
            return
        for layer in [layer for layer in _HOLDERS if _holder(layer) is self]:
            del _HOLDERS[layer]
        sink.close()

    def _fail(self, problem: str) -> None:
        """Watching ends, the training goes on."""
        try:
            self._stop()
        except OSError as error:  # the file of a full disk refuses to close
            problem = f"{problem}; {error}"
        self._warn(f"{problem}; watching has stopped")

    def _warn(self, problem: str, kind: str | None = None) -> None:
        """Warns of each kind of problem once; the attribute has the last."""
        self.problem, self._on.was_stepped = problem, True
        if (kind or problem) not in self._warned:
            self._warned.add(kind or problem)
            warnings.warn(f"fp8core.watch: {problem}", RuntimeWarning, stacklevel=4)


def _closed_copy(steps: int) -> Watcher:
    """What a copy of a watcher is: the records, the sink and the layers are the original's."""
    result = Watcher.__new__(Watcher)
    result.problem = (
        "this is a copy of a watcher, and records nothing; call watch(model) for a model of its own"
    )
    result.steps, result._on, result._warned, result._is_copy = steps, _On(1), set(), True
    result._on.was_stepped = True
    return result


def _dropped(on: _On) -> None:
    """A watcher that nobody holds any more, or a program that ends."""
    on.release()
    if not on.was_stepped:
        warnings.warn(f"fp8core.watch: {_NEVER_STEPPED}", RuntimeWarning, stacklevel=2)


# Whose each layer is, from construction to the end, also in steps that are not watched
_HOLDERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Watcher]] = weakref.WeakKeyDictionary()


def _holder(layer: nn.Module) -> Watcher | None:
    reference = _HOLDERS.get(layer)
    return None if reference is None else reference()


class _EagerMode:
    """Eager mode for as long as one watcher needs it: stances of several would not be given back in turn."""

    _needed = 0
    _stance: Any = None

    def hold(self) -> None:
        if not self._needed:
            self._stance = torch.compiler.set_stance("force_eager")
        self._needed += 1

    def give_back(self) -> None:
        self._needed -= 1
        if not self._needed:
            stance, self._stance = self._stance, None
            stance.__exit__(None, None, None)


_EAGER_MODE = _EagerMode()


class _On:
    """What is on while a step is watched; `release` leaves nothing but the places to look at.

    Attributes:
        stats: of the step; None between watched steps.
        recipes: of the layers when the step began, by name.
        was_stepped: `Watcher.step` was called, or what stopped it was told.
    """

    def __init__(self, samples: int) -> None:
        self.stats: StepStats | None = None
        self.recipes: dict[str, Recipe] = {}
        self.was_stepped = False
        self._places = SampledPlaces(samples)
        self._entries: dict[nn.Module, Any] = {}
        self._is_eager = False

    def watch(self, model: nn.Module, eager: bool) -> None:
        self.stats = StepStats(self._places)
        for fqn, layer in fp8_modules(model).items():
            experts = (
                model.get_submodule(fqn.rpartition(".")[0]) if isinstance(layer, GroupedMatmul) else None
            )
            self.recipes[fqn] = layer.recipe
            self._entries[layer] = WATCHED[layer] = partial(_call, self.stats, fqn, experts)
        if eager:
            _EAGER_MODE.hold()
            self._is_eager = True

    def release(self) -> None:
        for layer, entry in self._entries.items():
            if WATCHED.get(layer) is entry:
                del WATCHED[layer]
        self._entries.clear()
        self.stats, self.recipes = None, {}
        if self._is_eager:
            self._is_eager = False
            _EAGER_MODE.give_back()


def compiled_part(model: nn.Module) -> str | None:
    """Name of the first module that torch.compile wraps, or whose call or forward is compiled; None if none is."""
    for fqn, module in model.named_modules():
        if (
            type(module).__name__ == "OptimizedModule"
            or module._compiled_call_impl is not None
            or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        ):
            return fqn or "the model"
    return None


def _call(
    stats: StepStats, fqn: str, experts: nn.Module | None, weight: torch.Tensor, recipe: Recipe
) -> CallStats:
    """One call of a layer; of experts by the name of the stacked weight, or of the product where it is a copy."""
    for name, parameter in () if experts is None else experts.named_parameters(recurse=False):
        if parameter.dim() == weight.dim() and parameter.data_ptr() == weight.data_ptr():
            return stats.call(fqn, f"{fqn.rpartition('.')[0]}.{name}".lstrip("."), recipe)
    return stats.call(fqn, fqn, recipe)
