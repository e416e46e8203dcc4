"""A training run of several ranks: FSDP2 over all of them, sharded checkpoints, one curve.

Every rank calls `train_sharded` with the same job. Batches, learning rates, looks and seeds are those of
`harness.training.loop`, so that with the same kernels, ranks and reductions two runs are equal bit for bit, and so is one
that was cut off and continued from its checkpoint. Ranks end together: what one of them is asked, all do after the same step.

A loss is the mean over ranks, in their order; the held-out batches are dealt to the ranks.
"""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fp8core import amax_state_dict, load_amax_state_dict
from harness.store.errors import UsageError
from harness.training.determinism import reproducible
from harness.training.loop import OnStep, TrainingRun
from harness.training.parallel.ranked import blocks_of, shard
from harness.training.setup import optimizer_of
from harness.training.sharded_checkpoints import ShardedCheckpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from harness.training.loop import Result, TrainingJob
    from harness.training.setup import Setup, Trainee


class NotSavedError(RuntimeError):
    """A run that was asked to end could not save what it had."""


def train_sharded(
    job: TrainingJob,
    device: str,
    workspace: Path,
    on_step: OnStep = lambda step, steps: None,
    *,
    compiled: bool = False,
    asked_to_end: Callable[[], bool] = lambda: False,
    before: Callable[[TrainingRun], None] = lambda run: None,
    on_problem: Callable[[str], None] = lambda problem: None,
) -> tuple[Result, bool]:
    """Trains on all ranks from the first step, or on from the newest checkpoint, to the last.

    Args:
        job: of this rank: its `batches` are this rank's own, its `heldout` all ranks'.
        device: "cpu" or "cuda".
        workspace: a folder of this run's own, which all ranks see.
        on_step: called after each step with the steps done and their total.
        compiled: torch.compile for each block, within FSDP2.
        asked_to_end: asked after each step; where it is true on any rank, all save a checkpoint and end.
        before: called once the model is loaded and its FP8 is proved or not, before the first step.
        on_problem: called when a checkpoint cannot be written or read, with what and why.

    Returns:
        The run so far, and whether it came to its end.

    Raises:
        UsageError: held-out batches that the ranks cannot share out; no checkpoint can be read.
        ValueError: the model cannot be converted or sharded.
        NotSavedError: it was asked to end, and the checkpoint could not be written.
    """
    with reproducible(device) as nondeterministic, torch.random.fork_rng():
        torch.manual_seed(job.setup.seed)
        run = _ShardedRun(job, device, workspace, compiled, asked_to_end, on_problem)
        before(run)
        result = run.to_the_end(on_step)
    result.facts["nondeterministic"] = nondeterministic
    if run.left_off and run.unsaved:
        raise NotSavedError(
            f"asked to end, and the checkpoint could not be written: {run.unsaved}; mend that and give the same "
            "command again, which continues from the newest checkpoint that is there"
        )
    return result, not run.left_off


def shard_blocks(model: nn.Module, setup: Setup, *, compiled: bool) -> None:
    """FSDP2 of a model, whose blocks are compiled one by one if asked; make the optimizer afterwards."""
    for block in blocks_of(model) if compiled else ():
        block.compile()
    shard(model, setup.compute)


class _ShardedRun(TrainingRun):
    """This rank's part of a run under way."""

    def __init__(
        self, job: TrainingJob, device: str, workspace: Path, compiled: bool, asked_to_end: Callable[[], bool],
        on_problem: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._asked_to_end, self._on_problem = asked_to_end, on_problem
        self.unsaved = ""  # why the last attempt failed
        rank, world = dist.get_rank(), dist.get_world_size()
        if len(job.heldout) % world:
            raise UsageError(
                f"{len(job.heldout)} held-out batches: expected a multiple of {world}, the ranks"
            )

        def spread(trainee: Trainee) -> None:
            if job.alter is not None:
                job.alter(trainee)
            shard_blocks(trainee.model, job.setup, compiled=compiled)
            trainee.optimizer = optimizer_of(trainee.model, job.setup, device)

        mine = replace(
            job,
            alter=spread,
            heldout=job.heldout[rank::world],
            identity=f"{job.identity} ranks={world}",
        )
        super().__init__(mine, device, workspace)

    def _open(self, workspace: Path) -> Any:
        checkpoints = ShardedCheckpoints(workspace, self.job.identity, self._on_problem)
        found = checkpoints.load_newest(self.trainee.model, self.trainee.optimizer)
        if found is not None:
            self.step, run = found
            load_amax_state_dict(self.trainee.model, run["amaxes"])
            self.job.schedule.load_state_dict(run["schedule"])
            self.curves.points, self.elapsed = run["curves"], run["elapsed"]
            self.cpu_s_before = run["cpu_s"]
            self.read |= run["read"]
            self.resumed = [*run["resumed"], self.step]
        return checkpoints

    def _save(self, checkpoints: Any) -> None:
        run = {
            "amaxes": amax_state_dict(self.trainee.model),
            "schedule": self.job.schedule.state_dict(),
            "curves": self.curves.points,
            "elapsed": self.elapsed,
            "cpu_s": self.cpu_s,
            "read": self.read,
            "resumed": self.resumed,
        }
        saved = checkpoints.save(self.step, self.trainee.model, self.trainee.optimizer, run)
        self.unsaved = "" if saved else checkpoints.problems[-1]
        if checkpoints.problems:
            self.facts["checkpoint_problems"] = checkpoints.problems

    def to_the_end(self, on_step: OnStep) -> Result:
        begun_at = self.step
        result = super().to_the_end(on_step)
        if not result.stopped and not self.left_off and self.step > begun_at:
            self._save(self.checkpoints)  # the trained model
        return result

    def _evaluate(self) -> None:
        seen = self.curves.points.get(("heldout_loss", ""))
        if not seen or seen[-1][0] != self.step:  # the last checkpoint has the last look in it
            super()._evaluate()

    def _is_due(self, saved_at: float) -> bool:
        mine = [self._asked_to_end(), super()._is_due(saved_at)]
        flags = torch.tensor(mine, dtype=torch.int32, device=self._place)
        dist.all_reduce(flags, dist.ReduceOp.MAX)  # no rank saves or ends alone
        self.left_off = bool(flags[0])
        return bool(flags.any())

    def _mean(self, value: Tensor | float) -> float:
        mine = torch.as_tensor(value, dtype=torch.float64, device=self._place).reshape(1)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        return float(torch.cat(every).mean())

    @property
    def _place(self) -> torch.device:
        return next(self.trainee.model.parameters()).device


@contextmanager
def notices(
    *numbers: signal.Signals, file: Path | None = None, every_s: float = 1.0
) -> Iterator[Callable[[], bool]]:
    """Whether this process was asked to end: by a signal, or by a file that somebody makes.

    Within the block these signals end nothing: a loop that asks after each step saves what it has and ends by itself.

    Args:
        numbers: the signals; the block must be in the main thread.
        file: its presence asks too; looked at every so many seconds.
        every_s: between two looks.
    """
    asked, looked_at = [False], [0.0]

    def note(number: int, frame: object) -> None:
        asked[0] = True

    def is_asked() -> bool:
        if file is not None and not asked[0] and time.monotonic() - looked_at[0] >= every_s:
            looked_at[0] = time.monotonic()
            asked[0] = file.exists()
        return asked[0]

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield is_asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
