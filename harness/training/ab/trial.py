"""Trial: FP8 against bf16 in a training loop of the user's own, by blocks of its steps."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor, nn

from fp8core.arguments import check_type
from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from harness.store.errors import UsageError, one_line, out_of_memory
from harness.timing.clock import Clock, clock_for
from harness.training.ab import facts, rows, setting, waits
from harness.training.ab.energy import Meter
from harness.training.ab.exchange import Exchange, SilentRankError
from harness.training.ab.hooked import HookedSteps, UnfinishedStepError
from harness.training.ab.plan import ARMS, BASE, FP8, GATHER, WITH_GATHER, Plan, Turn
from harness.training.ab.proving import Proving, is_profiled, refuse_a_profiler
from harness.training.ab.result import Round, TrialResult, merged
from harness.training.ab.seen import Block, Extent, Looks, told
from harness.training.ab.snapshot import Snapshot
from harness.training.ab.switch import Switch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    import torch

RANK_TIMEOUT_S = 300.0


class Trial(HookedSteps):
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
            parameters for it, so make the optimizer afterwards, as `fully_shard` asks for anyway. "both": FP8 runs in two
            arms, one in which FSDP2 does and one in which it gathers weights in high precision.
        module_filter_fn: as for `convert_to_float8_training`.
        rank_timeout_s: how long ranks wait for each other once a round.

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
        fp8_all_gather: bool | Literal["both"] = False,
        module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
        rank_timeout_s: float = RANK_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        check_type("model", model, nn.Module, "ab.Trial(model, recipe='tensorwise')")
        setting.check(after, rank_timeout_s, fp8_all_gather, module_filter_fn, clock)
        self._gather, self._both = fp8_all_gather, fp8_all_gather == "both"
        self.plan = Plan(steps, block, lead, seed, WITH_GATHER if self._both else ARMS)
        self.model, self.recipe, self.done = model, recipe, False
        self._snapshot = (
            None if restore is None else Snapshot(model, restore)
        )  # refused before anything is converted
        self._switch = Switch(model, recipe, module_filter_fn, fp8_all_gather=fp8_all_gather)
        self._ends_in_fp8 = self._switch.found_in_fp8 if after is None else after == "fp8"
        self._clock: Clock | None = clock
        self._monitor: Any = None  # of the board's energy, in place of NVML's
        self._meter: Meter | None = None
        self._restored: tuple[str, ...] | None = None
        self._not_restored = ""
        self._exchange = Exchange(rank_timeout_s)
        self._proving = Proving(
            model, self._switch, gather=bool(fp8_all_gather), both=self._both, rank_timeout_s=rank_timeout_s
        )
        self._turns = self.plan.turns()
        self._turn: Turn | None = None
        self._has_begun = False  # its first step
        self._is_watched = False  # the step under way is profiled for what this rank waits
        self._looks = Looks(model)
        self._blocks: dict[str, Block] = {}
        self._rounds: list[Round] = []
        self._steps_run = {True: 0, False: 0}
        self._problem = ""
        self._known = facts.Known()
        self._own_ms: dict[str, list[float]] = {}  # of this round's profiled steps, by arm
        self._extent = Extent()
        self._arm, self._is_fp8 = BASE, False
        self._switch.to(BASE)  # what runs before the first step, an evaluation say, is not in FP8 by surprise

    @property
    def device(self) -> torch.device:
        """Where the model lies now."""
        return next(self.model.parameters()).device

    def _begin(self) -> str:
        """Before the first step: by now the model lies where it trains. Says why the ranks are not in one trial; "" if they are.

        Raises:
            UsageError: see `step`.
        """
        if self._exchange.size == 1:  # a framework may form the process group when training begins
            self._exchange = Exchange(self._exchange.timeout_s)
        refuse_a_profiler()
        if self._both and not is_sharded_by_fsdp(self.model):
            raise UsageError(
                "fp8_all_gather='both': FSDP2 does not shard the model, so nothing is gathered; call fully_shard after "
                "ab.Trial(...), or leave fp8_all_gather out"
            )
        self._clock = self._clock or clock_for(self.device)
        self._meter = Meter(self.device, self._monitor)
        if self._snapshot is not None:
            self._snapshot.take()
        restore = None if self._snapshot is None else self._snapshot.names
        mine = setting.of(self.plan, self._switch, self._gather, self._ends_in_fp8, restore)
        # Last, so that a rank that could not begin has told it; before any step, so that no collective can diverge
        return setting.disagreement(self._exchange, mine)

    def _next(self) -> Turn | None:
        """What the step that begins is for; None where it is not the trial's."""
        if self.done:
            return None
        # Before its first step a rank refuses what it has to refuse itself, and is then told what others have
        if self._has_begun and (fault := self._exchange.fault_of_others()):
            self._stop(fault)
            return None
        turn = next(self._turns, None)
        if turn is None:
            self._end()
        elif not self._has_begun:
            try:
                problem = self._begin()
            except BaseException as error:
                self._stop(f"the trial could not begin: {one_line(error)}", tell=True)
                raise
            if problem:
                self._stop(problem)
                return None
            self._has_begun = True
        return turn

    @contextmanager
    def step(self, batch: object = None) -> Iterator[None]:
        """Around one optimizer step: all of its microbatches, the optimizer, `update_scales` where the recipe needs it.

        Args:
            batch: what the step trains on, to see whether its shapes change; of a model that is not compiled they are
                seen without it.

        Raises:
            RuntimeError: a step inside of a step.
            UsageError: two kinds of all-gather were to be compared, and the model is not sharded; or a profiler is active
                that the trial's own would end. The trial is over then.
        """
        if self._turn is not None:
            raise RuntimeError("trial.step() inside of trial.step(); put one around each optimizer step")
        turn = self._next()
        if turn is None:
            self._snapshot = None  # the loop trains on: what could not be put back stays so
            yield
            return
        assert self._clock is not None
        self._turn = turn
        try:
            self._enter(turn)
            with self._around(turn):
                self._looks.start(batch)
                start = self._clock.mark()
                yield
                end = self._clock.mark()
            self._steps_run[turn.is_fp8] += 1
            self._leave(turn, start, end, self._looks.end())
        except BaseException as error:
            what = "ran out of memory" if out_of_memory(error) else f"raised {one_line(error)}"
            precision = "FP8" if turn.is_fp8 else "bf16"
            proof = ", compared with arithmetic of its own," if turn.purpose == "compare" else ""
            self._stop(f"a step in {precision}{proof} {what}", tell=True)
            raise
        finally:
            self._turn = None

    def loss(self, loss: Tensor | float) -> None:
        """Tells the loss of the step under way, where the model does not return it."""
        self._looks.loss = loss.detach() if isinstance(loss, Tensor) else loss

    def add_batch(self, batch: object) -> None:
        """Tells one more part of what the step under way trains on, as `step(batch)` does with all of it."""
        self._looks.add(batch)

    def _enter(self, turn: Turn) -> None:
        assert self._clock is not None
        assert self._meter is not None
        if turn.arm != self._arm:
            self._switch.to(turn.arm)
            self._arm, self._is_fp8 = turn.arm, turn.is_fp8
        self._is_watched = (
            turn.purpose == "lead"
            and turn.arm not in self._blocks
            and self._exchange.size > 1
            and not is_profiled()  # by the user: then it is left out, on this rank and so for this round
        )
        if turn.purpose in ("lead", "timed") and turn.arm not in self._blocks:
            self._blocks[turn.arm] = Block(self.device, self._extent, self.plan.block, self._meter)
        if turn.purpose == "timed":
            self._blocks[turn.arm].begin(self._clock)

    @contextmanager
    def _around(self, turn: Turn) -> Iterator[None]:
        """What watches the step: never a timed one, and in all arms alike."""
        on_gpu = self.device.type == "cuda"
        if self._is_watched:
            with waits.watched(on_gpu) as own_ms:
                yield
            self._own_ms[turn.arm] = own_ms
        else:
            with self._proving.around(turn, on_gpu=on_gpu):
                yield

    def _leave(self, turn: Turn, start: Any, end: Any, extent: Extent) -> None:
        """After a step: its place in the block, and what follows at the end of a round or of the proof."""
        assert self._clock is not None
        fault = self._switch.fault(turn.arm)
        if turn.purpose in ("lead", "timed"):
            block = self._blocks[turn.arm]
            block.add(start, end, extent, self._looks.loss, is_timed=turn.purpose == "timed", fault=fault)
            if self._is_watched:
                block.forget_end()
            block.close(self._clock)
        elif fault:
            self._proving.stray = self._proving.stray or fault
        if turn.purpose == "count":  # it runs as the timed ones do, compiled or not
            self._extent = extent
            self._prove(turn.arm)
        if turn.closes:
            self._close_round(turn.round)

    def _prove(self, arm: str) -> None:
        proof, problem = self._proving.conclude(arm)
        self._known.add_proof(arm, proof, self.model)
        if not problem and arm == self.plan.arms[-1]:  # else another FP8 arm is still to be proved
            problem = self._proving.agree(self._exchange, self._extent)
        if problem:
            self._stop(problem)

    def _close_round(self, index: int) -> None:
        assert self._clock is not None
        assert self._meter is not None
        self._clock.settle()
        blocks, self._blocks = self._blocks, {}
        mine = {**told(blocks, self._clock), "own_ms": self._own_ms}
        self._own_ms = {}
        self._meter.judge(min(block.lasted_s(self._clock) for block in blocks.values()), self.plan.block)
        try:
            messages = self._exchange.all_of(mine)
        except SilentRankError as error:
            self._stop(str(error))
            return
        self._rounds.append(merged(index, messages))
        self._known.add_round(index, messages)
        if self.plan.rounds == index + 1:
            self._end()

    def _end(self) -> None:
        """The trial is over: the model gets the precision that it is left in, and back what was to be restored."""
        if not self.done:
            self.done = True
            self._looks.close()
            if self._meter is not None:
                self._meter.close()
            self._switch.leave(fp8=self._ends_in_fp8)
            self._is_fp8 = self._ends_in_fp8
        if self._snapshot is not None and self._has_begun:
            try:
                self._snapshot.restore(mid_step=self._turn is not None)
            except Exception as error:  # noqa: BLE001 - told; the copies stay for another try by close()
                self._not_restored = one_line(error)
                return  # as long as no later step has trained the model on
            self._restored, self._not_restored = self._snapshot.names, ""
        self._snapshot = None  # its memory

    def _stop(self, problem: str, *, tell: bool = False) -> None:
        """The trial ends without an answer; `tell` the other ranks, which cannot know."""
        if tell:
            self._exchange.raised(problem)
        self._problem = self._problem or problem
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

    def _end_if_alone(self) -> None:
        """One rank of several must not end a trial that the others go on with."""
        if self._exchange.size == 1:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end_step(error)
            if not self.done:
                self._stop(f"the loop raised {one_line(error)}", tell=True)
        self.close()

    def result(self) -> TrialResult:
        """What was found so far; of a trial that has not ended what its whole rounds say."""
        known = self._known
        return TrialResult(
            recipe=self.recipe,
            device=self.device.type,
            rounds=tuple(self._rounds),
            method=self._clock.method if self._clock is not None else "",
            under_way=not self.done,
            ranks=self._exchange.size,
            arms=self.plan.arms,
            proof=self._proving.lines.get(FP8, ""),
            gather_proof=self._proving.lines.get(GATHER, ""),
            proved=self._proving.proved,
            problem=self._problem,
            tokens=known.tokens,
            flops=known.flops,
            peak_bytes=known.peak_bytes,
            joules={arm: tuple(read) for arm, read in known.joules.items()},
            unmetered=self._meter.why_not if self._meter is not None else "",
            gpu=known.gpu,
            slow_rank=known.slow_rank(),
            steps_run=(self._steps_run[True], self._steps_run[False]),
            ends_in="FP8" if self._is_fp8 else "bf16",
            restored=self._restored,
            not_restored=self._not_restored,
            notes=facts.unseen(self._extent, self.plan, self._exchange.size) if self._proving.proved else (),
            layers=len(self._switch.layers),
            facts=known.resolved,
        )

    def report(self) -> str:
        """The answer in at most 20 lines; ends the trial if it is still under way and has one rank."""
        self._end_if_alone()
        return "\n".join(self.result().lines())

    def save(self, results_dir: str | Path = "results") -> Path:
        """Stores the rounds as a run, which `python -m harness report FOLDER` renders; ends the trial as `report` does.

        Args:
            results_dir: the run's folder is `RESULTS_DIR/ab/RUN_ID`. Of several ranks rank 0 writes.

        Returns:
            The folder.

        Raises:
            UsageError: it cannot be written to.
        """
        self._end_if_alone()
        return rows.store(
            self.result(), self.plan, type(self.model).__name__, results_dir, self._exchange.rank == 0
        )
