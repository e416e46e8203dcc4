"""ParallelRun: a small model, its batches and its training, the same in one process and in several.

The model is a Llama of two blocks, 256 wide, so that tensor parallelism over two ranks leaves whole blocks of 128x128;
a microbatch is 128 tokens, which every recipe takes. Weights and arithmetic other than FP8's are float32, and the
optimizer is SGD, so that what several processes do otherwise than one is the order of sums and nothing else: AdamW
divides by the gradient's own size, which makes noise of a gradient that is zero but for rounding as large as any step.

A step is `microbatches` forward and backward passes whose gradients are averaged. Who makes which is up to a cell
(`harness.training.parallel.cells`); one process makes all, one after the other.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8core import PrecisionSchedule, audit, convert_experts_to_float8, convert_to_float8_training
from harness.training.models.common import materialise
from harness.training.models.llama import Llama, LlamaConfig
from harness.training.models.llama_moe import Experts, LlamaMoe, Moe, MoeConfig
from harness.training.setup import Setup, Trainee

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fp8core.recipe import Recipe

BATCH, SEQ = 4, 32
LR = 0.3
ULP = 2.0**-23  # of float32, relative
MARGIN = 4.0  # of a bound, in largest changes seen
SIZES: dict[str, Any] = {
    "vocab_size": 256, "max_seq": SEQ, "layers": 2, "width": 256, "heads": 4, "kv_heads": 4, "ffn": 256,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"experts": 4, "top_k": 2}


@dataclass(frozen=True, slots=True)
class ParallelRun:
    """One training run.

    Attributes:
        recipe: of the linear layers; None: no FP8.
        microbatches: of a step.
        steps: optimizer steps.
        seed: of weights and batches.
        device: "cpu" or "cuda".
        moe: feed-forwards are mixtures of experts.
        converts: what the recipe is for: "dense", the linear layers, or "experts".
        schedule: of the precision, see `fp8core.schedule`.
        joined: microbatches that make one forward pass.
        groups: gradients are added up within so many groups of consecutive microbatches, then over the groups, as ranks
            do that accumulate or that reduce in two stages.
        parts: each linear layer of a block computes in so many parts, as tensor parallelism cuts them: for recipes
            whose scales are each part's own. Of a mixture: its experts do, part by part.
        perturb: 0: weights as drawn. Else each is moved by up to one unit in its last place, by noise of this seed.
    """

    recipe: Recipe | None
    microbatches: int = 1
    steps: int = 3
    seed: int = 0
    device: str = "cpu"
    moe: bool = False
    converts: str = "dense"
    schedule: str = ""
    joined: int = 1
    groups: int = 1
    parts: int = 1
    perturb: int = 0

    def build(self, checkpointing: str = "none") -> Llama:
        """The model with its initial weights, in high precision."""
        config = MoeConfig(**SIZES, **EXPERTS) if self.moe else LlamaConfig(**SIZES)
        with torch.device("meta"):
            model = (LlamaMoe if self.moe else Llama)(config, checkpointing)
        materialise(model, self.device, self.seed, model.init_std)
        if self.perturb:
            random = torch.Generator().manual_seed(self.perturb)
            with torch.no_grad():
                for p in model.parameters():
                    noise = torch.rand(p.shape, generator=random, dtype=torch.float64) * 2 - 1
                    p.copy_(p.double() * (1 + ULP * noise.to(p.device)))
        return model

    def convert(self, model: nn.Module) -> nn.Module:
        """The model in FP8; itself without a recipe."""
        if self.recipe is None:
            return model
        if self.converts == "experts":
            return convert_experts_to_float8(model, config=self.recipe)
        return convert_to_float8_training(model, config=self.recipe)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [BATCH * joined, SEQ], the same in each step, so that losses fall fast."""
        drawn = []
        for microbatch in range(number * self.joined, (number + 1) * self.joined):
            random = torch.Generator().manual_seed(self.seed * 1009 + microbatch)
            drawn.append(torch.randint(SIZES["vocab_size"], (BATCH, SEQ + 1), generator=random))
        text = torch.cat(drawn).to(self.device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def trainee(self, model: nn.Module, passes: int, kind: type[Trainee] = Trainee, **more: Any) -> Trainee:
        """The converted model, or this rank's part of it, ready for steps of so many microbatches."""
        setup = Setup(
            batch=BATCH * self.joined,
            seq=SEQ,
            compute="fp32",
            recipe=self.recipe,
            accumulation=passes,
            grad_clip=None,
            seed=self.seed,
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=LR, foreach=False)
        return kind(setup, model, model, optimizer, audit(model), **more)


def train(
    job: ParallelRun, trainee: Trainee, mine: Sequence[int], halfway: Callable[[], None] = lambda: None
) -> list[float]:
    """Mean loss of this rank's microbatches, by step; empty where it knows of none.

    Args:
        job: what is trained.
        trainee: on this rank.
        mine: numbers of the microbatches that it makes in each step.
        halfway: see `Trainee.step`.
    """
    schedule = PrecisionSchedule.parse(job.schedule)
    batches = [job.batch(number) for number in mine]
    curve = []
    for step in range(job.steps):
        if schedule.rules:
            schedule.apply(trainee.model, step, job.steps)
        trainee.step(batches, halfway)
        if losses := [loss.item() for loss in trainee.losses]:  # in float64, as over ranks
            curve.append(sum(losses) / len(losses))
    return curve


def alone(job: ParallelRun) -> list[float]:
    """The losses of one process that makes all microbatches itself."""
    built = job.build()
    if job.parts > 1:
        in_parts(built, job.parts)
    model = job.convert(built)
    trainee, parameters = job.trainee(model, job.microbatches), list(model.parameters())
    sums, each = list[list[Tensor]](), job.microbatches // job.groups

    def end_group(number: int = 0) -> None:
        if number % each == 0 and parameters[0].grad is not None:
            sums.append([p.grad for p in parameters if p.grad is not None])
            model.zero_grad()

    def add_up() -> None:
        end_group()
        for p, *grads in zip(parameters, *sums, strict=True):
            p.grad = torch.stack(grads).sum(0)
        sums.clear()

    if job.groups == 1:
        return train(job, trainee, range(job.microbatches))
    trainee.before_pass = end_group
    return train(job, trainee, range(job.microbatches), add_up)


def deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Largest |loss - expected| over |expected|; nan where a loss is."""
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return float("nan") if any(x != x for x in apart) else max(apart)


def in_parts(model: nn.Module, parts: int) -> None:
    """Cuts the linear layers of a Llama as tensor parallelism does, or its experts as expert parallelism does."""
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, Experts):
                setattr(owner, name, InShares(layer, parts))
            elif type(layer) is nn.Linear and not isinstance(owner, Moe):
                setattr(owner, name, InParts(layer, parts, int(name in ("o", "down"))))


class InParts(nn.Module):
    """A linear layer in parts, its weight [N, K] cut along `dim`: outputs part by part, or inputs whose products are added."""

    def __init__(self, layer: nn.Linear, parts: int, dim: int) -> None:
        super().__init__()
        self.dim, self.layers = dim, nn.ModuleList()
        for weight in layer.weight.detach().chunk(parts, dim):
            part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            part.weight = nn.Parameter(weight.clone())
            self.layers.append(part)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if not self.dim:
            return torch.cat([layer(x) for layer in self.layers], -1)
        given = x.chunk(len(self.layers), -1)
        return functools.reduce(operator.add, (layer(y) for layer, y in zip(self.layers, given, strict=True)))


class InShares(nn.Module):
    """Experts that are called in shares of consecutive ones, each share for itself."""

    def __init__(self, experts: Experts, parts: int) -> None:
        super().__init__()
        count, width, ffn = experts.gate.shape
        each = count // parts
        self.shares = nn.ModuleList()
        for first in range(0, count, each):
            with torch.device("meta"):
                share = Experts(each, width, ffn, experts.multiply.experts_per_token)
            for name in ("gate", "up", "down"):
                weight = getattr(experts, name).detach()[first : first + each]
                setattr(share, name, nn.Parameter(weight.clone()))
            self.shares.append(share)

    @property
    def gate(self) -> Tensor:
        """The first weight of all experts, for their number."""
        weights: list[Any] = [share.gate for share in self.shares]
        return torch.cat(weights)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Apply the shares of the experts; arguments and result are those of `Experts`."""
        results, start = [], 0
        for share, own in zip(self.shares, ends.chunk(len(self.shares)), strict=True):
            stop = int(own[-1])
            results.append(share(x[start:stop], own - start))
            start = stop
        return torch.cat(results)
