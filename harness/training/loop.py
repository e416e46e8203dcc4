"""One training run: a set-up, a schedule, data and a seed in; the curves out.

Everything that decides a number is a pure function of these: weights of the seed, the batch of (seed, step), the
learning rate of the step, one thread on a CPU and deterministic kernels on a GPU where there are any. So on a CPU two
runs of one seed are equal bit for bit, and so is one that was killed and went on from its checkpoint; on a GPU as far as
its kernels are deterministic: those that are not are named in the run's facts (`nondeterministic`). What is only looked
at (held-out loss, diagnostics, checkpoints) leaves no trace in what is trained: see `untouched`.

A run of several ranks is the same run on each of them, of a model that FSDP2 shards over all (`harness.training.parallel.trained`):
batches of a step are shared out, a loss is the mean over ranks in their order, and ranks save and end together.

Steps count from 0. `loss`, `grad_norm` and `fp8_grad_norm` at step s are those of the batch of step s, before its update;
`heldout_loss` at r is that of the weights after r updates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8core import PrecisionSchedule, amax_state_dict, load_amax_state_dict
from fp8core.dtensors import is_dtensor
from fp8core.gemm import backend_named
from harness.store.errors import UsageError, one_line, out_of_memory
from harness.store.proof import FIELD, ProofOutcome
from harness.timing.workload import Series
from harness.training import meta_estimate
from harness.training.batches import digest
from harness.training.checkpoint import Checkpoints
from harness.training.determinism import reproducible
from harness.training.diagnostics import diagnose, untouched
from harness.training.parallel.ranked import shard
from harness.training.setup import Setup, Trainee, optimizer_of, prepare
from harness.training.steps import facts_of as proof_facts
from harness.training.steps import prove

if TYPE_CHECKING:
    from pathlib import Path

    from harness.training.models import Weights

Batch = tuple[Tensor, ...]
Batches = Callable[[int], Sequence[Batch]]  # step -> its microbatches, each what the model takes
OnStep = Callable[[int, int], None]

SAVING_S = 3.0  # that a checkpoint may take; where one takes longer, they are as much rarer
PERTURBATION = 1e-4  # relative size of the noise on the weights that shows the numeric noise floor


@dataclass(frozen=True, slots=True)
class Regime:
    """How long and how a run trains, and how often it is looked at.

    The learning rate rises linearly over `warmup` steps and falls to `min_lr` along half a cosine (nanoGPT, `get_lr`
    of train.py).

    Attributes:
        steps: updates in all.
        lr: the highest learning rate.
        min_lr: the one at the end.
        warmup: steps of the rise.
        eval_every: updates between two held-out losses; the first and the last are always taken. 0: those only.
        diagnose_every: steps between two diagnoses of the layers; 0: none.
        checkpoint_s: seconds between two checkpoints; more where they take long.
    """

    steps: int
    lr: float
    min_lr: float
    warmup: int = 0
    eval_every: int = 0
    diagnose_every: int = 0
    checkpoint_s: float = 60.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"steps={self.steps}: expected an integer of at least 1")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise UsageError(f"lr={self.lr}: expected a finite number above 0")
        if not 0 <= self.min_lr <= self.lr:
            raise UsageError(f"min_lr={self.min_lr}: expected a number from 0 to lr={self.lr:g}")
        if not 0 <= self.warmup < self.steps:
            raise UsageError(
                f"warmup={self.warmup}: expected an integer from 0 to steps - 1 = {self.steps - 1}"
            )
        for name in ("eval_every", "diagnose_every"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)}: expected an integer of at least 0")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step.

        >>> regime = Regime(steps=100, lr=1e-3, min_lr=1e-4, warmup=9)
        >>> [round(regime.lr_at(step), 7) for step in (0, 9, 99)]
        [0.0001, 0.001, 0.0001003]
        """
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        passed = (step - self.warmup) / (self.steps - self.warmup)
        return self.min_lr + 0.5 * (1 + math.cos(math.pi * passed)) * (self.lr - self.min_lr)


