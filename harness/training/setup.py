"""From a description of a training set-up to a model that can take optimizer steps.

`prepare` builds the model of a `Setup`, turns its Linear layers into FP8 if there is a recipe, compiles it if asked,
and gives it the optimizer. `Trainee.step` is one whole optimizer step over one or several microbatches. Throughput
and loss are both measured on these two, so that a speed and a curve of one name are of the same program.

Three set-ups are called `compute`:

    fp32            float32 weights and arithmetic
    bf16_autocast   float32 weights; matrix products in bfloat16 by autocast (nanoGPT's set-up)
    bf16            everything in bfloat16: weights, gradients and the optimizer's moments
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fp8core import Audit, audit, convert_to_float8_training
from fp8core.experts.moe import convert_experts_to_float8
from fp8core.history import update_scales
from fp8core.inputs.microbatch import microbatches
from fp8core.linear import Float8Linear
from fp8core.recipe import RECIPES, Recipe
from harness.peers import PEERS
from harness.store.errors import unknown
from harness.timing.compiling import fresh_compile
from harness.training.models import resolve
from harness.training.models.fused import fuse
from harness.training.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from harness.training.models import WeightsFrom

EXPERTS = (
    "hp",
    "fp8",
)  # what grouped experts multiply in: high precision, or the recipe of the Linear layers
_PRECISIONS = {"bf16": False, "bfloat16": False, "fp8": True, "float8": True}
# Fused AdamW exists on both devices that the harness knows; elsewhere it would be refused by the optimizer.
_FUSED_ON = ("cpu", "cuda")


def mixed_precision(text: str, recipe: str = "tensorwise") -> Recipe | None:
    """The recipe behind `train.mixed_precision=`: None for bf16, the named recipe for fp8.

    Case does not matter, and "float8" and "bfloat16" are the same two words. Nothing else is guessed.

    Args:
        text: "bf16" or "fp8".
        recipe: a name of `fp8core.RECIPES`, for fp8.

    Raises:
        UsageError: any other word, or an unknown recipe (also where bf16 makes no use of it).
    """
    if recipe not in RECIPES:
        raise unknown("train.recipe", str(recipe), RECIPES)
    if not isinstance(text, str) or text.lower() not in _PRECISIONS:
        raise unknown("train.mixed_precision", str(text), _PRECISIONS)
    return RECIPES[recipe] if _PRECISIONS[text.lower()] else None


@dataclass(frozen=True, slots=True)
class Setup(Step):
    """One way to train one model; suites check the values where they enter, as those of axes.

    Attributes:
        recipe: FP8 recipe of the Linear layers; None leaves them as they are.
        peer: whose FP8 layers ("" for fp8core's): a name of `harness.peers.PEERS`.
        left_out: fully qualified names of Linear layers that stay as they are though there is a recipe.
        experts: of a mixture: one of `EXPERTS`.
        fused_modules: fp8core's RMSNorm and SwiGLU in the place of PyTorch's (`harness.training.models.fused`).
        graph: eager, and fit to be recorded as a CUDA graph (`harness.training.cuda_graph`): a step never waits.
        layers: number of layers, where fewer than the model's own.
        vocab_size: of the corpus; None for the model's own.
        seed: of the initial weights.
        lr, betas, weight_decay: of AdamW; only weights of two and more dimensions decay (nanoGPT's groups).
        grad_clip: largest norm of all gradients together; inf only measures it, None doesn't.
    """

    recipe: Recipe | None = None
    peer: str = ""
    left_out: tuple[str, ...] = ()
    experts: str = "hp"
    fused_modules: bool = False
    graph: bool = False
    layers: int | None = None
    vocab_size: int | None = None
    seed: int = 0
    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    grad_clip: float | None = 1.0

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of weights, gradients and the optimizer's state."""
        return torch.bfloat16 if self.weights == "bf16" else torch.float32

    def converts(self, module: nn.Module, fqn: str) -> bool:
        """The module filter of the conversion."""
        return fqn not in self.left_out

    @property
    def casts_kept(self) -> bool:
        """Whether each weight is cast once for all microbatches of a step. Compiled layers cast as ever."""
        if self.accumulation == 1 or self.recipe is None or self.compiled:
            return False
        return not self.peer or PEERS[self.peer].around is not None


@dataclass(slots=True)
class Trainee:
    """A model that takes optimizer steps.

    Attributes:
        setup: what it was made from.
        model: the converted model; its parameters are those that the optimizer holds.
        run: the forward pass, model(*batch) -> loss, compiled if the set-up says so.
        optimizer: AdamW, where it was made by `prepare`.
        audit: every Linear, converted or not, with the reason. With a peer: the layers that fp8core would convert,
            which are those that the peer's layers took the place of.
        grad_norm: of the last step before clipping, 0-dimensional; None where `grad_clip` is None.
        losses: of the last step's microbatches, 0-dimensional each.
        before_pass: called with the number of each microbatch of a step before its passes.
        scales_group: the ranks that share scales of delayed scaling; None: all.
    """

    setup: Setup
    model: nn.Module
    run: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    audit: Audit
    grad_norm: Tensor | None = None
    losses: list[Tensor] = field(default_factory=list)
    before_pass: Callable[[int], object] = lambda number: None
    scales_group: ProcessGroup | None = None

    def step(
        self, batches: Sequence[tuple[Tensor, ...]], halfway: Callable[[], None] = lambda: None
    ) -> Tensor:
        """One optimizer step: all microbatches forward and backward, clip, optimizer, FP8 scales.

        Gradients are cleared at the start, so that those of the step can be read after it.

        Args:
            batches: `setup.accumulation` tuples, each of which is handed to the model.
            halfway: called once the backward passes are queued, before clipping.

        Returns:
            Mean loss of the microbatches before the step, 0-dimensional float32; the device may still be at work.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.gradients(batches)
        halfway()
        if self.setup.grad_clip is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.grad_clip)
        self.optimizer.step()
        self.update_scales()
        return loss

    def gradients(self, batches: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """The forward and backward passes of a step; gradients add to those that are there.

        Args, Returns: as `step`.
        """
        count = self.setup.accumulation
        self.losses = losses = []
        with self._casts_kept():
            for i, batch in enumerate(batches):
                self.before_pass(i)
                loss = self.forward(batch, None if count == 1 else i == 0)
                (loss if count == 1 else loss / count).backward()
                losses.append(loss.detach())
        return (losses[0] if count == 1 else torch.stack(losses).mean()).float()

    def forward(self, batch: tuple[Tensor, ...], first: bool | None = None) -> Tensor:
        """The loss of one forward pass, in what the peer wants around it.

        Args:
            batch: what is handed to the model.
            first: whether it is the first of several microbatches of a step; None: it stands alone.
        """
        setup = self.setup
        wanted = PEERS[setup.peer].around if setup.peer else None
        if wanted is None or setup.recipe is None:
            return self.run(*batch)
        with wanted(setup.recipe.name, first):
            return self.run(*batch)

    def fp8_weights(self) -> list[Tensor]:
        """Weights of the layers and experts that were converted, each once; none without a recipe."""
        names = [f"{layer.fqn}.weight".lstrip(".") for layer in self.audit.converted]
        names += [experts.fqn for experts in self.audit.experts if experts.converted]
        return list(dict.fromkeys(self.model.get_parameter(name) for name in names))

    def update_scales(self) -> None:
        """What ends a step for delayed and static scales of fp8core's layers."""
        if self.setup.recipe is not None and not self.setup.peer:
            update_scales(self.model, self.scales_group)

    def _casts_kept(self) -> AbstractContextManager[None]:
        """One cast of each weight for all microbatches, of fp8core's layers; its hooks would recompile."""
        setup = self.setup
        keep = setup.casts_kept and not setup.peer
        # Comparing the weights' bits waits for the device; nothing in a step writes them but the optimizer.
        return microbatches(self.model, check_content=not setup.graph) if keep else nullcontext()


def prepare(
    setup: Setup, device: str, model: nn.Module | None = None, weights: WeightsFrom = "host"
) -> Trainee:
    """Builds, converts and compiles the model of a set-up, and makes its optimizer.

    Args:
        setup: what to build.
        device: "cpu", "cuda" or "cuda:<index>".
        model: a model to take instead of building `setup.model`; it is converted in place.
        weights: how the initial ones are drawn, as `harness.training.models.build` says; a user's model draws its own.

    Raises:
        UsageError: an unknown model.
        ValueError: nothing can be converted, or the device lacks FP8 matmul for the recipe.
    """
    if model is None:
        model = resolve(setup.model).build(
            device=device,
            dtype=setup.weight_dtype,
            seed=setup.seed,
            layers=setup.layers,
            vocab_size=setup.vocab_size,
            checkpointing=setup.checkpointing,
            weights=weights,
        )
    if setup.recipe is not None:
        model = convert_to_float8_training(model, config=setup.recipe, module_filter_fn=setup.converts)
        if setup.experts == "fp8":
            convert_experts_to_float8(model, config=setup.recipe)
    if setup.fused_modules:
        model = fuse(model)
    layers = audit(model)
    if setup.peer:
        linear, recipe = PEERS[setup.peer].linear, setup.recipe
        assert linear is not None
        assert recipe is not None
        model = replace_layers(model, lambda layer: linear(layer, recipe.name))
    return Trainee(setup, model, forward_of(model, setup, device), optimizer_of(model, setup, device), layers)


def replace_layers(model: nn.Module, made: Callable[[Float8Linear], nn.Module]) -> nn.Module:
    """Puts another layer, which shares its parameters, in the place of every Float8Linear.

    So exactly the layers that fp8core converts are a peer's, whatever its own conversion would choose.

    Args:
        model: a model that fp8core converted; changed in place, except when it is itself a Linear.
        made: the other layer, of one of them.
    """
    swapped = {m: made(m) for m in model.modules() if isinstance(m, Float8Linear)}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, Float8Linear):
                setattr(parent, name, swapped[child])
    return swapped[model] if isinstance(model, Float8Linear) else model


def optimizer_of(model: nn.Module, setup: Setup, device: str) -> torch.optim.Optimizer:
    """AdamW over the parameters that train; weights of two and more dimensions decay, gains and biases don't."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": setup.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = torch.device(device).type in _FUSED_ON
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=setup.lr, betas=setup.betas, fused=fused)


def forward_of(model: nn.Module, setup: Setup, device: str) -> Callable[..., Tensor]:
    """model(*batch) under the set-up's autocast, compiled whole if asked: anew on each call of this."""
    kind, autocast = torch.device(device).type, setup.compute == "bf16_autocast"

    def forward(*batch: Tensor) -> Tensor:
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=autocast):
            return model(*batch)

    return fresh_compile(forward) if setup.compiled else forward
