"""An arm of the suite `train`: how it is checked before its time counts, and one whose memory comes and goes."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8core import amax_state_dict
from harness.peers import PEERS
from harness.store.errors import Cause, MemoryShortageError, let_go, one_line, out_of_memory
from harness.timing.clock import Split
from harness.timing.device_memory import peak_memory
from harness.timing.workload import Numerics, Workload
from harness.training import cuda_graph, meta_estimate, steps
from harness.training.batches import corpus_of, microbatches_of
from harness.training.models import ModelSpec, resolve
from harness.training.parallel.together import first_fault, gathered
from harness.training.setup import Setup, forward_of, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import nn

    from harness.training.setup import Trainee


def keep(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name, in host memory."""
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}


class Residency:
    """Holds the memory of one trainee; `with residency():` it is there. It begins as given up.

    Args:
        trainee: whose memory; it must not be used outside of the context.
        initial: weights to put back, by name of parameter. Trainees of the same model may share them.
        device: of the random numbers.
    """

    def __init__(self, trainee: Trainee, initial: Mapping[str, Tensor], device: str) -> None:
        self._trainee, self._initial, self._device = trainee, initial, torch.device(device)
        model = trainee.model
        self._parameters = dict(model.named_parameters())
        self._storages = [(storage, storage.nbytes()) for storage in _storages(self._parameters.values())]
        # A state_dict has a parameter under each of its names; copies of those would be weights that never leave.
        tied = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = {
            name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value in (model.state_dict() | amax_state_dict(model)).items()
            if name not in tied
        }
        self._leave()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The trainee is in its initial state, on its device."""
        gpus = [self._device.index or 0] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(self._trainee.setup.seed)
            try:
                self._enter()
                yield
            finally:
                self._leave()

    def _enter(self) -> None:
        for storage, size in self._storages:
            storage.resize_(size)
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.copy_(self._initial[name])
        if self._buffers:
            self._trainee.model.load_state_dict(self._buffers, strict=False)

    def _leave(self) -> None:
        trainee = self._trainee
        trainee.optimizer.zero_grad(set_to_none=True)
        trainee.optimizer.state.clear()
        trainee.grad_norm = None
        for storage, _ in self._storages:
            storage.resize_(0)


def _storages(parameters: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of parameters, each once; memory that is not the allocator's own (NumPy's) is moved into such."""
    moved: dict[int, torch.UntypedStorage] = {}
    for p in parameters:
        storage = p.untyped_storage()
        if storage._cdata not in moved:
            moved[storage._cdata] = storage if storage.resizable() else storage.clone()
        if not storage.resizable():
            place = torch.empty(0, dtype=p.dtype, device=p.device)
            p.data = place.set_(moved[storage._cdata], p.storage_offset(), p.size(), p.stride())
    return list(moved.values())


STEPS = 4  # different batches, over and over
_REPLAYED = 3  # steps that are compared with eager ones, of different batches
WATCHED = 2  # steps whose peak of memory is read: the second one meets the optimizer's state


@dataclass(frozen=True, slots=True)
class Source:
    """Where the batches come from: a data set by name with its path ("" for none), and the seed of their order."""

    data: str
    path: str
    seed: int

    def step(self, setup: Setup, number: int, device: str) -> list[tuple[Tensor, ...]]:
        """The microbatches of a step."""
        text = corpus_of(setup.model, self.data, self.path)
        size = (setup.accumulation, setup.batch, setup.seq)
        return microbatches_of(setup.model, text, number, self.seed, size, device)


@dataclass(frozen=True, slots=True)
class Profile:
    """Steps to trace, counted from the first one after the warm-up, and the name of the trace's file."""

    first: int
    last: int
    file: str


# What the arms of a case share: initial weights, drawn once, and what the first step without FP8 gives
ControlStart = tuple[dict[str, "Tensor"], steps.FirstStep]


