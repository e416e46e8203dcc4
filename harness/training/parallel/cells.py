"""Cells: the ways to train in parallel, each as what a rank does.

A cell takes the model of a `ParallelRun` and gives a `Trainee`; `run` is what every rank calls. What refuses does so while the
model is converted and wrapped, before anything is trained, and on every rank alike.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fp8core import Float8Linear, GroupedMatmul
from fp8core.distributed.expert_parallel import expert_parameters, parallelize_experts
from fp8core.distributed.sequence_parallel import gather_reason
from fp8core.distributed.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    check_plan,
)
from fp8core.distributed.waited import WaitedRowwiseParallel
from fp8core.distributed.weight_gather import weight_gather_precision
from fp8core.inputs.operands import serves_both
from fp8core.inputs.shared_input import input_casts
from fp8core.proof.wire import Collectives, count_collectives
from harness.store.tables import beside
from harness.training.models.common import mean_cross_entropy
from harness.training.models.llama import Llama, rotations
from harness.training.parallel.job import BATCH, MARGIN, SEQ, SIZES, ULP, alone, deviation, train
from harness.training.parallel.together import gathered
from harness.training.setup import Trainee

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from fp8core.recipe import Recipe
    from harness.training.parallel.job import ParallelRun


Made = tuple[Trainee, dict[str, Any]]  # on this rank, with facts for `resolved`
DRAWS = 3
_OWN = f"{MARGIN:g} x the largest change of one process's own losses"
ROUNDING = f"{_OWN} when each weight moves by up to one unit in its last place, {DRAWS} draws"
DRAWN = f"{_OWN} by other random numbers of stochastic rounding, {DRAWS} draws"
SAME = "the same sums in the same order: bit for bit"


@lru_cache(maxsize=64)
def reference(job: ParallelRun) -> tuple[float, ...]:
    """The losses of one process."""
    return tuple(alone(job))


@lru_cache(maxsize=64)
def noise(job: ParallelRun) -> float:
    """The bound where sums differ in their order or, of a recipe that draws random numbers, ranks draw others."""
    drawn, draws = job.recipe if _draws(job) else None, range(1, DRAWS + 1)
    others = [replace(job, recipe=drawn.with_seed(n)) if drawn else replace(job, perturb=n) for n in draws]
    return MARGIN * max([ULP, *(deviation(alone(other), reference(job)) for other in others)])


def _draws(job: ParallelRun) -> bool:
    return job.recipe is not None and job.recipe.is_stochastic


@dataclass(frozen=True, slots=True)
class ParallelCell:
    """One way to train in parallel.

    Attributes:
        doc: what it is.
        world: ranks.
        microbatches: of a step, over all ranks.
        way: a key of `_WAYS`, which says what one rank trains.
        how: its arguments.
        same_sums: every sum is of the same terms in the same order as in one process, up to exchanging two: losses are
            then the reference's bit for bit.
        alone: what the job of one process has otherwise, so that it makes the same sums.
        cut: layers are cut over the ranks, and with them the groups of recipes that scale rows.
        compiled: its blocks are.
        job: what the job has beside the recipe.
    """

    doc: str
    world: int
    microbatches: int
    way: str
    how: Mapping[str, Any] = field(default_factory=dict)
    same_sums: bool = True
    alone: Mapping[str, Any] = field(default_factory=dict)
    cut: bool = False
    compiled: bool = False
    job: Mapping[str, Any] = field(default_factory=dict)

    def of(self, job: ParallelRun) -> ParallelRun:
        """The job as this cell makes it."""
        return replace(job, microbatches=self.microbatches, **self.job)

    def bound(self, reference: ParallelRun) -> tuple[float, str]:
        """How far losses may be from the reference's, relative to them, and by what."""
        if _draws(reference):
            return noise(reference), DRAWN
        return (0.0, SAME) if self.same_sums else (noise(reference), ROUNDING)

    def reference(self, job: ParallelRun) -> ParallelRun:
        """The job of one process whose losses this cell's must equal."""
        own = self.of(job)
        parts = self.world if self.cut and job.recipe is not None and _scales_rows(job.recipe) else 1
        return replace(own, **{"parts": parts, **self.alone})


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank has to say.

    Attributes:
        losses: mean of its microbatches, by step; empty where it knows of none.
        facts: for `resolved`.
        refusal: why nothing was trained; "" where it was.
    """

    losses: tuple[float, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""


def run(name: str, job: ParallelRun) -> RankResult:
    """What a rank does: the cell of that name, made of this job."""
    cell = CELLS[name]
    own = cell.of(job)
    try:
        trainee, facts = _WAYS[cell.way](own, **cell.how)
    except ValueError as error:
        return RankResult(refusal=" ".join(str(error).split()))
    counters.clear()
    # What compiled code sends is seen by no mode, and a mode is nothing that Dynamo compiles under.
    with nullcontext(Collectives()) if cell.compiled else count_collectives() as counts:
        losses = train(own, trainee, _mine(own, trainee))
    facts |= {
        "fp8_layers": sum(isinstance(m, Float8Linear) for m in trainee.model.modules()),
        "fp8_experts": sum(
            m.recipe is not None for m in trainee.model.modules() if isinstance(m, GroupedMatmul)
        ),
    }
    if cell.compiled:
        facts["graphs"] = counters["stats"]["unique_graphs"]
        facts["graph_breaks"] = sum(counters["graph_break"].values())
    else:
        facts["sent_bytes_per_step"] = {
            f"{collective} {dtype}": size / own.steps
            for (collective, dtype), size in sorted(counts.bytes.items())
        }
        facts["scale_all_reduces_per_step"] = counts.scale_reductions / own.steps
    return RankResult(tuple(losses), facts)


def everywhere(name: str, job: ParallelRun) -> list[RankResult]:
    """`run` on all ranks, which part after it: what each has to say, on rank 0; nothing on the others."""
    every = [RankResult(**fields) for fields in gathered(asdict(run(name, job)))]
    speaks = dist.get_rank() == 0
    dist.destroy_process_group()  # or the one process that rank 0 holds them against would wait for the others
    return every if speaks else []


def _scales_rows(recipe: Recipe) -> bool:
    return any(cast.granularity == "rowwise" for cast in recipe.casts)


def _mine(job: ParallelRun, trainee: Trainee) -> range:
    """The microbatches of this rank: all, or its share."""
    each = trainee.setup.accumulation
    first = 0 if each == job.microbatches else dist.get_rank() * each
    return range(first, first + each)


def _of_a_share(job: ParallelRun, model: nn.Module, **more: Any) -> Trainee:
    return job.trainee(model, job.microbatches // dist.get_world_size(), **more)


def _ddp(job: ParallelRun) -> Made:
    return _of_a_share(job, DistributedDataParallel(job.convert(job.build()))), {}


def _sharded(
    job: ParallelRun, checkpointing: str = "none", compiled: bool = False, mesh: Any = None, **policy: Any
) -> Made:
    """FSDP2 of every block and of the rest; weights gathered in FP8 where the recipe allows it."""
    if job.recipe is not None:
        job = replace(job, recipe=replace(job.recipe, fp8_all_gather=True))
    model: Any = job.convert(job.build(checkpointing))
    for block in model.layers:
        if compiled:
            block.compile(fullgraph=True, backend=compiler(job.device))
        fully_shard(block, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)

    layers = [m for m in model.modules() if isinstance(m, Float8Linear)]
    facts: dict[str, Any] = {}
    if layers:
        facts["weights_gathered_as"] = sorted({weight_gather_precision(layer) for layer in layers})
    if compiled:
        facts["compiler"] = compiler(job.device)
    trainee = _of_a_share(job, model)
    last = trainee.setup.accumulation - 1
    trainee.before_pass = lambda number: model.set_requires_gradient_sync(number == last)
    return trainee, facts


def compiler(device: str) -> str:
    """On a CPU the graphs alone, forward and backward, since code for them takes a minute to make."""
    return "inductor" if device == "cuda" else "aot_eager"


def _hsdp(job: ParallelRun) -> Made:
    return _sharded(job, mesh=init_device_mesh(job.device, (2, 2), mesh_dim_names=("replicate", "shard")))


def _offloaded(job: ParallelRun) -> Made:
    return _sharded(job, offload_policy=CPUOffloadPolicy(pin_memory=job.device != "cpu"))


def _tensor_parallel(job: ParallelRun, sequence: bool = False, compiled: bool = False) -> Made:
    model: Any = job.convert(job.build())
    mesh = init_device_mesh(job.device, (dist.get_world_size(),))
    fp8 = job.recipe is not None
    col, row = (Float8ColwiseParallel, Float8RowwiseParallel) if fp8 else (ColwiseParallel, RowwiseParallel)
    out = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {f"layers.*.attention.{name}": col() for name in ("q", "k", "v")}
    plan |= {f"layers.*.ffn.{name}": col() for name in ("gate", "up")}
    plan |= {f"layers.*.{name}": row(output_layouts=out) for name in ("attention.o", "ffn.down")}
    plan["head"] = col(output_layouts=Replicate())
    facts: dict[str, Any] = {}
    if sequence:
        why = "no recipe" if job.recipe is None else gather_reason(job.recipe)
        if why is None and model.head.amaxes is not None:
            why = "the recipe remembers amaxes by layer, and a module's input has none"
        prepare: Any = PrepareFloat8ModuleInput if why is None else PrepareModuleInput
        if why is None and compiled and job.recipe is not None and not serves_both(*input_casts(job.recipe)):
            why = "compiled, codes by token can't be cast again by feature"
        facts["activations_gathered_as"] = "fp8" if why is None else f"high precision: {why}"
        first: dict[str, Any] = {f"layers.*.{name}_norm": SequenceParallel() for name in ("attention", "ffn")}
        first |= {"embedding": WaitedRowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
        first |= {"norm": SequenceParallel(), "head": PrepareModuleInput(**_gathered(1))}
        parallelize_module(model, mesh, first)
        plan["layers.*.attention"], plan["layers.*.ffn"] = prepare(**_gathered(3)), prepare(**_gathered(1))
    check_plan(model, mesh, plan)
    parallelize_module(model, mesh, plan)
    if compiled:
        facts["compiler"] = compiler(job.device)
        for block in model.layers:
            block.compile(fullgraph=True, dynamic=False, backend=compiler(job.device))
    return job.trainee(model, job.microbatches), facts


def _gathered(inputs: int) -> dict[str, Any]:
    """Arguments of a style whose first input comes cut by tokens and is wanted whole."""
    rest = (None,) * (inputs - 1)
    return {"input_layouts": (Shard(1), *rest), "desired_input_layouts": (Replicate(), *rest)}


def _expert_parallel(job: ParallelRun) -> Made:
    """Experts shared out, all else as in DDP; each rank's tokens travel to their experts and back."""
    model = parallelize_experts(job.convert(job.build()), mean_gradient=True)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(expert_parameters(model)))
    return _of_a_share(job, DistributedDataParallel(model)), {}


