"""Trial: FP8 against bf16 in a training loop of the user's own, by blocks of its steps."""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp8core.arguments import check_type, is_dtensor
from fp8core.distributed.fsdp_state import end_pass
from fp8core.history import AmaxMemory, tensors_of
from fp8core.proof.verify.state import random_state, set_random_state
from harness.machine.processes import memory_of_machine
from harness.store import printer
from harness.store.errors import UsageError, one_line, out_of_memory
from harness.timing.clock import Clock, clock_for
from harness.training.ab import rows
from harness.training.ab.exchange import Exchange
from harness.training.ab.proving import Proving, Switch, refuse_a_profiler
from harness.training.ab.result import BASE, FP8, PlannedStep, TrialPlan, TrialResult, merged
from harness.training.ab.watch import Meter, RoundSteps, StepWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from harness.training.ab.watch import StepWork


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
        known = memory_of_machine("available")
        free = math.inf if known is None else known / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
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


class UnfinishedStepError(RuntimeError):
    """The loop went on, or ended, inside of a step that a hook had begun."""


class Trial:
    """Alternates blocks of steps in bf16 and in FP8 within one running loop, and compares their times in pairs.

        trial = ab.Trial(model, recipe="tensorwise", steps=200)
        for batch in loader:
            with trial.step():
                loss = model(**batch).loss
                loss.backward(); optimizer.step(); optimizer.zero_grad()
            if trial.done: break
        print(trial.report())

    The first steps warm up both precisions and prove that one runs in FP8 and the other does not; they and the first ones
    after each switch are not timed. bf16 has two blocks a round: how far these seem apart is the noise floor. "bf16" is
    the precision that the loop has without FP8. Every step trains the model.

    Args:
        model: that the loop calls. Without FP8 layers it is converted here, in place, so before `fully_shard` and best
            before `torch.compile`; its parameters stay the objects that an optimizer holds.
        recipe: name of an FP8 recipe.
        steps: that the trial may take.
        block, lead: timed and untimed steps after each switch.
        seed: of the order of blocks; the same on all ranks.
        restore: put back the model, random numbers and these objects (with `state_dict`) when the trial ends; None:
            training goes on from where the trial came to.
        after: precision in which the model is left; None: that in which it came, bf16 if it was converted here.
        fp8_all_gather: True: FSDP2 gathers FP8 codes, and the proof demands it; a model that is converted here gets new
            parameters for it, so make the optimizer afterwards, as `fully_shard` asks for anyway.
        module_filter_fn: as for `convert_to_float8_training`.
        rank_timeout_s: how long ranks wait for each other once a round.
        clock: that reads the times, in place of CUDA events or `time.perf_counter`.

    Attributes:
        done: the trial has ended; `step()` does nothing from then on.

    Raises:
        UsageError: a request that cannot be carried out; nothing was changed but the layers that were converted.
        TypeError: the model is no module.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: str = "tensorwise",
        *,
        steps: int = 200,
        block: int = 4,
        lead: int = 1,
        seed: int = 0,
        restore: Sequence[Any] | None = None,
        after: Literal["bf16", "fp8"] | None = None,
        fp8_all_gather: bool = False,
        module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
        rank_timeout_s: float = 300.0,
        clock: Clock | None = None,
    ) -> None:
        check_type("model", model, nn.Module, "ab.Trial(model, recipe='tensorwise')")
        if after not in (None, "bf16", "fp8"):
            raise UsageError(f"after={after!r}: expected 'bf16', 'fp8' or None")
        if not isinstance(fp8_all_gather, bool):
            raise UsageError(f"fp8_all_gather={fp8_all_gather!r}: expected True or False")
        self.plan = TrialPlan(steps, block, lead, seed)
        self.model, self.done, self._gather = model, False, fp8_all_gather
        # Refused before anything is converted
        self._snapshot = None if restore is None else Snapshot(model, restore)
        self._switch = Switch(model, recipe, module_filter_fn, fp8_all_gather=fp8_all_gather)
        self._ends_in_fp8 = self._switch.found_in_fp8 if after is None else after == "fp8"
        self._exchange = Exchange(rank_timeout_s)
        self._proving = Proving(self._switch, fp8_all_gather, rank_timeout_s)
        self._watch = StepWatch(model)
        self._clock: Any = clock  # chosen, as the meter is, where the first step begins
        self._meter: Any = None
        self._monitor: Any = None  # of the board's energy, in place of NVML's
        self._turns = self.plan.turns()
        self._turn: PlannedStep | None = None  # of the step under way
        self._before: PlannedStep | None = None  # of the last step
        self._hooked: AbstractContextManager[None] | None = None  # a step that `begin_step` began
        self._steps_run: Counter[bool] = Counter()
        self._found = TrialResult(recipe, self.device.type, layers=len(self._switch.layers))

    @property
    def device(self) -> torch.device:
        """Where the model lies now."""
        return next(self.model.parameters()).device

    def _note(self, **facts: Any) -> None:
        """Enters into the record what is known by now, by the names of `TrialResult`."""
        self._found = replace(self._found, **facts)

    def _begin(self) -> str:
        """Before the first step: by now the model lies where it trains. Says why the ranks are not in one trial; "" if they are.

        Raises:
            UsageError: see `step`.
        """
        if self._exchange.size == 1:  # a framework may form the process group when training begins
            self._exchange = Exchange(self._exchange.timeout_s)
        refuse_a_profiler()
        self._clock = self._clock or clock_for(self.device)
        self._meter = Meter(self.device, self._monitor)
        self._note(device=self.device.type, method=self._clock.method)
        if self._snapshot is not None:
            self._snapshot.take()
        # Last, so that a rank that could not begin has told it; before any step, so that no collective can diverge
        return self._exchange.disagreement(
            {
                **asdict(self.plan),
                "recipe": self._found.recipe,
                "recipes of the layers": self._switch.fingerprints(),
                "fp8_all_gather": self._gather,
                "FP8 layers": self._found.layers,
                "ends in FP8": self._ends_in_fp8,
                "restore": None if self._snapshot is None else self._snapshot.names,
            }
        )

    def _next(self) -> PlannedStep | None:
        """What the step that begins is for; None where it is not the trial's."""
        if self.done:
            return None
        # Before its first step a rank refuses what it has to refuse itself, and is then told what others have
        if self._before is not None:
            problem = self._exchange.fault_of_others()
        else:
            try:
                problem = self._begin()
            except BaseException as error:
                self._stop(f"the trial could not begin: {one_line(error)}", to_others=True)
                raise
        if problem:
            self._stop(problem)
        return None if self.done else next(self._turns)

    @contextmanager
    def step(self, batch: object = None) -> Iterator[None]:
        """Around one optimizer step: all of its microbatches, the optimizer, `update_scales` where the recipe needs it.

        Args:
            batch: what the step trains on, to see whether its shapes change; of a model that is not compiled they are
                seen without it.

        Raises:
            RuntimeError: a step inside of a step.
            UsageError: a profiler is active that the trial's own would end. The trial is over then.
        """
        if self._turn is not None:
            raise RuntimeError("trial.step() inside of trial.step(); put one around each optimizer step")
        turn = self._next()
        if turn is None:
            self._snapshot = None  # the loop trains on: what could not be put back stays so
            yield
            return
        self._turn = turn
        try:
            if turn.arm != self._switch.arm:
                self._switch.to(turn.arm)
            if turn.purpose == "timed" and turn != self._before:
                self._steps.begin_block()
            with self._proving.around(turn, on_gpu=self.device.type == "cuda"):
                self._watch.start(batch)
                start = self._clock.mark()
                yield
                marks = start, self._clock.mark()
            self._steps_run[turn.is_fp8] += 1
            self._leave(turn, marks, self._watch.end())
        except BaseException as error:
            what = "ran out of memory" if out_of_memory(error) else f"raised {one_line(error)}"
            precision = "FP8" if turn.is_fp8 else "bf16"
            proof = ", compared with arithmetic of its own," if turn.purpose == "compare" else ""
            self._stop(f"a step in {precision}{proof} {what}", to_others=True)
            raise
        finally:
            self._turn, self._before = None, turn

    def loss(self, loss: Tensor | float) -> None:
        """Tells the loss of the step under way, where the model does not return it."""
        self._watch.loss = loss.detach() if isinstance(loss, Tensor) else loss

    def add_batch(self, batch: object) -> None:
        """Tells one more part of what the step under way trains on, as `step(batch)` does with all of it."""
        self._watch.add(batch)

    @property
    def in_hooked_step(self) -> bool:
        """Whether `begin_step` has begun a step that is still open."""
        return self._hooked is not None

    def begin_step(self) -> None:
        """Begins a step, as entering `step()` does, for a framework's hooks. After the trial's end it does nothing.

        A step that is still open counts for nothing, and the trial ends without an answer.
        """
        self.end_step(UnfinishedStepError("left before its end: another one began"))
        hooked = self.step()
        hooked.__enter__()
        if self._turn is None:
            hooked.__exit__(None, None, None)  # not the trial's
        else:
            self._hooked = hooked

    def end_step(self, error: BaseException | None = None) -> None:
        """Ends the step that `begin_step` began; without one it does nothing.

        Args:
            error: what the step raised: the trial then ends and restores. `with trial:` around the framework's call does this
                for a framework that tells its hooks of no exception. The error is not raised here.
        """
        hooked, self._hooked = self._hooked, None
        if hooked is not None:
            hooked.__exit__(type(error) if error else None, error, getattr(error, "__traceback__", None))

    def _leave(self, turn: PlannedStep, marks: tuple[Any, Any], extent: StepWork) -> None:
        """After a step: its place in the round, and what follows at the end of a round or of the proof."""
        fault = self._switch.fault(turn.arm)
        if turn.round >= 0:
            self._steps.add(turn, marks, extent, self._watch.loss, fault)
            if len(self._steps.seen) == self.plan.per_round:
                self._close_round(turn.round)
            return
        self._proving.stray = self._proving.stray or fault
        if turn.purpose == "count":  # it runs as the timed ones do, compiled or not
            self._found = self._proving.conclude(self._found)
            if not self._found.problem:
                self._agree(extent)
            if self._found.problem:
                self._end()

    def _agree(self, extent: StepWork) -> None:
        """FP8 is proved here: whether bf16 ran no FP8, and whether the ranks agree."""
        stray = self._proving.stray
        mine = {"steps in another precision": stray, "batches of a step": str(extent)}
        theirs = self._exchange.disagreement(mine)  # asked first: the others wait for what this rank has seen
        problem = stray or theirs
        self._note(problem=problem, proved=not problem)
        if not problem:
            self._note(notes=extent.unseen(self.plan))
        self._steps = RoundSteps(self.device, self._clock, self._meter, extent, self.plan.block)

    def _close_round(self, index: int) -> None:
        records = self._steps.records()
        self._meter.judge(records, self.plan.block)
        messages, problem = self._exchange.all_of(records)
        if problem:
            self._stop(problem)
            return
        self._note(rounds=(*self._found.rounds, merged(index, messages)), unmetered=self._meter.why_not)
        if index + 1 == self.plan.rounds:
            self._end()

    def _end(self) -> None:
        """The trial is over: the model gets the precision that it is left in, and back what was to be restored."""
        if not self.done:
            self.done = True
            self._watch.close()
            if self._meter is not None:
                self._meter.close()
            self._switch.to(FP8 if self._ends_in_fp8 else BASE)
        if self._snapshot is not None and (self._before or self._turn):
            try:
                self._snapshot.restore(mid_step=self._turn is not None)
            except Exception as error:  # noqa: BLE001 - told; the copies stay for another try by close()
                self._note(not_restored=one_line(error))
                return  # as long as no later step has trained the model on
            self._note(restored=self._snapshot.names, not_restored="")
        self._snapshot = None  # its memory

    def _stop(self, problem: str, *, to_others: bool = False) -> None:
        """The trial ends without an answer; `to_others`: also to the other ranks, which cannot know."""
        if to_others:
            self._exchange.raised(problem)
        self._note(problem=self._found.problem or problem)
        self._end()

    def close(self) -> None:
        """Ends a trial early, as when the loader has no more batches; restores what was to be restored.

        Of several ranks all must call it at the same step: until then they train on in different precisions, and a rank that
        goes on alone is told at its next step. Where the restoring failed it is tried again, if no step has run since.
        """
        self.end_step(UnfinishedStepError("left before its end"))
        if not self.done:
            self._exchange.raised("closed the trial before its end")
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end_step(error)
            if not self.done:
                self._stop(f"the loop raised {one_line(error)}", to_others=True)
        self.close()

    def result(self) -> TrialResult:
        """What was found so far; of a trial that has not ended what its whole rounds say."""
        return replace(
            self._found,
            ranks=self._exchange.size,
            under_way=not self.done,
            steps_run=(self._steps_run[True], self._steps_run[False]),
            ends_in="FP8" if self._switch.arm == FP8 else "bf16",
        )

    def _ended_if_alone(self) -> TrialResult:
        """One rank of several must not end a trial that the others go on with."""
        if self._exchange.size == 1:
            self.close()
        return self.result()

    def report(self) -> str:
        """The answer and a table of figures; ends the trial if it is still under way and has one rank."""
        return printer.as_text(self._ended_if_alone()).rstrip()

    def save(self, results_dir: str | Path = "results") -> Path:
        """Stores the rounds as a run, which `python -m harness report FOLDER` renders; ends the trial as `report` does.

        Args:
            results_dir: the run's folder is `RESULTS_DIR/ab/RUN_ID`. Of several ranks rank 0 writes.

        Returns:
            The folder; an empty path where another rank wrote it.

        Raises:
            UsageError: it cannot be written to.
        """
        result = self._ended_if_alone()
        if self._exchange.rank:
            return Path()
        return rows.store(result, self.plan, type(self.model).__name__, results_dir)
