"""What the ranks of `test_tensor_parallel.py` run; each function answers with numbers that the tests judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import Config, Mlp, gradients, mlp
from tensor_parallel_plans import (
    Shape,
    data,
    errors,
    mesh,
    of_this_rank,
    parallel,
    passes,
    plan,
    trained,
)
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from fp8core import (
    RECIPES,
    Float8ColwiseParallel,
    Float8LinearConfig,
    WaitedRowwiseParallel,
    check_plan,
    convert_to_float8_training,
    update_scales,
    verify,
)
from fp8core.distributed.wire import Collectives, count_collectives

VERIFIED = (
    ("tensorwise", "torch"),
    ("tensorwise", "float8 sp shared"),
    ("rowwise", "float8 sp"),
    ("delayed", "float8"),
)
STYLES = ("torch", "torch sp", "float8", "float8 sp", "float8 sp shared")


def against_one_process(
    cases: list[tuple[str, Config, str, Shape, int]],
) -> dict[str, dict[str, float] | str]:
    """For each case (name, config, style, shape, steps): errors against the same model in one process, or why not."""
    found: dict[str, dict[str, float] | str] = {}
    for name, config, style, shape, steps in cases:
        dim, hidden, bias = shape
        try:
            model = parallel(config, style, shape)
        except ValueError as refusal:
            found[name] = str(refusal)
            continue
        want = trained(mlp(config, bias, dim, hidden), steps, "", dim)
        found[name] = errors(trained(model, steps, style, dim), want, style)
    return found


class PerShard(nn.Module):
    """The Mlp cut as tensor parallelism cuts it, in one process: each part a layer with scales of its own."""

    def __init__(self, original: Mlp, parts: int, config: Config) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        self.bias = original.down.bias
        for i in range(parts):
            part = Mlp(1, 1, bias=False)
            for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
                layer = getattr(original, name)
                weight = nn.Parameter(layer.weight.detach().chunk(parts, dim)[i].clone())
                new = nn.Linear(weight.shape[1], weight.shape[0], bias=dim == 0)
                new.weight = weight
                if dim == 0:
                    new.bias = nn.Parameter(layer.bias.detach().chunk(parts)[i].clone())
                setattr(part, name, new)
            self.parts.append(convert_to_float8_training(part, config=config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum(part(x) for part in self.parts)
        return total + self.bias

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """By the names of the Mlp."""
        found = {"down.bias": self.bias.grad}
        for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
            layers = [getattr(part, name) for part in self.parts]
            found[f"{name}.weight"] = torch.cat([layer.weight.grad for layer in layers], dim)
            if dim == 0:
                found[f"{name}.bias"] = torch.cat([layer.bias.grad for layer in layers])
        return found


def rowwise_scales() -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """Errors of rowwise tensor parallelism by style: against scales per part, and against one process's global ones."""
    dim, hidden, spread = 32, 128, 3.0
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("rowwise"), emulate=True, round_scales_to_power_of_2=False
    ).to_recipe()
    found = {}
    for style in ("float8", "float8 sp", "float8 sp shared"):
        got = trained(parallel(config, style, (dim, hidden, True)), 1, style, dim, spread=spread)
        original = mlp(None, True, dim, hidden)
        assert isinstance(original, Mlp)
        reference = PerShard(original, dist.get_world_size(), config)
        per_shard = passes(reference, data(dim, spread=spread), "") | reference.whole_gradients()
        one = trained(mlp(config, True, dim, hidden), 1, "", dim, spread=spread)
        found[style] = errors(got, per_shard, style), errors(got, one, style)
    return found


def collectives(config: Config, dtype: torch.dtype) -> dict[str, Collectives]:
    """Collectives of one forward and backward pass, by style."""
    found = {}
    for style in STYLES:
        try:
            model = parallel(config, style, (32, 64, True)).to(dtype)
        except ValueError:
            continue
        with count_collectives() as found[style]:
            passes(model, data(32).to(dtype), style)
    return found


def evaluated() -> dict[str, bool]:
    """Whether a trained model's outputs in inference mode are those without gradients, by recipe and style."""
    found = {}
    for recipe in ("tensorwise", "rowwise"):
        for style in STYLES:
            model = parallel(RECIPES[recipe].emulated(), style, (32, 64, True))
            passes(model, data(32), style)
            x = of_this_rank(data(32)) if "sp" in style else data(32)
            with torch.no_grad():
                want = model(x)
            with torch.inference_mode():
                found[f"{recipe} {style}"] = torch.equal(model(x), want)
            passes(model, data(32), style)
    return found


