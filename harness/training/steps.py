"""What a training step is checked by before its time counts, and how one is taken apart by kernel classes.

A step counts only if it computes what its baseline computes, and in the precision that it claims:

* The loss of its first step lies within `FirstStep.loss_bound` of the baseline's, from the same weights, on the same
  batch. At initial weights FP8 moves each logit by about 4 % of the logits' spread; the mean over tokens moves less, but
  how much less depends on how many different tokens a batch has, so that the whole 4 % is allowed. Largest seen over all
  recipes on the small models, fp32 and bf16: 0.0016; with bytes as tokens on an H200, by fp8core and by torchao alike:
  0.035 on 4 Llama-3-8B blocks, 0.021 on GPT-2.
* The norm of its gradients lies within `NORM_BOUND` of the baseline's: a GEMM that vanished, or a scale that was
  forgotten, changes it by factors. Largest seen likewise: 1.2 %.
* The gradient of each weight points where the baseline's does: their cosine is above `COSINE_BOUND`. A wrong sign or a
  product of the wrong operands has the right norm. Smallest seen on the small models (all eager arms, peers too;
  fp32, bf16 and autocast): 0.983; with the sign of every FP8 weight's gradient flipped: -0.998. Up to `_SAMPLED` elements
  of each weight are compared, so that the baseline's need no memory to speak of. Gains and biases are left out: some of
  these gradients are zero but for rounding (a bias of attention keys).
* `fp8core.verify` proves the FP8 layers of fp8core. A peer's are proved by the count of FP8 GEMMs, and a step without
  FP8 by there being none.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.nn import functional

from fp8core.arguments import is_dtensor
from fp8core.proof.profiled_gemms import callers, fp8_gemms, profiler_events
from fp8core.proof.verify import Proof, census, verify
from harness.machine.kernels_by_name import kernel_class
from harness.peers import PEERS
from harness.peers.peer import fp8_kernels
from harness.store.errors import Cause
from harness.store.measurement import FIELD, LAYERS, ProofOutcome, proof_outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from harness.training.setup import Trainee

LOSS_BOUND = 0.02  # nats, where logits hardly spread
LOGIT_ERROR = 0.04  # of the logits' spread
NORM_BOUND = 1.1  # ratio
COSINE_BOUND = 0.5
_SAMPLED = 4096  # elements of a gradient
PROOF = 3  # steps of a proof, at most


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What the first step of a set-up gives, from its initial weights.

    `gradients`: of each weight of two and more dimensions that has one, some elements as float32 [n] in host memory.
    `logit_spread`: of the vocabulary's logits of a token, a mean over tokens (`spread_of_logits`); 0 where it is not known.
    """

    loss: float
    grad_norm: float
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    logit_spread: float = 0.0

    @property
    def loss_bound(self) -> float:
        """How far another precision may move this loss, in nats."""
        return max(LOSS_BOUND, LOGIT_ERROR * self.logit_spread)

    @classmethod
    def of(cls, loss: Tensor, trainee: Trainee, logit_spread: Sequence[float] = ()) -> FirstStep:
        """Read from a trainee whose last step gave this loss and these spreads, one a microbatch."""
        norm = trainee.grad_norm
        assert norm is not None
        weights = {n: p.grad for n, p in trainee.model.named_parameters() if p.dim() >= 2}
        samples = {name: _sampled(grad) for name, grad in weights.items() if grad is not None}
        whole = norm.full_tensor() if is_dtensor(norm) else norm
        return cls(float(loss), float(whole), samples, max(logit_spread, default=0.0))

    def cosines(self, base: FirstStep) -> dict[str, float]:
        """Cosine between the gradients of both steps, by weight; weights without a gradient in the baseline are left out."""
        return {
            name: float(functional.cosine_similarity(self.gradients[name], theirs, dim=0, eps=1e-30))
            for name, theirs in base.gradients.items()
            if name in self.gradients and theirs.any()
        }