@dataclass
class Stepper:
    """A trainee that takes one step after another, of `STEPS` batches in turn.

    Attributes:
        replay: what takes a step in place of the trainee.
    """

    trainee: Trainee
    batches: list[list[tuple[Tensor, ...]]]
    split: Split = field(default_factory=Split)
    turn: int = 0
    replay: Callable[[cuda_graph.Microbatches], Tensor] | None = None

    def next(self) -> list[tuple[Tensor, ...]]:
        """The microbatches of the next step."""
        self.turn += 1
        return self.batches[(self.turn - 1) % len(self.batches)]

    def run(self) -> Tensor:
        """One whole optimizer step."""
        if self.replay is not None:
            return self.replay(self.next())
        return self.trainee.step(self.next(), self.split)

    def first_step(self) -> steps.FirstStep:
        """Takes the first step."""
        return steps.FirstStep.of(self.run(), self.trainee)

    def control(self) -> steps.FirstStep:
        """`first_step` of what others are held against: the spread of its logits, which takes memory, bounds their losses."""
        with steps.spread_of_logits(self.trainee) as spread:
            return steps.FirstStep.of(self.run(), self.trainee, spread)

    def prove(self) -> tuple[str, dict[str, object]]:
        """`steps.precision_fault` of the steps after it."""
        return steps.precision_fault(self.run, self.trainee)


class TrainingArm:
    """An arm in one process or several ranks, checked in one way: each does the same, and decides by what all have found.

    Attributes:
        setup: of one rank.
        device: where.
        resolved: what really runs.
        control: the first step without FP8, of this rank.
        world: ranks.
        stepper: in `resident`.
        resident: memory there, in its initial state, the first batch next; with `recorded=False` no step is replayed.
        expected: what was predicted of it.
    """

    setup: Setup
    device: str
    resolved: dict[str, object]
    control: steps.FirstStep
    world = 1
    stepper: Stepper
    resident: Callable[..., AbstractContextManager[None]]
    expected: Callable[[], Numerics]

    def replay_fault(self) -> str:
        """Why replayed steps are not the eager ones that were proved; "" if they are."""
        return ""

    def _proved(self, proofs: list[tuple[str, dict[str, object]]]) -> tuple[str, dict[str, object]]:
        """Why the precision of some rank is not proved, "" where all are; and its proof, by which `resolved` goes."""
        # Of the rank that the fault names: another one's proof may hold
        proof = next((found for why, found in proofs if why), proofs[0][1])
        self.resolved |= proof
        counts = [found.get("fp8_gemms") for _, found in proofs]
        fault = first_fault([why for why, _ in proofs])
        if not fault and len(set(counts)) > 1:
            fault = f"ranks ran other numbers of FP8 GEMMs: {counts}"
        if len(proofs) > 1:
            self.resolved["proved_on_ranks"] = sum(not why for why, _ in proofs)
        return fault, proof

    def peak(self) -> tuple[int, int]:
        """Bytes allocated and reserved at most in `WATCHED` steps; not in `resident`."""
        with peak_memory() as peak, self.resident():
            for _ in range(WATCHED):
                self.stepper.run()
        return peak.allocated, peak.reserved

    def offered(self, run: Callable[[], object], split: Split | None, **more: Any) -> Workload:
        """What the executor asks for."""
        return Workload(
            run=run,
            check=self.check,
            flops=meta_estimate.flops(self.setup),
            resolved=self.resolved,
            resident=self.resident,
            tokens=self.world * meta_estimate.tokens(self.setup),
            split=split,
            split_metric="" if split is None else "forward_backward_ms",
            **more,
        )

    def check(self) -> Numerics:
        """First step against the control's, then the precision, then the memory of some steps."""
        cause = Cause.NUMERICS
        with self.resident(recorded=False):
            mine, base = self.stepper.first_step(), self.control
            losses = gathered([mine.loss, base.loss])
            self.resolved |= {"first_loss": fmean(own for own, _ in losses)}
            self.resolved |= {"first_loss_control": fmean(control for _, control in losses)}
            if len(losses) == 1:
                self.resolved["first_grad_norm_ratio"] = (
                    mine.grad_norm / base.grad_norm if base.grad_norm else None
                )
                self.resolved["first_grad_cosine_min"] = min(mine.cosines(base).values(), default=None)
            fault = first_fault(gathered(steps.first_step_fault(mine, base)))
            if not fault:
                fault, proof = self._proved(gathered(self.stepper.prove()))
                cause = steps.cause_of_fault(proof)
        if not fault:
            fault, cause = self.replay_fault(), Cause.NUMERICS
        if fault:
            return Numerics({}, ok=False, reason=fault, cause=cause)
        expected, measured = self.expected(), ("peak_memory_bytes", "reserved_memory_bytes")
        if torch.device(self.device).type == "cuda":
            most = [float(max(sizes)) for sizes in zip(*gathered(self.peak()), strict=True)]
            return replace(expected, values={**expected.values, **dict(zip(measured, most, strict=True))})
        why = f"the allocator of a {self.device} keeps no peak"
        if "predicted_memory_bytes" in expected.values:
            why += "; predicted_memory_bytes has the expected value"
        return replace(expected, skipped={**dict.fromkeys(measured, why), **expected.skipped})


