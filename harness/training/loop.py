"""One training run: a set-up, a schedule, data and a seed in; the curves out.

Everything that decides a number is a pure function of these: weights of the seed, the batch of (seed, step), the
learning rate of the step, one thread on a CPU and deterministic kernels on a GPU where there are any. So on a CPU two
runs of one seed are equal bit for bit, and so is one that was killed and went on from its checkpoint; on a GPU as far as
its kernels are deterministic: those that are not are named in the run's facts (`nondeterministic`). What is only looked
at (held-out loss, diagnostics, checkpoints) leaves no trace in what is trained: see `untouched`.

A run of several ranks is the same run on each of them, of a model that FSDP2 shards over all: batches of a step are shared
out, a loss is the mean over ranks in their order, and ranks save and end together. Curves and facts are those of rank 0; the proof of
FP8 is the worst of all ranks'.

Steps count from 0. `loss`, `grad_norm` and `fp8_grad_norm` at step s are those of the batch of step s, before its update;
`heldout_loss` at r is that of the weights after r updates.
"""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8core import PrecisionSchedule, amax_state_dict, load_amax_state_dict
from fp8core.arguments import is_dtensor
from fp8core.gemm import backend_named
from harness.store.errors import UsageError, one_line, out_of_memory
from harness.store.measurement import FIELD, ProofOutcome
from harness.timing.workload import Series
from harness.training import meta_estimate
from harness.training.batches import digest
from harness.training.checkpoint import Checkpoints
from harness.training.diagnostics import diagnose, untouched
from harness.training.parallel.ranked import shard
from harness.training.parallel.together import gathered
from harness.training.setup import Setup, Trainee, prepare
from harness.training.steps import facts_of as proof_facts
from harness.training.steps import prove

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# How torch says of an operator that it has no deterministic kernel (ATen, Context.cpp); some say it in other words.
_LACKS = " does not have a deterministic implementation"
_DETERMINISM = re.compile("(?s).*determinis", re.IGNORECASE)


@contextmanager
def reproducible(device: str) -> Iterator[list[str]]:
    """One thread on a CPU, so that sums don't depend on how many cores are free; on a GPU deterministic kernels.

    What has no deterministic kernel runs all the same; it is listed in what is yielded, complete when the block has
    ended. cuBLAS repeats its results only with a workspace of fixed size, which it reads when it starts: it is set for
    the process unless it was set before (docs.nvidia.com/cuda/cublas, "Results Reproducibility").
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    found: list[str] = []
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with _collected(found):
            yield found
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextmanager
def _collected(found: list[str]) -> Iterator[None]:
    """Lists what torch warns of as not deterministic, each once; other warnings go where they went before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_DETERMINISM.pattern, category=UserWarning)
        show = warnings.showwarning

        def collect(message: Warning | str, *where: Any, **more: Any) -> None:
            text = " ".join(str(message).split())
            if not _DETERMINISM.match(text):
                show(message, *where, **more)
            elif (what := text.partition(_LACKS)[0][:200]) not in found:
                found.append(what)

        warnings.showwarning = collect
        yield


Batch = tuple[Tensor, ...]
Batches = Callable[[int], Sequence[Batch]]  # step -> its microbatches, each what the model takes
OnStep = Callable[[int, int], None]

SAVING_S = 3.0  # that a checkpoint may take; where one takes longer, they are as much rarer
PERTURBATION = 1e-4  # relative size of the noise on the weights that shows the numeric noise floor


