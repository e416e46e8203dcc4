"""An arm of the suite `train`: a trainee whose memory comes and goes, and what is measured of it."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from harness.peers import PEERS
from harness.store.cause import Cause
from harness.store.errors import MemoryShortageError, let_go, one_line, out_of_memory
from harness.timing.clock import Split
from harness.timing.device_memory import peak_memory
from harness.timing.workload import Numerics, Workload
from harness.training import cuda_graph, meta_estimate, steps
from harness.training.batches import corpus_of, microbatches_of
from harness.training.models import ModelSpec, resolve
from harness.training.residency import Residency, keep
from harness.training.setup import Setup, forward_of, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from harness.training.setup import Trainee

STEPS = 4  # different batches, over and over
# Of a GPU's memory, what the initial weights that all arms share may take there; larger ones are kept by the host.
KEPT_SHARE = 1 / 16
_REPLAYED = 3  # steps that are compared with eager ones, of different batches
WATCHED = 2  # steps whose peak of memory is read: the second one meets the optimizer's state


@dataclass(frozen=True, slots=True)
class Source:
    """Where the batches come from: a data set by name with its path ("" for none), and the seed of their order."""

    data: str
    path: str
    seed: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Steps to trace, counted from the first one after the warm-up, and the name of the trace's file."""

    first: int
    last: int
    file: str


@dataclass(frozen=True, slots=True)
class Control:
    """What the arms of a case share: initial weights, drawn once, and what the first step without FP8 gives."""

    weights: dict[str, Tensor]
    first: steps.FirstStep


