"""The reference recipe as one job of many ranks: FP8 proved, timed against bf16, trained against bf16, reported.

    torchrun --nproc-per-node=2 -m harness.cli.reference_job run_id=first model=llama_tiny batch=2 seq=64 steps=20

`docs/examples/reference_7b.sbatch` starts it under Slurm. Keys: `harness.cli.reference_settings.Settings`. Each rank runs this
program, and rank 0 alone writes rows: the prediction of the sweep `reference_7b` for these GPUs, a block of steps that pairs
bf16 with FP8 (`harness.ab`), and a training run of each in turn, judged by the loss verdict. What is stored is not done again:
the same command continues the run, a training run from its last checkpoint.

A rank on which FP8 is not proved ends the job before it trains in FP8. SIGTERM, SIGUSR1 or a file `_end` in the run's folder
ends it after the step under way, with a checkpoint.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fp8core import RECIPES, update_scales
from fp8core.distributed.gather_reasons import recipe_reason
from harness import ab, report, store
from harness.cli import reference_facts, reference_refusals
from harness.cli import reference_prediction as prediction
from harness.cli.rank_agreement import (
    from_first,
    gathered,
    hosts,
    leave_word,
    refuse_other_facts,
    refuse_unshared,
    together,
    word_left,
)
from harness.cli.reference_settings import COMPUTE, SWEEP, Settings, described, read
from harness.engine import run_lock
from harness.engine.plan import PlannedCase
from harness.engine.rows import row, trial_rows
from harness.judge.verdict import judge
from harness.judge.verdict import lines as verdict_lines
from harness.machine import environment, raw_output, torchrun
from harness.machine.hardware import of_env
from harness.store import run_files
from harness.store.case import Case
from harness.store.cause import Cause
from harness.store.errors import UsageError
from harness.store.proof import FIELD, ProofOutcome
from harness.suites import divergence
from harness.timing.workload import Trial
from harness.training import batches, meta_estimate
from harness.training.ab.plan import ARMS, WITH_GATHER
from harness.training.ab.rows import measurements
from harness.training.loop import Regime, TrainingJob, TrainingRun
from harness.training.setup import Setup, optimizer_of, prepare
from harness.training.sharded import NotSavedError, notices, shard_blocks, train_sharded
from harness.training.steps import cause_of_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


END = "_end"  # a file in the run's folder that asks for an end
TIMEOUT = timedelta(minutes=10)  # of one collective: a rank that is gone is not waited for longer
SAID_S = 30.0  # between two lines of progress
QUESTION = "Does FP8 pay in the reference recipe on these ranks, and does it train the same?"


class InterruptedJobError(Exception):
    """It was asked to end, and all that it has is stored."""


class NotProvedError(Exception):
    """FP8 is not proved on every rank."""


def main(words: Sequence[str]) -> int:
    """Runs the job on this rank; exit code 0; 1 where FP8 is not proved, a run was stopped by a value that is not finite or
    no checkpoint could be written at the end that was asked for; 2 where it could not be carried out, or was asked to end."""
    first = os.environ.get("RANK", "0") == "0"
    if words in (["--help"], ["-h"]):
        raw_output.say(f"{described()}\n")
        return 0
    try:
        settings = read(words)
        if not torchrun.started():
            raise UsageError(
                "one process was started: start it with torchrun or docs/examples/reference_7b.sbatch"
            )
        return _on_ranks(settings)
    except UsageError as error:
        if first or isinstance(error, reference_refusals.LocalGpuError):
            raw_output.say(f"error: {error}\n")
        return 2
    except NotProvedError as error:  # of each rank: another one's reason may be known to it alone
        raw_output.say(f"{'' if first else f'rank {dist.get_rank()}: '}{error}\n")
        return 1
    except (InterruptedJobError, NotSavedError) as error:
        if first:
            raw_output.say(f"{'error: ' * isinstance(error, NotSavedError)}{error}\n")
        return 2 if isinstance(error, InterruptedJobError) else 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _on_ranks(settings: Settings) -> int:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(reference_refusals.local_gpu())
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    folder = Path(settings.results_dir).absolute() / SWEEP / settings.run_id
    with notices(signal.SIGTERM, signal.SIGUSR1, file=folder / END) as asked:
        job = ReferenceJob(settings, "cuda" if on_gpu else "cpu", folder, asked)
        code = job.run()
    dist.barrier()
    if dist.get_rank() == 0:
        written = report.write_report([folder], Path(settings.reports_dir) / f"{settings.run_id}.html")
        raw_output.say(f"report   {written.html}\nresults  {folder}\n")
    return code


class ReferenceJob:
    """This rank's part of the job."""

    def __init__(self, settings: Settings, device: str, folder: Path, asked: Callable[[], bool]) -> None:
        self.settings, self.device, self.folder, self._asked = settings, device, folder, asked
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.compiled = device == "cuda" if settings.compile is None else settings.compile
        self._writer: Any = None
        self._stored: set[tuple[str, str]] = set()
        self._said_at = 0.0

    def run(self) -> int:
        """All that is not stored yet; see `main` for the exit code.

        Raises:
            UsageError: on all ranks alike.
        """
        self.made = reference_facts.made_with(self.device)
        refuse_other_facts({**self.made, "settings": str(self.settings.same)})
        together(self._check)
        refuse_other_facts({"sha256 of the data": self.text.sha256 if self.text is not None else ""})
        refuse_unshared(self.folder, f"results_dir={self.settings.results_dir}")
        from_first(lambda: reference_refusals.check_reports(self.settings.reports_dir))
        with ExitStack() as stack:
            # A node that died in this run is forgotten after a while
            lock = run_lock.held(self.folder, patience_s=run_lock.PATIENCE_S)
            from_first(lambda: stack.enter_context(lock))
            state = "failed"
            try:
                self._open()
                self._compare()
                self._train()
                state = "finished"
            except InterruptedJobError:
                state = "interrupted"
                raise
            except NotProvedError:
                state = "finished"  # its rows say so
                raise
            finally:
                if self._writer is not None:
                    self._writer.close(state)
                if self.rank == 0:  # what asked this start to end does not ask the next one
                    (self.folder / END).unlink(missing_ok=True)
        return int(from_first(self._conclude))

    @property
    def gathers_codes(self) -> bool:
        """Whether FSDP2 can gather the weights as FP8 codes with this recipe."""
        return not recipe_reason(RECIPES[self.settings.recipe].with_fp8_all_gather())

    # What is refused

    def _check(self) -> None:
        mine = self.settings
        reference_refusals.check_recipe(mine, self.world, self.device)
        mine.check_ab_steps(WITH_GATHER if self.gathers_codes else ARMS)
        self.regime = Regime(
            mine.steps, mine.lr, mine.lr / 10, mine.lr_warmup, mine.eval_every, 0, mine.checkpoint_s
        )
        self.text = reference_refusals.checked_data(mine)

    def _open(self) -> None:
        """Takes the run's folder, and stores the prediction of the sweep for these GPUs, or why there is none."""
        mine, places = self.settings, hosts()

        def opened() -> set[tuple[str, str]]:
            about = store.read_about(self.folder)
            mine.refuse_other_run(about, self.world)
            facts = environment.fingerprint(self.device)
            gpu = of_env(facts)
            key = gpu.key if gpu is not None else ""
            case = prediction.case_of(mine, self.world, key or self.device)
            predicted = prediction.rows(case, mine.recipe, key)
            made = reference_facts.continued_with(about, self.made, anyway=mine.resume_anyway)
            about |= made | {
                "made_by": "reference_job",
                "command": f"torchrun ... -m harness.cli.reference_job {shlex.join(sys.argv[1:])}",
                "question": QUESTION,
                "settings": mine.same,
                "ranks": self.world,
                "hosts": sorted(set(places)),
            }
            key = environment.env_id(facts)
            self._writer = store.RunWriter(
                self.folder, run_id=mine.run_id, sweep=SWEEP, env_id=key, env=facts, about=about
            )
            if not any(self.folder.glob("*.parquet")):
                self._writer.append(predicted)
                return set()
            rows = store.read(self.folder)
            done = rows[rows["status"] != "failed"]
            return set(zip(done["case_id"], done["arm"], strict=True))

        self._stored = from_first(opened)

    # What is done

    def _compare(self) -> None:
        """The block that pairs bf16 with FP8 steps, on a model of its own.

        Raises:
            InterruptedJobError: it was asked to end; the block begins anew next time.
        """
        mine = self.settings
        if not mine.ab_steps or from_first(lambda: "answer" in store.read_about(self.folder)):
            return
        setup = self._setup(0, fp8=False)
        trainee = prepare(setup, self.device, weights="device" if self.device == "cuda" else "host")
        trial = ab.Trial(
            trainee.model,
            mine.recipe,
            steps=mine.ab_steps,
            fp8_all_gather="both" if self.gathers_codes else False,
        )
        shard_blocks(trainee.model, setup, compiled=self.compiled)
        trainee.optimizer = optimizer_of(trainee.model, setup, self.device)
        for step in range(mine.ab_steps):
            if trial.done:
                break
            parts = self._batches(0)(step)
            with trial.step():
                trainee.step(parts)
                update_scales(trainee.model)
            self._tell(f"A/B block: step {step + 1} of {mine.ab_steps}")
            if step + 1 < mine.ab_steps and not trial.done and any(gathered(self._asked())):
                trial.close()
                raise InterruptedJobError(
                    "asked to end in the A/B block, which begins anew: give the same command again"
                )
        trial.close()
        result = trial.result()
        if self.rank == 0:
            self._writer.append(measurements(result, trial.plan, mine.model))
            self._writer.record(answer=result.lines())
            raw_output.say("\n".join([*result.lines(), ""]))

    def _train(self) -> None:
        """A run in bf16 and one in FP8 for each seed, one after the other.

        Raises:
            InterruptedJobError: it was asked to end; a checkpoint is there.
            NotSavedError: it was asked to end, and none could be written.
            NotProvedError: FP8 is not proved on every rank; no step was trained in it.
        """
        for seed in self.settings.seeds:
            for arm in (divergence.BASE, self.settings.recipe):
                case = Case.of("divergence", self.settings.axes(self.world, seed))
                if (case.case_id, arm) not in self._stored:
                    if any(gathered(self._asked())):
                        raise InterruptedJobError(
                            f"asked to end before {arm}, seed {seed}; what is done is stored: give the same command again"
                        )
                    self._train_one(case, seed, arm)

    def _train_one(self, case: Case, seed: int, arm: str) -> None:
        setup = self._setup(seed, fp8=arm != divergence.BASE)
        planned = PlannedCase("", divergence, case, (arm,))
        per_rank = -(-self.settings.eval_batches // self.world)
        job = TrainingJob(setup, self.regime, self._batches(seed), self._heldout(per_rank * self.world),
                  identity=f"{case.case_id} {arm} {self.text.sha256 if self.text else ''}")  # fmt: skip
        place = self.folder / run_files.CHECKPOINTS / f"{case.case_id}-{arm}"

        unproved = f"unproved/{case.case_id} {arm}"

        def refuse(why: str, cause: Cause, facts: dict[str, object]) -> None:
            self._writer.append([row(planned, arm, "failed", resolved=facts, reason=why, cause=cause)])

        def proved(run: TrainingRun) -> None:
            outcome = run.facts.get(FIELD)
            if run.facts.get("verify"):
                self._tell(f"{arm}, seed {seed}, every rank: {run.facts['verify']}", now=True)
            if setup.recipe is not None and outcome != str(ProofOutcome.PROVED):
                why = str(run.facts.get("verify") or "its casts are emulated")
                if self.rank == 0:
                    refuse(why, cause_of_fault(run.facts), run.facts)
                leave_word(unproved, f"rank {self.rank}: {why}")
                raise NotProvedError(f"FP8 is not proved, so nothing was trained in it: {why}")
            if run.resumed:
                self._tell(f"{arm}, seed {seed}: continues from step {run.resumed[-1]}", now=True)

        def on_step(step: int, steps: int) -> None:
            self._tell(f"{arm}, seed {seed}: step {step} of {steps}")

        try:
            result, ended = train_sharded(
                job, self.device, place, on_step, compiled=self.compiled, asked_to_end=self._asked, before=proved,
                on_problem=lambda problem: self._tell(f"{arm}, seed {seed}: checkpoint: {problem}", now=True),
            )  # fmt: skip
        except RuntimeError as error:  # what a collective raises that a rank has left
            why = "" if self.rank else word_left(unproved)
            if not why:
                raise
            refuse(why, Cause.UNPROVEN, {FIELD: str(ProofOutcome.UNPROVEN), "verify": why})
            raise NotProvedError(f"FP8 is not proved, so nothing was trained in it: {why}") from error
        if not ended:
            raise InterruptedJobError(
                f"asked to end in {arm}, seed {seed}; a checkpoint is there: give the same command again"
            )
        if self.rank == 0:
            resolved = reference_facts.resolved(job, result.facts, self.world, compiled=self.compiled) | {
                "stopped": result.stopped,
                "nonfinite_step": result.nonfinite_step,
            }
            flops = meta_estimate.flops(setup)
            series = result.curves.series()
            failure = "" if series else result.stopped  # nothing of it is finite
            rows = trial_rows(planned, arm, Trial(series, resolved, failure, cause=Cause.DIVERGED))
            self._writer.append([replace(r, flops=flops) if r.metric == "elapsed_s" else r for r in rows])

    def _conclude(self) -> int:
        """On rank 0: the verdict on the losses in words; the exit code."""
        frame = store.read(self.folder)
        stopped = reference_facts.stopped(frame)
        raw_output.say("\n".join([*verdict_lines(judge(frame)), *stopped, ""]))
        return 1 if stopped else 0

    # What is trained

    def _setup(self, seed: int, *, fp8: bool) -> Setup:
        mine = self.settings
        recipe = RECIPES[mine.recipe].with_fp8_all_gather(self.gathers_codes) if fp8 else None
        return Setup(
            model=mine.model, batch=mine.batch, seq=mine.seq, compute=COMPUTE[mine.weights], recipe=recipe,
            checkpointing=mine.checkpointing, accumulation=mine.accumulation, seed=seed, lr=mine.lr,
        )  # fmt: skip

    def _batches(self, seed: int) -> Callable[[int], Sequence[tuple[torch.Tensor, ...]]]:
        """Microbatches of a step: every rank reads others, and each its own also after it was started again."""
        mine = self.settings
        size = mine.accumulation, mine.batch, mine.seq
        return lambda step: batches.microbatches_of(
            mine.model, self.text, step * self.world + self.rank, seed, size, self.device
        )

    def _heldout(self, count: int) -> list[tuple[torch.Tensor, ...]]:
        mine = self.settings
        if self.text is None or not count:
            return []
        return list(self.text.heldout_batches(count, mine.batch, mine.seq, self.device))

    def _tell(self, line: str, now: bool = False) -> None:
        if self.rank == 0 and (now or time.monotonic() - self._said_at >= SAID_S):
            self._said_at = time.monotonic()
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
