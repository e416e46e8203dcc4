"""Trial: FP8 against bf16 in a training loop of the user's own, by blocks of its steps."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor, nn

from fp8core.arguments import check_type
from fp8core.verify import StepProof
from fp8core.watching import profiling
from harness.store.errors import UsageError, one_line, out_of_memory
from harness.timing.clock import Clock, clock_for
from harness.training.ab import facts, rows
from harness.training.ab.exchange import Exchange, SilentRankError
from harness.training.ab.plan import Plan, Turn
from harness.training.ab.result import Round, TrialResult, merged
from harness.training.ab.seen import Block, Extent, Looks
from harness.training.ab.snapshot import Snapshot
from harness.training.ab.switch import Switch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    import torch

RANK_TIMEOUT_S = 300.0


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
        fp8_all_gather: the proof also demands that FSDP2 gathers FP8 codes.
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
        fp8_all_gather: bool = False,
        module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
        rank_timeout_s: float = RANK_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        check_type("model", model, nn.Module, "ab.Trial(model, recipe='tensorwise')")
        if after not in (None, "bf16", "fp8"):
            raise UsageError(f"after={after!r}: expected 'bf16', 'fp8' or None")
        if (
            isinstance(rank_timeout_s, bool)
            or not isinstance(rank_timeout_s, int | float)
            or not rank_timeout_s > 0
        ):
            raise UsageError(f"rank_timeout_s={rank_timeout_s!r}: expected seconds above 0")
        self.plan = Plan(steps, block, lead, seed)
        self.model, self.recipe, self.done = model, recipe, False
        self._snapshot = (
            None if restore is None else Snapshot(model, restore)
        )  # refused before anything is converted
        self._switch = Switch(model, recipe, module_filter_fn)
        self._ends_in_fp8 = self._switch.found_in_fp8 if after is None else after == "fp8"
        self._clock: Clock | None = clock
        self._restored: tuple[str, ...] | None = None
        self._not_restored = ""
        self._exchange = Exchange(rank_timeout_s)
        self._fp8_all_gather, self._rank_timeout_s = fp8_all_gather, rank_timeout_s
        self._turns = self.plan.turns()
        self._turn: Turn | None = None
        self._looks = Looks(model)
        self._blocks: dict[str, Block] = {}
        self._rounds: list[Round] = []
        self._steps_run = {True: 0, False: 0}
        self._problem = self._proof_line = self._stray = ""
        self._proved = False
        self._known = facts.Known()
        self._extent = Extent()
        self._is_fp8 = False
        self._switch.to(
            fp8=False
        )  # what runs before the first step, an evaluation say, is not in FP8 by surprise

    @property
    def device(self) -> torch.device:
        """Where the model lies now."""
        return next(self.model.parameters()).device

    def _begin(self) -> None:
        """Before the first step: by now the model lies where it trains."""
        if self._clock is None:
            self._clock = clock_for(self.device)
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
        """
        if self._turn is not None:
            raise RuntimeError("trial.step() inside of trial.step(); put one around each optimizer step")
        if not self.done and (told := self._exchange.fault_of_others()):
            self._stop(told)
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

    def _enter(self, turn: Turn) -> None:
        if turn.is_fp8 is not self._is_fp8:
            self._switch.to(turn.is_fp8)
            self._is_fp8 = turn.is_fp8
        if turn.purpose in ("lead", "timed") and turn.arm not in self._blocks:
            self._blocks[turn.arm] = Block(self.device, self._extent)
        if turn.purpose == "timed":
            self._blocks[turn.arm].begin()

    @contextmanager
    def _around(self, turn: Turn) -> Iterator[None]:
        """What watches the step."""
        if turn.purpose == "compare":
            self._proof = StepProof(
                self.model, recipe=self._switch.recipe, fp8_all_gather=self._fp8_all_gather
            )
        if turn.purpose in ("compare", "count"):
            with self._proof.step():
                yield
        elif turn.purpose == "none":
            with profiling(self.device.type == "cuda") as seen:
                yield
            if seen.counted:
                self._stray = f"{seen.counted} FP8 GEMMs ran in a step that was to be bf16"
        else:
            yield

    def _leave(self, turn: Turn, start: Any, end: Any, extent: Extent) -> None:
        """After a step: its place in the block, and what follows at the end of a round or of the proof."""
        fault = self._switch.fault(turn.is_fp8)
        if turn.purpose in ("lead", "timed"):
            block = self._blocks[turn.arm]
            block.add(start, end, extent, self._looks.loss, is_timed=turn.purpose == "timed", fault=fault)
        elif fault:
            self._stray = self._stray or fault
        if turn.purpose == "count":  # it runs as the timed ones do, compiled or not
            self._extent = extent
            self._prove()
        if turn.closes:
            self._close_round(turn.round)

    def _prove(self) -> None:
        proof = self._proof.conclude(rank_timeout_s=self._rank_timeout_s)
        self._known = facts.Known.of(proof, self.model)
        self._proof_line = proof.line
        if not proof.ok:  # on every rank: verdicts are shared
            self._stop(f"FP8 is not proved: {proof.line}")
            return
        mine = {"stray": self._stray, "extent": str(self._extent)}
        try:
            messages = self._exchange.all_of(mine)
        except SilentRankError as error:
            self._stop(str(error))
            return
        strays = [f"rank {rank}: {m['stray']}" for rank, m in enumerate(messages) if m["stray"]]
        extents = sorted({m["extent"] for m in messages})
        if strays:
            self._stop("; ".join(strays) if len(messages) > 1 else self._stray)
        elif len(extents) > 1:
            self._stop(f"ranks train on other batches: {'; '.join(extents)}")
        else:
            self._proved = True

    def _close_round(self, index: int) -> None:
        assert self._clock is not None
        self._clock.settle()
        blocks, self._blocks = self._blocks, {}
        mine = {
            "round": index,
            "times_ms": {arm: block.times_ms(self._clock) for arm, block in blocks.items()},
            "gaps_ms": {arm: block.gaps_ms(self._clock) for arm, block in blocks.items()},
            "losses": {arm: block.loss_values() for arm, block in blocks.items()},
            "faults": {arm: block.fault for arm, block in blocks.items() if block.fault},
            "peaks": {arm: block.peak_bytes for arm, block in blocks.items() if block.peak_bytes},
        }
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
            self._switch.to(self._ends_in_fp8)
            self._is_fp8 = self._ends_in_fp8
        if self._snapshot is not None and sum(self._steps_run.values()) + (self._turn is not None):
            try:
                self._snapshot.restore()
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
        self._end()

    def _end_if_alone(self) -> None:
        """One rank of several must not end a trial that the others go on with."""
        if self._exchange.size == 1:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stop(f"the loop raised {one_line(error)}")
        self._end()

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
            proof=self._proof_line,
            proved=self._proved,
            problem=self._problem,
            tokens=known.tokens,
            flops=known.flops,
            peak_bytes=known.peak_bytes,
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
        if not self._proved:
            return ()
        unseen = []
        if not self._extent.shapes:
            unseen.append("shapes of batches were not seen: tell them by trial.step(batch)")
        if not self._extent.updates:
            unseen.append("no optimizer step was seen inside trial.step()")
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
