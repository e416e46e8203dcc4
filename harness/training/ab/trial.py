"""Trial: FP8 against bf16 in a training loop of the user's own, by blocks of its steps."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor, nn

from fp8core.arguments import check_type
from fp8core.verify import StepProof
from fp8core.watching import profiling
from harness.store.errors import UsageError, one_line, out_of_memory
from harness.training.ab import facts, rows
from harness.training.ab.clock import Clock, clock_for
from harness.training.ab.exchange import Exchange, SilentRankError
from harness.training.ab.plan import Plan, Turn
from harness.training.ab.result import Round, TrialResult, merged
from harness.training.ab.seen import Block, Looks
from harness.training.ab.snapshot import Snapshot
from harness.training.ab.switch import Switch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

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
        after: precision in which the model is left.
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
        after: Literal["bf16", "fp8"] = "bf16",
        fp8_all_gather: bool = False,
        module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
        rank_timeout_s: float = RANK_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        check_type("model", model, nn.Module, "ab.Trial(model, recipe='tensorwise')")
        if after not in ("bf16", "fp8"):
            raise UsageError(f"after={after!r}: expected 'bf16' or 'fp8'")
        self.plan = Plan(steps, block, lead, seed)
        self.model, self.recipe, self.done = model, recipe, False
        self._after = after
        self._switch = Switch(model, recipe, module_filter_fn)
        self.device = next(model.parameters()).device
        self._clock = clock if clock is not None else clock_for(self.device)
        self._snapshot = None if restore is None else Snapshot(model, restore)
        self._restored: tuple[str, ...] | None = None
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
        self._is_fp8: bool | None = None

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
        turn = None if self.done else next(self._turns, None)
        if turn is None:
            self._end()
            yield
            return
        self._turn = turn
        try:
            self._enter(turn)
            with ExitStack() as around:
                self._looks.start(batch)
                around.enter_context(self._around(turn))
                start = self._clock.mark()
                yield
                end = self._clock.mark()
            self._steps_run[turn.is_fp8] += 1
            self._leave(turn, start, end)
        except BaseException as error:
            what = "ran out of memory" if out_of_memory(error) else f"raised {one_line(error)}"
            self._stop(f"a step in {'FP8' if turn.is_fp8 else 'bf16'} {what}")
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
            self._blocks[turn.arm] = Block(self.device)
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

    def _leave(self, turn: Turn, start: Any, end: Any) -> None:
        """After a step: its place in the block, and what follows at the end of a round or of the proof."""
        fault = self._switch.fault(turn.is_fp8)
        if turn.purpose in ("lead", "timed"):
            block = self._blocks[turn.arm]
            block.add(start, end, self._looks, is_timed=turn.purpose == "timed", fault=fault)
        elif fault:
            self._stray = self._stray or fault
        if turn.purpose == "count":
            self._prove()
        if turn.closes:
            self._close_round(turn.round)

    def _prove(self) -> None:
        proof = self._proof.conclude(rank_timeout_s=self._rank_timeout_s)
        self._known = facts.Known.of(proof, self.model)
        self._proof_line = proof.line
        try:
            strays = [m["stray"] for m in self._exchange.all_of({"stray": self._stray})]
        except SilentRankError as error:
            self._stop(str(error))
            return
        stray = next((f"rank {rank}: {text}" for rank, text in enumerate(strays) if text), "")
        self._proved = proof.ok and not stray
        if stray:
            self._stop(stray if len(strays) > 1 else self._stray)
        elif not proof.ok:
            self._stop(f"FP8 is not proved: {proof.line}")

    def _close_round(self, index: int) -> None:
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
        if self.done:
            return
        self.done = True
        self._looks.close()
        self._switch.to(self._after == "fp8")
        self._is_fp8 = self._after == "fp8"
        if self._snapshot is not None:
            self._snapshot.restore()
            self._restored = self._snapshot.names
            self._snapshot = None  # its memory

    def _stop(self, problem: str) -> None:
        """The trial ends without an answer."""
        self._problem = self._problem or problem
        self._end()

    def close(self) -> None:
        """Ends a trial early, as when the loader has no more batches; restores what was to be restored."""
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
            method=self._clock.method,
            ranks=self._exchange.size,
            proof=self._proof_line,
            proved=self._proved,
            problem=self._problem,
            tokens=known.tokens,
            flops=known.flops,
            peak_bytes=known.peak_bytes,
            slow_rank=known.slow_rank(),
            steps_run=(self._steps_run[True], self._steps_run[False]),
            ends_in={True: "FP8", False: "bf16", None: "bf16"}[self._is_fp8],
            restored=self._restored,
            layers=len(self._switch.layers),
            facts=known.resolved,
        )

    def report(self) -> str:
        """The answer in at most 20 lines; ends the trial if it is still under way."""
        self._end()
        return "\n".join(self.result().lines())

    def save(self, results_dir: str | Path = "results") -> Path:
        """Stores the rounds as a run, which `python -m harness report FOLDER` renders; ends the trial.

        Args:
            results_dir: the run's folder is `RESULTS_DIR/ab/RUN_ID`. Of several ranks rank 0 writes.

        Returns:
            The folder.

        Raises:
            UsageError: it cannot be written to.
        """
        self._end()
        return rows.store(
            self.result(), self.plan, type(self.model).__name__, results_dir, self._exchange.rank == 0
        )