class TimedArm(TrainingArm):
    """An arm of this process, its memory given up until it is asked for.

    Args:
        setup: what is trained.
        source: of its batches.
        device: where.
        profile: steps to trace; None: none.

    Raises:
        MemoryShortageError: it does not fit, not even to be made.
    """

    def __init__(self, setup: Setup, source: Source, device: str, profile: Profile | None = None) -> None:
        self.setup, self.device, self.profiling, self.resolved = setup, device, profile, {}
        plain = without_fp8(setup)
        with self._memory_explained("building the model"):
            weights, first = control_of(plain, source, device)
            self.control = first
            trainee = prepare(setup, device, weights="none")  # those of the control are put in
            self.stepper = Stepper(trainee, batches_of(plain, source, device))
            self._resident = Residency(trainee, weights, device)
        self.resolved |= facts_of(trainee, source, device)

    def workload(self) -> Workload:
        """What the executor asks for."""
        setup = self.setup
        return self.offered(
            self.stepper.run,
            None if setup.graph else self.stepper.split,
            compiled=setup.compiled,
            recompile=self.recompile if setup.compiled else None,
            profile=self.profile if self.profiling is not None else None,
        )

    @contextmanager
    def resident(self, *, recorded: bool = True) -> Iterator[None]:
        """Memory there, weights initial, the first batch next; an arm that is replayed has warmed up and was recorded.

        Each time anew: where memory comes back it need not lie where it lay.

        Args:
            recorded: False leaves a step that would be replayed eager.
        """
        stepper = self.stepper
        stepper.turn = 0
        with self._memory_explained("a training step"), self._resident():
            if not (self.setup.graph and recorded):
                yield
                return
            warm_up = [stepper.next() for _ in range(cuda_graph.WARM_UP)]
            with cuda_graph.recorded(stepper.trainee, warm_up, cuda_graph.CudaTape()) as stepper.replay:
                try:
                    yield
                finally:
                    stepper.replay = None

    def recompile(self) -> None:
        """Gives the compiler another code object over the same model."""
        trainee = self.stepper.trainee
        trainee.run = forward_of(trainee.model, self.setup, self.device)

    def expected(self) -> Numerics:
        """The memory of a step."""
        total = meta_estimate.total(meta_estimate.memory(self.setup, self.device))
        return Numerics({"predicted_memory_bytes": float(total)})

    def replay_fault(self) -> str:
        """Why replayed steps are not the eager ones that were proved; "" if they are."""
        if not self.setup.graph:
            return ""
        with self.resident(recorded=False):
            eager = [float(self.stepper.run()) for _ in range(cuda_graph.WARM_UP + _REPLAYED)][
                cuda_graph.WARM_UP :
            ]
        with self.resident():
            replayed = [float(self.stepper.run()) for _ in range(_REPLAYED)]
        self.resolved |= {"eager_losses": eager, "replayed_losses": replayed}
        return steps.replay_fault(replayed, eager)

    def profile(self, folder: Path) -> Numerics:
        """A trace in the run's folder, and the time of each kernel class in one step."""
        wanted = self.profiling
        assert wanted is not None
        with self.resident():
            self.stepper.run()
            parts = steps.profiled(
                self.stepper.run, wanted.first, wanted.last, self.device, folder / wanted.file
            )
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
    """What a trainee is, for `resolved`, and what it is trained on."""
    setup, audit, recipe = trainee.setup, trainee.audit, trainee.setup.recipe
    named = isinstance(resolve(setup.model), ModelSpec)
    compile_as = {
        "fullgraph, static shapes": setup.compiled,
        "eager, recorded as one CUDA graph": setup.graph,
        "eager": True,
    }
    # A user's model is made on the CPU
    drawn_on = "GPU" if named and torch.device(device).type == "cuda" else "CPU"
    backend = "torch.mm" if recipe is None else PEERS[setup.peer].doc if setup.peer else recipe.backend
    facts: dict[str, object] = {
        "timed": "one optimizer step: forward, backward, clipping, optimizer, FP8 scales",
        "model": setup.model,
        "parameters": sum(p.numel() for p in trainee.model.parameters()),
        "compute": setup.compute,
        "recipe": recipe.name if recipe else "bf16",
        "backend": backend,
        "compile": next(how for how, is_so in compile_as.items() if is_so),
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
        "weights": f"of all arms, drawn once on the {drawn_on}",
    }
    if named:
        facts["flops_causal"] = meta_estimate.flops(setup, "causal")
        facts["flops_recomputed"] = meta_estimate.recomputed_flops(setup)
    if recipe is not None:
        facts["weight_casts"] = "once a step" if setup.casts_kept else "each microbatch"
    if setup.peer:
        facts |= PEERS[setup.peer].facts
    text = corpus_of(setup.model, source.data, source.path)
    if text is not None:
        return facts | {"data": text.name, "data_sha256": text.sha256, "vocab_size": text.vocab_size}
    return facts | meta_estimate.facts_of_calls(setup, device)