@contextmanager
def spread_of_logits(trainee: Trainee) -> Iterator[list[float]]:
    """Standard deviations of the logits that `model.head` returns in this block, of some tokens of each call.

    Empty without a head, and where what it returns is not one number for each token of a known vocabulary.
    """
    found: list[float] = []

    def note(module: nn.Module, args: object, logits: object) -> None:
        if isinstance(logits, Tensor) and logits.shape[-1:] == (trainee.setup.vocab_size,):
            some = logits.detach().flatten(0, -2)[:: (logits.shape[:-1].numel() // 256) | 1]
            found.append(float(some.float().std(-1).mean()))

    head = getattr(trainee.model, "head", None)
    handle = head.register_forward_hook(note) if isinstance(head, nn.Module) else None
    try:
        yield found
    finally:
        if handle is not None:
            handle.remove()


def _sampled(grad: Tensor) -> Tensor:
    """Evenly spaced elements, of a sharded one this rank's; an odd distance, so that they are of all columns."""
    flat = (grad.to_local() if is_dtensor(grad) else grad).detach().reshape(-1)
    return flat[:: (flat.numel() // _SAMPLED) | 1][:_SAMPLED].to("cpu", torch.float32, copy=True)


def first_step_fault(mine: FirstStep, base: FirstStep) -> str:
    """Why a first step does not compute what its baseline computes; "" if it does."""
    gap = abs(mine.loss - base.loss)
    if not (gap <= base.loss_bound and math.isfinite(gap)):
        return f"first loss {mine.loss:.4f}, the baseline's is {base.loss:.4f}: {gap:.4f} apart, {base.loss_bound:.3g} allowed"
    ratio = mine.grad_norm / base.grad_norm if base.grad_norm else float("inf")
    if not 1 / NORM_BOUND <= ratio <= NORM_BOUND:
        return (
            f"norm of the first gradients {mine.grad_norm:.4g}, the baseline's is {base.grad_norm:.4g}: a factor "
            f"{ratio:.3g}, at most {NORM_BOUND} either way allowed"
        )
    missing = sorted(base.gradients.keys() - mine.gradients.keys())
    if missing:
        return f"no gradient of {missing[0]} in the first step ({len(missing)} in all), the baseline has one"
    cosines = mine.cosines(base)
    worst = min(cosines, key=lambda name: cosines[name], default="")
    wrong = [name for name, cosine in cosines.items() if not cosine >= COSINE_BOUND]
    if wrong:
        return (
            f"first gradient of {worst} has a cosine of {cosines[worst]:.3f} with the baseline's, at least {COSINE_BOUND} "
            f"allowed; {len(wrong)} of {len(cosines)} weights are as wrong"
        )
    return ""


def replay_fault(replayed: Sequence[float], eager: Sequence[float]) -> str:
    """Why replayed steps do not compute what eager ones compute, from the losses of both; "" if they do.

    They run the same kernels on the same batches from the same weights, so only the order of atomic additions may
    move a loss. `LOSS_BOUND` finds weights that stay as they are and a batch that is not read; a scale or a moment that
    lags by a step may move the loss by less, and is held by the tests, which compare bits.
    """
    for place, (mine, base) in enumerate(zip(replayed, eager, strict=True)):
        if not abs(mine - base) <= LOSS_BOUND:
            return f"loss {mine:.4f} in replay {place}, {base:.4f} in the same step run eagerly: at most {LOSS_BOUND} allowed"
    return ""


def precision_fault(step: Callable[[], object], trainee: Trainee) -> tuple[str, dict[str, object]]:
    """Why the steps do not run in the precision that the set-up asks for, "" if they do; and for `resolved` what was found.

    Args:
        step: one whole optimizer step of the trainee; run up to `PROOF` times.
        trainee: whose layers are looked at.
    """
    setup, model = trainee.setup, trainee.model
    if setup.recipe is not None and not setup.peer:
        proof = _verified(step, trainee)
        return "" if proof.ok else proof.line, facts_of(proof)
    step()
    on_gpu = next(model.parameters()).device.type == "cuda"
    by_name = bool(setup.peer) and not PEERS[setup.peer].operators
    with profiler_events(on_gpu) as events:
        step()
    counted = fp8_kernels(events) if by_name else len(fp8_gemms(events))
    due = trainee.audit.fp8_gemms * setup.accumulation if setup.recipe is not None else 0
    more = setup.checkpointing != "none" or by_name  # recomputed ones, or several kernels of one GEMM
    is_due = counted == due or (due and more and counted > due)
    why = f"{counted} FP8 GEMMs ran in a step where {due} were due: it did not run as asked"
    return "" if is_due else why, {"fp8_gemms": counted, "fp8_gemms_expected": due}


def _verified(step: Callable[[], object], trainee: Trainee) -> Proof:
    recipe = trainee.setup.recipe
    gathers = recipe is not None and recipe.fp8_all_gather
    return verify(step, trainee.model, recipe=recipe, fp8_all_gather=gathers, announce=False)


def cause_of_fault(resolved: Mapping[str, object]) -> Cause:
    """Cause of what `precision_fault` found: proved wrong by a count or a comparison, or only not proved."""
    unproven = proof_outcome(resolved) is ProofOutcome.UNPROVEN
    return Cause.UNPROVEN if unproven else Cause.NOT_FP8


def facts_of(proof: Proof) -> dict[str, object]:
    """What `fp8core.verify` found, for `resolved`."""
    outcome = ProofOutcome.DISPROVED if proof.problems else ProofOutcome.UNPROVEN
    facts: dict[str, object] = {
        "verify": proof.line,
        FIELD: str(ProofOutcome.PROVED if proof.ok else outcome),
        LAYERS: dict(Counter(layer.recipe.split(",")[0] for layer in proof.layers if layer.recipe)),
        "fp8_gemms": proof.counted,
        "fp8_gemms_expected": proof.predicted,
    }
    alike = Counter(
        tuple((name, value) for name, value in vars(operand).items() if name != "layer")
        for operand in census(proof).rows
    )
    if alike:  # one entry for all layers whose operands were the same
        facts["census"] = [{**dict(operand), "layers": count} for operand, count in alike.items()]
    if proof.warnings:
        facts["verify_warnings"] = list(proof.warnings[:8])
    if proof.fp8_kernel_share is not None:
        facts["fp8_kernel_share"] = proof.fp8_kernel_share
    return facts


def prove(trainee: Trainee, batches: Sequence[tuple[Tensor, ...]]) -> Proof:
    """`fp8core.verify` of the step's passes, without its optimizer; the trainee stays as it is.

    Args:
        trainee: with FP8 layers of fp8core that are not emulated.
        batches: of one step.
    """

    def step() -> None:
        trainee.gradients(batches)
        trainee.update_scales()

    return _verified(step, trainee)


def breakdown(events: list[Any], steps: int) -> dict[str, float]:
    """Milliseconds of a step by kernel class: of kernels where events have some, of operators themselves on a CPU.

    Args:
        events: `function_events` of a profiler that watched whole steps.
        steps: how many.
    """
    times, unclaimed = Counter[str](), Counter[str]()
    for event in events:
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            unclaimed[event.name] += event.self_device_time_total
    on_gpu = bool(unclaimed)
    for event in events:
        if not on_gpu:
            times[kernel_class(event.name, (caller.name for caller in callers(event)))] += (
                event.self_cpu_time_total
            )
        for kernel in event.kernels if event.device_type == DeviceType.CPU else ():
            within = (event.name, *(caller.name for caller in callers(event)))
            times[kernel_class(kernel.name, within)] += kernel.duration
            unclaimed[kernel.name] -= kernel.duration
    for name, left in unclaimed.items():  # kernels that no operator claims, such as those of compiled code
        if left > 0:
            times[kernel_class(name)] += left
    return {kind: micros / 1e3 / steps for kind, micros in times.items() if micros}


def profiled(step: Callable[[], object], first: int, last: int, device: str, trace: Path) -> dict[str, float]:
    """Writes a Chrome trace of the steps `first` to `last` (Perfetto opens it) and returns their `breakdown`.

    Args:
        step: one whole step; called `last + 1` times.
        first: step from which on is watched; those before run unwatched.
        last: the last one that is watched.
        device: where it runs.
        trace: file to write; ".gz" at its end compresses it.
    """
    for _ in range(first):
        step()
    where = torch.device(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto writes each start to stderr otherwise
    activities = [torch.profiler.ProfilerActivity.CPU]
    if where.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as watcher:
        for index in range(first, last + 1):
            with torch.profiler.record_function(f"step {index}"):
                step()
        if where.type == "cuda":
            torch.cuda.synchronize()
    watcher.export_chrome_trace(str(trace))
    return breakdown(list(watcher.events() or []), last - first + 1)