@dataclass(frozen=True, slots=True)
class TrainingRegime:
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
        if not self.lr > 0:
            raise UsageError(f"lr={self.lr}: expected a number above 0")
        if not 0 <= self.min_lr <= self.lr:
            raise UsageError(f"min_lr={self.min_lr}: expected a number from 0 to lr={self.lr:g}")
        if not 0 <= self.warmup < self.steps:
            raise UsageError(
                f"lr_warmup={self.warmup}: expected an integer from 0 to steps - 1 = {self.steps - 1}; give axes.lr_warmup or "
                "axes.steps"
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of a step.

        >>> regime = TrainingRegime(steps=100, lr=1e-3, min_lr=1e-4, warmup=9)
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


@dataclass(slots=True)
class TrainingResult:
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
    regime: TrainingRegime
    batches: Batches
    heldout: Sequence[Batch] = ()
    schedule: PrecisionSchedule = field(default_factory=PrecisionSchedule)
    perturb: bool = False
    alter: Callable[[Trainee], None] | None = None
    identity: str = ""
    model: nn.Module | None = None
    ranks: int = 1


def _unseen(step: int, steps: int) -> None:
    """Nobody watches the steps."""


def train(
    job: TrainingJob, device: str, workspace: Path | None = None, on_step: OnStep = _unseen
) -> TrainingResult:
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
        run = TrainingRun(job, device, workspace, nondeterministic)
        run.advance(job.regime.steps, on_step)
        return run.result()


class TrainingRun:
    """A run under way, in this process alone or on this rank.

    Args:
        job: what to train.
        device: "cpu" or "cuda".
        workspace: of its checkpoints.
        nondeterministic: what has no deterministic kernel, as `reproducible` finds it.

    Attributes:
        step: updates made.
        stopped: what was not finite, "" if all was.
    """

    def __init__(
        self, job: TrainingJob, device: str, workspace: Path | None, nondeterministic: list[str]
    ) -> None:
        torch.manual_seed(job.setup.seed)
        self.job, self.device, self._nondeterministic = job, device, nondeterministic
        on_ranks = job.ranks > 1
        self._rank = dist.get_rank() if on_ranks else 0
        drawn_there = on_ranks and device != "cpu"
        self.trainee = prepare(job.setup, device, job.model, "device" if drawn_there else "host")
        if job.perturb:
            perturb(self.trainee.model, job.setup.seed)
        if job.alter is not None:
            job.alter(self.trainee)
        if on_ranks:
            shard(self.trainee, device)
        layers, recipe = self.trainee.audit, job.setup.recipe
        self.facts: dict[str, object] = {
            "fp8_layers": [layer.fqn for layer in layers.converted],
            "skipped_layers": {layer.fqn: layer.reason for layer in layers.not_converted},
            "parameters": sum(p.numel() for p in self.trainee.model.parameters()),
            "switch_steps": list(job.schedule.switch_steps(job.regime.steps)),
        }
        self.fp8_weights, self.fp8_grad_norm = self.trainee.fp8_weights(), torch.tensor(0.0)
        self.step, self.stopped, self.elapsed, self.curves = 0, "", 0.0, Curves()
        self._saved_at, self._saving_s = time.monotonic(), 0.0
        self._cpu_s_since = time.process_time()
        self.read = {"heldout": digest(part for batch in job.heldout for part in batch)}
        self.resumed: list[int] = []
        self.checkpoints = None if workspace is None else Checkpoints(workspace, job.identity, job.ranks)
        self._resume()
        if recipe is not None and not job.setup.peer:
            self.facts["emulated"] = not backend_named(recipe.backend).is_fp8
            if not self.facts["emulated"]:
                self._prove()

    def _prove(self) -> None:
        """Whether FP8 runs: verified on the next batch, before a schedule holds anything back; training is untouched."""
        try:
            self.facts |= proof_facts(prove(self.trainee, self._batches()))
        except Exception as error:
            if not out_of_memory(error) or self.job.ranks > 1:  # the other ranks would wait for this one
                raise
            self.facts |= {"verify": f"not verified: {one_line(error)}", FIELD: str(ProofOutcome.UNPROVEN)}

    @property
    def under_way(self) -> bool:
        """Whether there is a step left."""
        return self.step < self.job.regime.steps and not self.stopped

    def advance(self, n: int, on_step: OnStep = _unseen) -> tuple[int, int] | None:
        """Takes up to n steps, with checkpoints where it is time for one: those done and their total; None where none is left."""
        steps = self.job.regime.steps
        for _ in range(n):
            if not self.under_way:
                break
            self.stopped = self._one_step()
            if not self.stopped:
                on_step(self.step, steps)
            if self.checkpoints is not None and self.under_way and self._is_due():
                began = time.monotonic()
                self._save(self.checkpoints)
                self._saved_at = time.monotonic()
                self._saving_s = self._saved_at - began
        return (self.step, steps) if self.under_way else None

    def result(self) -> TrainingResult:
        """State of a run that is no longer under way."""
        if not self.stopped:
            self._evaluate()
        self.facts |= {
            "switches": self.job.schedule.switches,
            "resumed_from_steps": self.resumed,
            "batches": self.read,
            "cpu_s": self._cpu_s,
        }
        if self.checkpoints is not None and self.checkpoints.problems:
            self.facts["checkpoint_problems"] = self.checkpoints.problems
        self.facts["nondeterministic"] = self._nondeterministic
        # What refutes stands over what could not be compared
        every = gathered({name: self.facts.get(name) for name in ("verify", FIELD)})
        for worst in (ProofOutcome.UNPROVEN, ProofOutcome.DISPROVED):
            for one in every:
                if one[FIELD] == worst:
                    self.facts |= one
        return TrainingResult(self.curves, self.step if self.stopped else None, self.stopped, self.facts)

    def _is_due(self) -> bool:
        after = self.job.regime.checkpoint_s * max(1.0, self._saving_s / SAVING_S)
        return any(gathered(time.monotonic() - self._saved_at >= after))  # no rank saves alone

    def _mean(self, value: Tensor | float) -> float:
        """A loss, averaged over all that train together."""
        return sum(gathered(float(value))) / self.job.ranks

    def _batches(self) -> Sequence[Batch]:
        """This rank's microbatches of the next step."""
        return self.job.batches(self.step * self.job.ranks + self._rank)

    @property
    def _cpu_s(self) -> float:
        """Seconds of CPU time that the run cost, evaluation and the time before its checkpoint included."""
        return time.process_time() - self._cpu_s_since

    def _one_step(self) -> str:
        """Trains one step; says what was not finite, "" if all was."""
        job, step, regime, trainee = self.job, self.step, self.job.regime, self.trainee
        if job.schedule.rules:
            job.schedule.apply(trainee.model, step, regime.steps)
        for group in trainee.optimizer.param_groups:
            group["lr"] = regime.lr_at(step)
        if step == 0 or (regime.eval_every and step % regime.eval_every == 0):
            self._evaluate()
        batches = self._batches()
        if step in (0, regime.steps // 2, regime.steps - 1):
            self.read[str(step)] = digest(part for batch in batches for part in batch)
        if regime.diagnose_every and step % regime.diagnose_every == 0:
            figures = diagnose(trainee.model, job.setup, batches[0], self.device)
            for (metric, part), value in figures.items():
                self.curves.add(metric, step, value, part)
        started = time.perf_counter()
        values = {
            "loss": self._mean(trainee.step(batches, self._measure_fp8_gradients))
        }  # waits for the device
        if trainee.grad_norm is not None:
            values["grad_norm"] = _number(trainee.grad_norm)
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
        with untouched(self.trainee.model), torch.no_grad():
            self.trainee.model.eval()
            total = sum(float(self.trainee.forward(batch)) for batch in mine)
        self.curves.add("heldout_loss", self.step, self._mean(total / len(mine)))

    def _save(self, checkpoints: Checkpoints) -> None:
        run = {
            "amaxes": amax_state_dict(self.trainee.model),
            "schedule": self.job.schedule.state_dict(),
            "curves": self.curves.points,
            "elapsed": self.elapsed,
            "cpu_s": self._cpu_s,
            "resumed": self.resumed,
            "read": self.read,
        }
        checkpoints.save(self.step, self.trainee.model, self.trainee.optimizer, run)

    def _resume(self) -> None:
        model, optimizer = self.trainee.model, self.trainee.optimizer
        if self.checkpoints is None or (found := self.checkpoints.load_newest(model, optimizer)) is None:
            return
        self.step, run = found
        load_amax_state_dict(model, run["amaxes"])
        self.job.schedule.load_state_dict(run["schedule"])
        self.curves.points, self.elapsed = run["curves"], run["elapsed"]
        self._cpu_s_since -= run["cpu_s"]
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


def facts_of(setup: Setup, regime: TrainingRegime, schedule: PrecisionSchedule) -> Mapping[str, Any]:
    """How a run was asked to train, for `resolved`."""
    return {
        "compute": setup.compute,
        "recipe": str(setup.recipe) if setup.recipe else "none",
        **({"scaling": setup.recipe.scaling} if setup.recipe else {}),
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