def note_of_layers(setup: Setup) -> str:
    """Depth of the model, all or truncated; "" where that is unknown."""
    spec = resolve(setup.model)
    if not isinstance(spec, ModelSpec):
        return ""
    if setup.layers in (None, spec.layers):
        return f"all {spec.layers}"
    return f"truncated to {setup.layers} of {spec.layers} layers"


@functools.lru_cache(maxsize=1)  # of the case under way
def control_of(setup: Setup, source: Source, device: str) -> ControlStart:
    """The control of a set-up without FP8, eager; run one sequence at a time where the whole batch doesn't fit."""
    while True:
        try:
            return _control(setup, source, device)
        except Exception as error:
            if not out_of_memory(error) or setup.batch == 1:
                raise
        setup = replace(setup, batch=1, accumulation=setup.batch * setup.accumulation)


def _control(setup: Setup, source: Source, device: str) -> ControlStart:
    on_gpu = torch.device(device).type == "cuda"
    trainee = prepare(setup, device, weights="device" if on_gpu else "host")
    weights = keep(trainee.model)
    with torch.random.fork_rng(devices=[0] if on_gpu else []):
        torch.manual_seed(setup.seed)
        return weights, Stepper(trainee, [source.step(setup, 0, device)]).control()


@functools.lru_cache(maxsize=1)
def batches_of(setup: Setup, source: Source, device: str) -> list[list[tuple[Tensor, ...]]]:
    """Microbatches of `STEPS` steps, on the device; the same objects for all arms of a case."""
    return [source.step(setup, step, device) for step in range(STEPS)]


def without_fp8(setup: Setup) -> Setup:
    """The control's set-up: eager, of no peer, nothing fused."""
    plain: dict[str, Any] = {"recipe": None, "peer": "", "left_out": (), "fused_modules": False}
    return replace(setup, compiled=False, graph=False, **plain)
