"""watch: what FP8 does to each tensor of a training that runs, every n steps.

    with fp8core.watch(model, every=50, to="casts.jsonl") as watcher:
        for batch in loader:
            ... forward, backward, optimizer.step(), update_scales ...
            watcher.step()                      # once for each optimizer step, after it

`fp8core.cast_stats` says how each figure is defined and where it is taken.
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
from fp8core.cast_records import Sink, records_of, sink_of
from fp8core.cast_stats import HIGH_PRECISION, NOT_SEEN, WATCHED, StepStats
from fp8core.experts.moe import GroupedMatmul
from fp8core.linear import Float8Linear

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from fp8core.cast_records import CastRecord, ScalarWriter
    from fp8core.cast_stats import CallStats
    from fp8core.recipe import Recipe

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

    Cost: a watched step reads each cast tensor once more for its amax, looks at `samples` elements of it in about 30 small
    operators a cast, and waits for the device once. With every=50 that was 0.1 to 0.5 % of the CPU time
    of a training with steps of over 100 ms, and 2 to 2.5 % with steps of 10 ms (docs/numerics.md); never measured on a GPU. Memory: about 100 bytes a sample while a cast is looked at, then 72 bytes a cast
    until the step ends.

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
            "fp8/LAYER/OPERAND/GEMM/FIGURE"); or the path of a file to which a JSON line is appended for each record.
            None: read `Watcher.latest`.
        samples: elements of each tensor, in each call, that shares and SQNR are estimated from; a fixed stride apart.
        first_step: number of the step that comes next, in a run that is resumed.
        eager_steps: see above.

    Returns:
        The watcher; call its `step` after each optimizer step. It is a context manager, too.

    Raises:
        TypeError: an argument of another type.
        ValueError: no FP8 layer, a compiled model, numbers out of range, or layers that another watcher has in hand.
        OSError: the file can't be opened.
    """
    return Watcher(model, every, to, samples, first_step, eager_steps)


class Watcher:
    """What `watch` returns.

    Attributes:
        latest: records of the last watched step.
        steps: number of the step under way.
        problem: why nothing, or not all, is recorded; "" while all is well. If a sink fails the training goes on, warned
            once, and watching has ended.
    """

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
        self.latest: tuple[CastRecord, ...] = ()
        self.steps, self.problem = first_step, ""
        self._model, self._every, self._samples, self._eager_steps = model, every, samples, eager_steps
        self._was_told = False
        obstacle = self._obstacle()
        if obstacle:
            raise ValueError(obstacle)
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._sink: Sink | None = sink_of(to, self._rank)
        self._on = _On()
        weakref.finalize(self, self._on.release)
        self._begin()

    def step(self) -> None:
        """An optimizer step has ended, `update_scales` included; after a watched one its records go out."""
        self._was_told = True
        if self._on.stats is not None:
            self._end(self._on.stats)
        self.steps += 1
        self._begin()

    def close(self) -> None:
        """Ends watching; a step under way is not recorded. May be called twice."""
        if not self._was_told and not self.problem:
            self._warn(
                "watcher.step() was never called, so nothing was recorded; call it after each optimizer step"
            )
        self._stop()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._was_told |= kind is not None  # what ended the block is news enough
        self.close()

    def _obstacle(self) -> str:
        """Why the step that comes can't be watched; "" if it can."""
        layers = watchable(self._model)
        if not layers:
            return "the model has no FP8 layer to watch; call convert_to_float8_training(model) before watch(model)"
        if not self._eager_steps and (name := compiled_part(self._model)) is not None:
            return f"{name} is compiled, and compiled code shows no tensors; {_EAGER}"
        taken = next((fqn for fqn, layer in layers.items() if layer in WATCHED), None)
        if taken is not None:
            return f"{taken or 'the model'} is watched by another watcher; close() that one first"
        return ""

    def _begin(self) -> None:
        """Looks at the step that comes, if it is one to watch."""
        if self._sink is None or self.steps % self._every:
            return
        obstacle = self._obstacle()
        if obstacle:
            self._fail(obstacle)
        else:
            self._on.watch(self._model, self._samples, self._eager_steps)

    def _end(self, stats: StepStats) -> None:
        """Hands what the step showed to the sink."""
        self._on.release()
        assert self._sink is not None
        try:
            if stats.failure:
                raise RuntimeError(stats.failure)
            recipes = {fqn: layer.recipe for fqn, layer in watchable(self._model).items()}
            self.latest = tuple(records_of(stats, self.steps, self._rank, recipes))
            self._sink.write(self.latest)
        except Exception as error:  # noqa: BLE001  # neither a full disk nor a callback may end the training
            self._fail(f"step {self.steps}: {type(error).__name__}: {error}")
            return
        expected = [record.status for record in self.latest if record.status != HIGH_PRECISION]
        if expected and set(expected) == {NOT_SEEN}:
            self._warn(
                f"step {self.steps}: no FP8 layer ran a forward and a backward pass that could be seen; if the step is "
                f"compiled, {_EAGER}"
            )

    def _stop(self) -> None:
        self._on.release()
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()

    def _fail(self, problem: str) -> None:
        """Watching ends, the training goes on."""
        try:
            self._stop()
        except OSError as error:  # the file of a full disk refuses to close
            problem = f"{problem}; {error}"
        self._warn(f"{problem}; watching has stopped")

    def _warn(self, problem: str) -> None:
        """Warns of the first problem; the attribute has the last."""
        is_first = not self.problem
        self.problem = problem
        if is_first:
            warnings.warn(f"fp8core.watch: {problem}", RuntimeWarning, stacklevel=4)


class _On:
    """What is on while a step is watched; `release` leaves nothing.

    Attributes:
        stats: of the step; None between watched steps.
    """

    def __init__(self) -> None:
        self.stats: StepStats | None = None
        self._entries: dict[nn.Module, Any] = {}
        self._stance: Any = None

    def watch(self, model: nn.Module, samples: int, eager: bool) -> None:
        self.stats = StepStats(samples)
        for fqn, layer in watchable(model).items():
            experts = (
                model.get_submodule(fqn.rpartition(".")[0]) if isinstance(layer, GroupedMatmul) else None
            )
            self._entries[layer] = WATCHED[layer] = partial(_call, self.stats, fqn, experts)
        if eager:
            self._stance = torch.compiler.set_stance("force_eager")

    def release(self) -> None:
        for layer in self._entries:
            del WATCHED[layer]
        self._entries.clear()
        self.stats = None
        stance, self._stance = self._stance, None
        if stance is not None:
            stance.__exit__(None, None, None)


def watchable(model: nn.Module) -> dict[str, Any]:
    """FP8 layers and products of experts in FP8, by name."""
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if isinstance(module, Float8Linear)
        or (isinstance(module, GroupedMatmul) and module.recipe is not None)
    }


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