@dataclass(slots=True)
class Curves:
    """What a run has measured so far: (step, value) by metric and part; plain numbers, so that they checkpoint."""

    points: dict[tuple[str, str], list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, metric: str, step: int, value: float, part: str = "") -> None:
        """Appends a finite value; a value that is not finite can't be drawn and is left out."""
        if math.isfinite(value):
            self.points.setdefault((metric, part), []).append((step, value))

    def series(self) -> list[Series]:
        """For the store."""
        return [
            Series(metric, tuple(value for _, value in points), tuple(step for step, _ in points), part)
            for (metric, part), points in self.points.items()
        ]

    def last(self, metric: str) -> float | None:
        """The newest value of a metric of the whole."""
        points = self.points.get((metric, ""))
        return points[-1][1] if points else None


@dataclass(slots=True)
class Result:
    """How a run went.

    Attributes:
        curves: up to the end, or to where a value was no longer finite.
        nonfinite_step: the step of the first loss or gradient norm that was Inf or NaN; None if there was none.
        stopped: why the run ended before its last step; "" where it didn't.
        facts: for `resolved`: what was converted, what proves that it runs in FP8, what the schedule did, which batches
            were read (`batches`: a hash of the held-out ones and of those of a few steps), and from which checkpoints
            the run went on.
    """

    curves: Curves
    nonfinite_step: int | None
    stopped: str
    facts: dict[str, object]


@dataclass(slots=True)
class TrainingJob:
    """One run, ready to go.

    Attributes:
        setup: what is trained.
        regime: for how long and how.
        batches: the microbatches of a step, `setup.accumulation` of them; of several ranks rank r takes those of
            `step * ranks + r`.
        heldout: fixed batches, of several ranks a multiple of their number.
        schedule: of the precision.
        perturb: multiply all initial weights by 1 + 1e-4 N(0, 1), drawn from the seed.
        alter: changes the prepared trainee before the first step (a planted fault, the negative control).
        identity: says which run this is; a checkpoint of another one is refused.
        model: a model to take instead of building the set-up's.
        ranks: that train together, of which this process is one.
    """

    setup: Setup
    regime: Regime
    batches: Batches
    heldout: Sequence[Batch] = ()
    schedule: PrecisionSchedule = field(default_factory=PrecisionSchedule)
    perturb: bool = False
    alter: Callable[[Trainee], None] | None = None
    identity: str = ""
    model: nn.Module | None = None
    ranks: int = 1


def train(
    job: TrainingJob, device: str, workspace: Path | None = None, on_step: OnStep = lambda step, steps: None
) -> Result:
    """Trains from the first step, or on from the newest checkpoint in the workspace, to the last.

    Args:
        job: what to train; its schedule is used up.
        device: "cpu" or "cuda".
        workspace: a folder of this run's own for checkpoints; None: none are written.
        on_step: called after each step with the steps done and their total.

    Raises:
        UsageError, ValueError, TypeError: a model or batch that can't be trained, see `prepare` and `Trainee.step`.
    """
    with reproducible(device) as nondeterministic, torch.random.fork_rng():
        torch.manual_seed(job.setup.seed)
        run = TrainingRun(job, device, workspace)
        while run.under_way:
            run.advance()
            if not run.stopped:
                on_step(run.step, job.regime.steps)
            run.save_if_due()
        result = run.result()
    result.facts["nondeterministic"] = nondeterministic
    return result