class TimedArm:
    """One arm, its memory given up until it is asked for.

    Args:
        setup: what is trained.
        source: of its batches.
        device: where.
        profile: steps to trace; None: none.

    Raises:
        MemoryShortageError: it does not fit, not even to be made.
    """

    def __init__(self, setup: Setup, source: Source, device: str, profile: Profile | None = None) -> None:
        self.setup, self.source, self.device, self.profiling = setup, source, device, profile
        self.resolved: dict[str, object] = {}
        self._turn = 0
        self._replay: Callable[[cuda_graph.Microbatches], Tensor] | None = None
        self._halfway = Split()
        with self._memory_explained("building the model"):
            self.control = control_of(_without_fp8(setup), source, device)
            self.batches = batches_of(_without_fp8(setup), source, device)
            self.trainee = prepare(setup, device, weights="none")  # those of the control are put in
            self._resident = Residency(self.trainee, self.control.weights, device)
        self.resolved |= facts_of(self.trainee, source, device)

    def workload(self) -> Workload:
        """What the executor asks for."""
        return Workload(
            run=self.run,
            check=self.check,
            flops=meta_estimate.flops(self.setup),
            resolved=self.resolved,
            compiled=self.setup.compiled or self.setup.compiled_linears,
            resident=self.resident,
            recompile=self.recompile if self.setup.compiled else None,
            tokens=meta_estimate.tokens(self.setup),
            profile=self.profile if self.profiling is not None else None,
            split=None if self.setup.graph else self._halfway,
            split_metric="" if self.setup.graph else "forward_backward_ms",
        )

    @contextmanager
    def resident(self, *, recorded: bool = True) -> Iterator[None]:
        """Memory there, weights initial, the first batch next; an arm that is replayed has warmed up and was recorded.

        Each time anew: where memory comes back it need not lie where it lay.

        Args:
            recorded: False leaves a step that would be replayed eager.
        """
        self._turn = 0
        with self._memory_explained("a training step"), self._resident():
            if not (self.setup.graph and recorded):
                yield
                return
            warm_up = [self._next() for _ in range(cuda_graph.WARM_UP)]
            with cuda_graph.recorded(self.trainee, warm_up, cuda_graph.CudaTape()) as self._replay:
                try:
                    yield
                finally:
                    self._replay = None

    def run(self) -> Tensor:
        """One whole optimizer step."""
        if self._replay is not None:
            return self._replay(self._next())
        return self.trainee.step(self._next(), self._halfway)

    def _next(self) -> list[tuple[Tensor, ...]]:
        self._turn += 1
        return self.batches[(self._turn - 1) % len(self.batches)]

    def recompile(self) -> None:
        """Gives the compiler another code object over the same model."""
        self.trainee.run = forward_of(self.trainee.model, self.setup, self.device)

    def check(self) -> Numerics:
        """First step against the control's, then the precision, then the memory of some steps."""
        first = self.control.first
        with self.resident(recorded=False):
            mine = steps.FirstStep.of(self.run(), self.trainee)
            self.resolved |= {"first_loss": mine.loss, "first_loss_control": first.loss}
            self.resolved["first_grad_norm_ratio"] = (
                mine.grad_norm / first.grad_norm if first.grad_norm else None
            )
            self.resolved["first_grad_cosine_min"] = min(mine.cosines(first).values(), default=None)
            fault = steps.first_step_fault(mine, first)
            cause = Cause.NUMERICS
            if not fault:
                fault = steps.precision_fault(self.run, self.trainee, self.resolved)
                cause = steps.cause_of_fault(self.resolved)
        if self.setup.graph and not fault:
            fault, cause = self._replay_fault(), Cause.NUMERICS
        if fault:
            return Numerics({}, ok=False, reason=fault, cause=cause)
        figures = {
            "predicted_memory_bytes": float(
                meta_estimate.total(meta_estimate.memory(self.setup, self.device))
            )
        }
        measured = ("peak_memory_bytes", "reserved_memory_bytes")
        if torch.device(self.device).type != "cuda":
            why = f"the allocator of a {self.device} keeps no peak; predicted_memory_bytes has the expected value"
            return Numerics(figures, skipped=dict.fromkeys(measured, why))
        with peak_memory() as peak, self.resident():
            for _ in range(WATCHED):
                self.run()
        return Numerics(
            figures | dict(zip(measured, map(float, (peak.allocated, peak.reserved)), strict=True))
        )

    def _replay_fault(self) -> str:
        """Why replayed steps are not the eager ones that were proved; "" if they are."""
        with self.resident(recorded=False):
            eager = [float(self.run()) for _ in range(cuda_graph.WARM_UP + _REPLAYED)][cuda_graph.WARM_UP :]
        with self.resident():
            replayed = [float(self.run()) for _ in range(_REPLAYED)]
        self.resolved |= {"eager_losses": eager, "replayed_losses": replayed}
        return steps.replay_fault(replayed, eager)

    def profile(self, folder: Path) -> Numerics:
        """A trace in the run's folder, and the time of each kernel class in one step."""
        wanted = self.profiling
        assert wanted is not None
        with self.resident():
            self.run()
            parts = steps.profiled(self.run, wanted.first, wanted.last, self.device, folder / wanted.file)
        self.resolved |= {"trace": wanted.file, "trace_steps": [wanted.first, wanted.last]}
        return Numerics({}, parts={("kernel_time_ms", kind): ms for kind, ms in parts.items()})

    @contextmanager
    def _memory_explained(self, what: str) -> Iterator[None]:
        """Memory that runs out inside is reported with what was due, by part, and what would save how much."""
        try:
            yield
        except Exception as error:
            if not out_of_memory(error):
                raise
            reason = one_line(error)
            # `with` makes it the context of the error below, and its frames hold the tensors that it was about.
            let_go(error)
        else:
            return
        line, facts = meta_estimate.shortage(self.setup, self.device, what)
        self.resolved |= facts
        raise MemoryShortageError(f"{line} ({reason})", self.resolved)