def compiled(cases: list[tuple[str, str]], backend: str = "aot_eager") -> dict[str, dict[str, Any]]:
    """For each (recipe, style): errors of the compiled model against the eager one on the same ranks, and its graphs."""
    found = {}
    for recipe, style in cases:
        torch._dynamo.reset()
        counters.clear()
        config = RECIPES[recipe] if recipe == "tensorwise" else RECIPES[recipe].emulated()
        eager, model = (parallel(config, style, (32, 64, True)) for _ in range(2))
        run = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        worst = 0.0
        for step in range(2):
            want, got = (passes(m, data(32, step), style) for m in (eager, run))
            want, got = want | gradients(eager), got | gradients(model)
            worst = max(worst, *errors(got, want, style).values())
            for each in (eager, model):
                each.zero_grad()
                update_scales(each)
        found[f"{recipe} {style}"] = {
            "worst": worst,
            "breaks": dict(counters["graph_break"]),
        }
    return found


def nan_on_one_rank() -> list[bool]:
    """A NaN in one rank's part of a weight, or of the tokens: everything that shares its scale is NaN, on every rank."""
    found = []
    for style in ("float8", "float8 sp"):
        model, x = parallel(RECIPES["tensorwise"], style, (32, 64, False)), data(32)
        if style == "float8 sp":
            x = of_this_rank(x).clone()
        if dist.get_rank() == 0:
            (x if style == "float8 sp" else model.down.weight.to_local().data)[..., 0, 0] = torch.nan
        found.append(bool(model(x).isnan().all()))
    return found


def verified() -> dict[str, tuple[str, list[str], int]]:
    """The line, problems and FP8 GEMMs of a step, by style and recipe."""
    found = {}
    for name, style in VERIFIED:
        model = parallel(RECIPES[name], style, (32, 64, True))

        def step(model: nn.Module = model, style: str = style) -> None:
            passes(model, data(32), style)
            update_scales(model)

        proof = verify(step, model, announce=False)
        found[f"{name} {style}"] = (proof.line, list(proof.problems), proof.counted)
    return found


class Embedded(nn.Module):
    """An embedding in eager mode before a compiled MLP: tokens [batch, sequence] -> [batch, sequence, dim]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.mlp = Mlp(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.embedding(tokens))


def embedded(style: type[RowwiseParallel], is_compiled: bool) -> torch.Tensor:
    """Gradient of the embedding's part on this rank."""
    torch.manual_seed(0)
    model = Embedded()
    convert_to_float8_training(model, config="tensorwise")
    plan_of = {"embedding": style(input_layouts=Replicate(), output_layouts=Shard(1))}
    plan_of |= {f"mlp.{name}" if name else "mlp": each for name, each in plan("float8 sp shared").items()}
    parallelize_module(model, mesh(), plan_of)
    if is_compiled:
        model.mlp.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    model(torch.arange(64).view(2, 32)).float().square().mean().backward()
    return model.embedding.weight.grad.to_local()


def before_compiled() -> list[torch.Tensor]:
    """`embedded` in eager mode, and compiled with fp8core's style."""
    return [embedded(RowwiseParallel, False), embedded(WaitedRowwiseParallel, True)]


def refusals() -> dict[str, str]:
    """Messages that refuse bad plans and inputs, by what is bad."""
    tp, tensorwise = mesh(), RECIPES["tensorwise"]
    colwise, rowwise = {"up": Float8ColwiseParallel()}, {"down": RowwiseParallel()}
    late, prepared = Float8ColwiseParallel(input_layouts=Shard(2)), plan("float8 sp shared")[""]

    def checked(model: nn.Module, styles: dict[str, ParallelStyle]) -> nn.Module:
        check_plan(model, tp, styles)
        return parallelize_module(model, tp, styles)

    def sharded(config: Config) -> nn.Module:
        model = mlp(config)
        fully_shard(model, mesh=tp)
        return model

    def but_up(model: nn.Module) -> nn.Module:
        return convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn != "up")

    def mixed() -> nn.Module:
        return but_up(
            convert_to_float8_training(mlp(None), config="rowwise", module_filter_fn=lambda _, n: n == "up")
        )

    attempts: dict[str, Callable[[], object]] = {
        "not converted": lambda: checked(but_up(mlp(None)), colwise),
        "multiple of 16": lambda: checked(mlp(tensorwise, hidden=48), colwise),
        "uneven": lambda: checked(mlp(tensorwise.emulated(), hidden=33), colwise),
        "uneven, torch": lambda: checked(mlp(tensorwise.emulated(), hidden=33), rowwise),
        "block": lambda: checked(mlp(RECIPES["blockwise"].emulated(), hidden=128), colwise),
        "no such name": lambda: checked(mlp(tensorwise), {"upp": Float8ColwiseParallel()}),
        "convert late": lambda: convert_to_float8_training(
            parallelize_module(mlp(None), tp, {"up": ColwiseParallel()})
        ),
        "tp after fsdp": lambda: checked(sharded(tensorwise), colwise),
        "style after fsdp": lambda: parallelize_module(sharded(tensorwise), tp, colwise),
        "features gathered": lambda: checked(mlp(tensorwise), {"up": late}).up(data(32).chunk(2, 2)[0]),
        "no reader": lambda: checked(mlp(None), {"": prepared}),
        "readers differ": lambda: checked(mixed(), {"": prepared}),
    }
    told = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            told[name] = str(error)
    return told