class TrainingRun:
    """A run under way, in this process alone or on this rank.

    Attributes:
        step: updates made.
        stopped: what was not finite, "" if all was.
    """

    def __init__(self, job: TrainingJob, device: str, workspace: Path | None) -> None:
        self.job, self.device = job, device
        self._rank = dist.get_rank() if job.ranks > 1 else 0
        drawn: Weights = "device" if job.ranks > 1 and device != "cpu" else "host"
        self.trainee = prepare(job.setup, device, job.model, drawn)
        if job.perturb:
            perturb(self.trainee.model, job.setup.seed)
        if job.alter is not None:
            job.alter(self.trainee)
        if job.ranks > 1:
            shard(self.trainee.model, job.setup.compute)
            self.trainee.optimizer = optimizer_of(self.trainee.model, job.setup, device)
        layers = self.trainee.audit
        self.facts: dict[str, object] = {
            "fp8_layers": [layer.fqn for layer in layers.converted],
            "skipped_layers": {layer.fqn: layer.reason for layer in layers.not_converted},
            "parameters": sum(p.numel() for p in self.trainee.model.parameters()),
            "switch_steps": list(job.schedule.switch_steps(job.regime.steps)),
        }
        self.fp8_weights, self.fp8_grad_norm = self.trainee.fp8_weights(), torch.tensor(0.0)
        self.step, self.stopped, self.elapsed, self.curves = 0, "", 0.0, Curves()
        self._saved_at, self._saving_s = time.monotonic(), 0.0
        self.cpu_s_before, self._cpu_s_at_start = 0.0, time.process_time()
        self.read = {"heldout": digest(part for batch in job.heldout for part in batch)}
        self.resumed: list[int] = []
        self.checkpoints: Checkpoints | None = None
        if workspace is not None:
            self.checkpoints = Checkpoints(workspace, job.identity, job.ranks)
            self._resume(self.checkpoints)
        recipe = job.setup.recipe
        if recipe is not None and not job.setup.peer:
            self.facts["emulated"] = not backend_named(recipe.backend).is_fp8
            if not self.facts["emulated"]:
                self._prove()

    def _prove(self) -> None:
        """Whether FP8 runs: verified on the next batch, before a schedule holds anything back; training is untouched."""
        try:
            proof = prove(self.trainee, self._batches(self.step))
        except Exception as error:
            if not out_of_memory(error) or self.job.ranks > 1:  # the other ranks would wait for this one
                raise
            self.facts |= {"verify": f"not verified: {one_line(error)}", FIELD: str(ProofOutcome.UNPROVEN)}
        else:
            self.facts |= proof_facts(proof)

    @property
    def under_way(self) -> bool:
        """Whether there is a step left."""
        return self.step < self.job.regime.steps and not self.stopped

    def advance(self) -> None:
        """One step."""
        self.stopped = self._one_step()

    def save_if_due(self) -> None:
        """A checkpoint where it is time for one."""
        if self.checkpoints is not None and self.under_way and self._is_due():
            began = time.monotonic()
            self._save(self.checkpoints)
            self._saved_at = time.monotonic()
            self._saving_s = self._saved_at - began

    def result(self) -> Result:
        """State of a run that is no longer under way."""
        if not self.stopped:
            self._evaluate()
        self.facts |= {
            "switches": self.job.schedule.switches,
            "resumed_from_steps": self.resumed,
            "batches": self.read,
            "cpu_s": self.cpu_s,
        }
        if self.checkpoints is not None and self.checkpoints.problems:
            self.facts["checkpoint_problems"] = self.checkpoints.problems
        return Result(self.curves, self.step if self.stopped else None, self.stopped, self.facts)

    def _is_due(self) -> bool:
        after = self.job.regime.checkpoint_s * max(1.0, self._saving_s / SAVING_S)
        return any(self._gathered(float(time.monotonic() - self._saved_at >= after)))  # no rank saves alone

    def _mean(self, value: Tensor | float) -> float:
        """A loss, averaged over all that train together."""
        return sum(self._gathered(value)) / self.job.ranks

    def _gathered(self, value: Tensor | float) -> list[float]:
        """What each rank has, in their order."""
        if self.job.ranks == 1:
            return [float(value)]
        place = next(self.trainee.model.parameters()).device
        mine = torch.as_tensor(value, dtype=torch.float64, device=place).reshape(1)
        every = [torch.empty_like(mine) for _ in range(self.job.ranks)]
        dist.all_gather(every, mine)
        return torch.cat(every).tolist()

    def _batches(self, step: int) -> Sequence[Batch]:
        """This rank's microbatches."""
        return self.job.batches(step * self.job.ranks + self._rank)

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU time that the run cost this process, evaluation included, and those before its checkpoint."""
        return self.cpu_s_before + time.process_time() - self._cpu_s_at_start

    def _one_step(self) -> str:
        """Trains one step; says what was not finite, "" if all was."""
        job, step, regime = self.job, self.step, self.job.regime
        if job.schedule.rules:
            job.schedule.apply(self.trainee.model, step, regime.steps)
        for group in self.trainee.optimizer.param_groups:
            group["lr"] = regime.lr_at(step)
        if step == 0 or (regime.eval_every and step % regime.eval_every == 0):
            self._evaluate()
        batches = self._batches(step)
        if step in (0, regime.steps // 2, regime.steps - 1):
            self.read[str(step)] = digest(part for batch in batches for part in batch)
        if regime.diagnose_every and step % regime.diagnose_every == 0:
            for (metric, part), value in diagnose(
                self.trainee.model, job.setup, batches[0], self.device
            ).items():
                self.curves.add(metric, step, value, part)
        started = time.perf_counter()
        loss = self._mean(self.trainee.step(batches, self._measure_fp8_gradients))  # waits for the device
        norm = self.trainee.grad_norm
        values = {"loss": loss} | ({} if norm is None else {"grad_norm": _number(norm)})
        if self.fp8_weights:
            values["fp8_grad_norm"] = _number(self.fp8_grad_norm)
        self.elapsed += time.perf_counter() - started
        for metric, value in values.items():
            if not math.isfinite(value):
                return f"{metric} is {value} at step {step}"
            self.curves.add(metric, step, value)
        self.curves.add("elapsed_s", step, self.elapsed)
        self.step += 1
        return ""

    def _measure_fp8_gradients(self) -> None:
        """Norm of the gradients of the converted layers' weights, before they are clipped."""
        gradients = [weight.grad for weight in self.fp8_weights if weight.grad is not None]
        self.fp8_grad_norm = nn.utils.get_total_norm(gradients)

    def _evaluate(self) -> None:
        mine = self.job.heldout[self._rank :: self.job.ranks]
        if not mine:
            return
        total = 0.0
        with untouched(self.trainee.model), torch.no_grad():
            self.trainee.model.eval()
            for batch in mine:
                total += float(self.trainee.forward(batch))
        self.curves.add("heldout_loss", self.step, self._mean(total / len(mine)))

    def _save(self, checkpoints: Checkpoints) -> None:
        run = {
            "amaxes": amax_state_dict(self.trainee.model),
            "schedule": self.job.schedule.state_dict(),
            "curves": self.curves.points,
            "elapsed": self.elapsed,
            "cpu_s": self.cpu_s,
            "resumed": self.resumed,
            "read": self.read,
        }
        checkpoints.save(self.step, self.trainee.model, self.trainee.optimizer, run)

    def _resume(self, checkpoints: Checkpoints) -> None:
        found = checkpoints.load_newest(self.trainee.model, self.trainee.optimizer)
        if found is None:
            return
        self.step, run = found
        load_amax_state_dict(self.trainee.model, run["amaxes"])
        self.job.schedule.load_state_dict(run["schedule"])
        self.curves.points, self.elapsed, self.cpu_s_before = run["curves"], run["elapsed"], run["cpu_s"]
        self.read |= run["read"]
        self.resumed = [*run["resumed"], self.step]