def facts_of(trainee: Trainee, source: Source, device: str) -> dict[str, object]:
    """For `resolved`: what a trainee is, and what it is trained on."""
    setup, audit, recipe = trainee.setup, trainee.audit, trainee.setup.recipe
    backend = "torch.mm"
    if recipe is not None:
        backend = PEERS[setup.peer].doc if setup.peer else recipe.backend
    facts: dict[str, object] = {
        "timed": "one optimizer step: forward, backward, clipping, optimizer, FP8 scales",
        "model": setup.model,
        "parameters": sum(p.numel() for p in trainee.model.parameters()),
        "compute": setup.compute,
        "recipe": recipe.name if recipe else "bf16",
        "backend": backend,
        "compile": "fullgraph, static shapes"
        if setup.compiled
        else "each Linear by itself, static shapes"
        if setup.compiled_linears
        else "eager, recorded as one CUDA graph"
        if setup.graph
        else "eager",
        "norm_and_swiglu": "fp8core's fused kernels" if setup.fused_modules else "PyTorch's",
        "checkpointing": setup.checkpointing,
        "accumulation": setup.accumulation,
        "batch": setup.batch,
        "seq": setup.seq,
        "tokens_per_step": meta_estimate.tokens(setup),
        "optimizer": "AdamW" + (", fused" if trainee.optimizer.defaults.get("fused") else ""),
        "linear_layers": len(audit.layers),
        "fp8_layers": len(audit.converted),
        "skipped_layers": {layer.fqn: layer.reason for layer in audit.not_converted} if recipe else {},
        "memory": meta_estimate.memory(setup, device),
        "flops_formula_id": meta_estimate.flops_formula_id(setup),
        "layers": note_of_layers(setup),
        "weights": f"of all arms, drawn once on {_drawn_on(setup, device)}",
    }
    if facts["flops_formula_id"] == "palm":
        facts["flops_causal"] = meta_estimate.flops(setup, "causal")
        facts["flops_recomputed"] = meta_estimate.recomputed_flops(setup)
    if recipe is not None:
        facts["weight_casts"] = "once a step" if setup.casts_kept else "each microbatch"
    if setup.peer:
        facts |= {"peer": setup.peer, "peer_version": PEERS[setup.peer].version()}
    text = corpus_of(setup.model, source.data, source.path)
    if text is not None:
        return facts | {"data": text.name, "data_sha256": text.sha256, "vocab_size": text.vocab_size}
    return facts | meta_estimate.facts_of_calls(setup, device)


def _drawn_on(setup: Setup, device: str) -> str:
    """Where the initial weights come from; a user's model is made on the CPU."""
    on_gpu = torch.device(device).type == "cuda" and isinstance(resolve(setup.model), ModelSpec)
    return "the GPU" if on_gpu else "the CPU"


def note_of_layers(setup: Setup) -> str:
    """Depth of the model, all or truncated; "" where that is unknown."""
    spec = resolve(setup.model)
    if not isinstance(spec, ModelSpec):
        return ""
    if setup.layers is None or setup.layers == spec.layers:
        return f"all {spec.layers}"
    return f"truncated to {setup.layers} of {spec.layers} layers"


@functools.lru_cache(maxsize=1)  # of the case under way
def control_of(setup: Setup, source: Source, device: str) -> Control:
    """The control of a set-up without FP8, eager; run one sequence at a time where the whole batch doesn't fit."""
    while True:
        try:
            return _control(setup, source, device)
        except Exception as error:
            if not out_of_memory(error) or setup.batch == 1:
                raise
        setup = replace(setup, batch=1, accumulation=setup.sequences)


def _control(setup: Setup, source: Source, device: str) -> Control:
    on_gpu = torch.device(device).type == "cuda"
    trainee = prepare(setup, device, weights="device" if on_gpu else "host")
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
    weights = keep(trainee.model, KEPT_SHARE * total)
    with torch.random.fork_rng(devices=[0] if on_gpu else []):
        torch.manual_seed(setup.seed)
        with steps.spread_of_logits(trainee) as spread:
            loss = trainee.step(_step(setup, source, 0, device))
    return Control(weights, steps.FirstStep.of(loss, trainee, spread))


@functools.lru_cache(maxsize=1)
def batches_of(setup: Setup, source: Source, device: str) -> list[list[tuple[Tensor, ...]]]:
    """Microbatches of `STEPS` steps, on the device; the same objects for all arms of a case."""
    return [_step(setup, source, step, device) for step in range(STEPS)]


def _step(setup: Setup, source: Source, step: int, device: str) -> list[tuple[Tensor, ...]]:
    text: Any = corpus_of(setup.model, source.data, source.path)
    size = (setup.accumulation, setup.batch, setup.seq)
    return microbatches_of(setup.model, text, step, source.seed, size, device)


def _without_fp8(setup: Setup) -> Setup:
    eager = replace(setup, compiled=False, compiled_linears=False, graph=False)
    return replace(eager, recipe=None, peer="", left_out=(), fused_modules=False)
