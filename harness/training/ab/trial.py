"""Trial: FP8 against bf16 in a training loop of the user's own, by blocks of its steps."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor, nn

from fp8core.arguments import check_type
from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from harness.store.errors import UsageError, one_line, out_of_memory
from harness.timing.clock import Clock, clock_for
from harness.training.ab import facts, rows, waits
from harness.training.ab.energy import Meter
from harness.training.ab.exchange import Exchange, SilentRankError
from harness.training.ab.hooked import HookedSteps, UnfinishedStepError
from harness.training.ab.plan import ARMS, BASE, FP8, GATHER, WITH_GATHER, Plan, Turn
from harness.training.ab.proving import Proving
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
        _check(after, rank_timeout_s, fp8_all_gather)
        self._both = fp8_all_gather == "both"
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
        self._is_first_lead = False
        self._looks = Looks(model)
        self._blocks: dict[str, Block] = {}
        self._rounds: list[Round] = []
        self._steps_run = {True: 0, False: 0}
        self._problem = ""
        self._known = facts.Known()
        self._own_ms: list[float] = []  # of this round's profiled steps
        self._extent = Extent()
        self._arm, self._is_fp8 = BASE, False
        self._switch.to(BASE)  # what runs before the first step, an evaluation say, is not in FP8 by surprise

    @property
    def device(self) -> torch.device:
        """Where the model lies now."""
        return next(self.model.parameters()).device

    def _begin(self) -> None:
        """Before the first step: by now the model lies where it trains.

        Raises:
            UsageError: see `step`.
        """
        if self._both and not is_sharded_by_fsdp(self.model):
            raise UsageError(
                "fp8_all_gather='both': FSDP2 does not shard the model, so nothing is gathered; call fully_shard after "
                "ab.Trial(...), or leave fp8_all_gather out"
            )
        if self._clock is None:
            self._clock = clock_for(self.device)
        if self._exchange.size == 1:  # a framework may form the process group when training begins
            self._exchange = Exchange(self._exchange.timeout_s)
        self._meter = Meter(self.device, self._monitor)
        if self._snapshot is not None:
            self._snapshot.take()

    @contextmanager
    def step(self, batch: object = None) -> Iterator[None]:
        """Around one optimizer step: all of its microbatches, the optimizer, `update_scales` where the recipe needs it.

        Args:
            batch: what the step trains on, to see whether its shapes change; of a model that is not compiled they are
                seen without it.

        Raises:
            RuntimeError: a step inside of a step.
            UsageError: two kinds of all-gather were to be compared, and the model is not sharded.
        """
        if self._turn is not None:
            raise RuntimeError("trial.step() inside of trial.step(); put one around each optimizer step")
        if not self.done and (fault := self._exchange.fault_of_others()):
            self._stop(fault)
        turn = None if self.done else next(self._turns, None)
        if turn is None:
            self._end()
            yield
            return
        if not sum(self._steps_run.values()):
            self._begin()
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
            self._exchange.raised(f"a step in {precision}{proof} {what}")
            self._stop(f"a step in {precision}{proof} {what}")
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
        self._is_first_lead = turn.purpose == "lead" and turn.arm not in self._blocks
        if turn.purpose in ("lead", "timed") and turn.arm not in self._blocks:
            self._blocks[turn.arm] = Block(self.device, self._extent, self.plan.block, self._meter)
        if turn.purpose == "timed":
            self._blocks[turn.arm].begin(self._clock)

    @contextmanager
    def _around(self, turn: Turn) -> Iterator[None]:
        """What watches the step: never a timed one, and in all arms alike."""
        on_gpu = self.device.type == "cuda"
        if self._is_first_lead and self._exchange.size > 1:
            with waits.watched(on_gpu) as own_ms:
                yield
            self._own_ms += own_ms
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
        mine = {**told(index, blocks, self._clock), "own_ms": self._own_ms}
        self._own_ms = []
        self._meter.judge(min(block.lasted_s(self._clock) for block in blocks.values()), self.plan.block)
        try:
            messages = self._exchange.all_of(mine)
        except SilentRankError as error:
            self._stop(str(error))
            return
        if any(m["round"] != index for m in messages):
            self._stop(
                f"ranks are in rounds {[m['round'] for m in messages]}: they took other numbers of steps"
            )
            return
        self._rounds.append(merged(index, messages))
        self._known.add_round(messages)
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
        if self._snapshot is not None and sum(self._steps_run.values()) + (self._turn is not None):
            try:
                self._snapshot.restore(mid_step=self._turn is not None)
            except Exception as error:  # noqa: BLE001 - told; the copies stay for another try by close()
                self._not_restored = one_line(error)
                return
            self._restored, self._not_restored = self._snapshot.names, ""
        self._snapshot = None  # its memory

    def _stop(self, problem: str) -> None:
        """The trial ends without an answer."""
        self._problem = self._problem or problem
        self._end()

    def close(self) -> None:
        """Ends a trial early, as when the loader has no more batches; restores what was to be restored.

        Of several ranks all must call it at the same step: until then they train on in different precisions.
        """
        self.end_step(UnfinishedStepError("left before its end"))
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
            self._stop(f"the loop raised {one_line(error)}")
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
            notes=self._notes(),
            layers=len(self._switch.layers),
            facts=known.resolved,
        )

    def _notes(self) -> tuple[str, ...]:
        """What could not be watched."""
        if not self._proving.proved:
            return ()
        unseen = []
        if not self._extent.shapes:
            unseen.append("shapes of batches were not seen: tell them by trial.step(batch)")
        if not self._extent.updates:
            unseen.append("no optimizer step was seen inside trial.step()")
        if self._exchange.size > 1 and not self.plan.lead:
            unseen.append("which rank the others wait for was not looked at: lead=0")
        return tuple(unseen)

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


def _check(after: object, rank_timeout_s: object, fp8_all_gather: object) -> None:
    if after not in (None, "bf16", "fp8"):
        raise UsageError(f"after={after!r}: expected 'bf16', 'fp8' or None")
    if (
        not isinstance(rank_timeout_s, int | float)
        or isinstance(rank_timeout_s, bool)
        or not rank_timeout_s > 0
    ):
        raise UsageError(f"rank_timeout_s={rank_timeout_s!r}: expected seconds above 0")
    if not isinstance(fp8_all_gather, bool) and fp8_all_gather != "both":
        raise UsageError(f"fp8_all_gather={fp8_all_gather!r}: expected True, False or 'both'")