def _number(norm: Tensor) -> float:
    """A norm as a number, of sharded gradients that of all shards."""
    return float(norm.full_tensor() if is_dtensor(norm) else norm)


def perturb(model: nn.Module, seed: int) -> None:
    """Multiplies every weight by 1 + 1e-4 N(0, 1), in place; the same noise for the same seed on every device.

    In bfloat16 most weights keep their value and one in about forty moves by a whole rounding step.
    """
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random).to(parameter.device)
            parameter.copy_(parameter.float() * (1 + PERTURBATION * noise))


def facts_of(setup: Setup, regime: Regime, schedule: PrecisionSchedule) -> Mapping[str, Any]:
    """For `resolved`: how a run was asked to train."""
    return {
        "compute": setup.compute,
        "recipe": str(setup.recipe) if setup.recipe else "none",
        "schedule": str(schedule),
        "steps": regime.steps,
        "tokens_per_step": meta_estimate.tokens(setup),
        "lr_schedule": {
            "rise_steps": regime.warmup,
            "lr": regime.lr,
            "min_lr": regime.min_lr,
            "fall": "cosine",
        },
        "optimizer": f"AdamW, betas {setup.betas[0]:g} and {setup.betas[1]:g}, weight decay {setup.weight_decay:g}",
        "grad_clip": setup.grad_clip,
        "init_seed": setup.seed,
    }