class _Stage(nn.Module):
    """A rank's share of a Llama: some blocks, and the embedding or the head."""

    def __init__(self, model: Llama, rank: int, world: int) -> None:
        super().__init__()
        self.config = model.config
        self.embedding = model.embedding if rank == 0 else None
        count = len(model.layers) // world
        self.layers = nn.ModuleList(list(model.layers)[rank * count : (rank + 1) * count])
        last = rank == world - 1
        self.norm = model.norm if last else None
        self.head = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T] or activations [B, T, width] -> activations, or logits [B, T, V]."""
        cos, sin = rotations(self.config, x.shape[1], x.device)
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def _pipeline(job: ParallelRun, schedule: str) -> Made:
    rank, world = dist.get_rank(), dist.get_world_size()
    part = _Stage(job.convert(job.build()), rank, world)  # type: ignore[arg-type]  # still a Llama
    groups = [dist.new_group([other]) for other in range(world)]  # every rank takes part in making each
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device(job.device)
    # Shapes are given: torch would find them by passes over uninitialised memory, whose amaxes delayed scaling keeps.
    inner = torch.empty(BATCH, SEQ, SIZES["width"], device="meta", requires_grad=True)
    logits = torch.empty(BATCH, SEQ, SIZES["vocab_size"], device="meta", requires_grad=True)
    given = torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta") if rank == 0 else inner
    made = logits if rank == world - 1 else inner
    stage = pipelining.PipelineStage(part, rank, world, device, input_args=given, output_args=made)
    pipe = getattr(pipelining, schedule)(stage, n_microbatches=job.microbatches, loss_fn=mean_cross_entropy)

    class PipelineStage(Trainee):
        def gradients(self, batches: Sequence[tuple[Tensor, ...]]) -> Tensor:
            """The passes of all stages; the last one knows the losses."""
            tokens, targets = (torch.cat(each) for each in zip(*batches, strict=True))
            self.losses = []
            pipe.step(
                *([tokens] if rank == 0 else []),
                target=targets if rank == world - 1 else None,
                losses=self.losses,
            )
            return tokens.new_empty(0)

    return job.trainee(part, job.microbatches, PipelineStage, scales_group=groups[rank]), {}


_WAYS: Mapping[str, Callable[..., Made]] = {
    "ddp": _ddp,
    "sharded": _sharded,
    "hsdp": _hsdp,
    "offloaded": _offloaded,
    "tensor_parallel": _tensor_parallel,
    "expert_parallel": _expert_parallel,
    "pipeline": _pipeline,
}
CELLS: dict[str, ParallelCell] = {
    name: ParallelCell(**fields) for name, fields in beside(__file__, "cells.yaml").items()
}
