"""What the ranks of `test_tensor_parallel.py` run; each function answers with numbers that the tests judge."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import parallel_models
import torch
import torch.distributed as dist
from parallel_models import Config, Mlp, gradients, mlp, relative
from tensor_parallel_plans import (
    TOKENS,
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
from torch.autograd.profiler import profile
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    RowwiseParallel,
    parallelize_module,
)

from fp8core import (
    RECIPES,
    Float8LinearConfig,
    Float8RowwiseParallel,
    Recipe,
    WaitedRowwiseParallel,
    check_plan,
    convert_to_float8_training,
    update_scales,
    verify,
)
from fp8core.distributed.wire import Collectives, count_collectives


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


def rowwise_scales(config: Config, spread: float) -> dict[str, dict[str, float]]:
    """Errors of rowwise tensor parallelism against scales per part, and against one process's global ones."""
    shape: Shape = (32, 128, True)
    parts = dist.get_world_size()
    found: dict[str, dict[str, float]] = {}
    for style in ("float8", "float8 sp", "float8 sp shared"):
        got = trained(parallel(config, style, shape), 1, style, shape[0], spread=spread)
        original = mlp(None, True, shape[0], shape[1])
        assert isinstance(original, Mlp)
        reference = PerShard(original, parts, config)
        x = data(shape[0], spread=spread).requires_grad_()
        y = reference(x)
        (y.square().sum() / TOKENS[0] / TOKENS[1]).backward()
        assert x.grad is not None
        per_shard = {"output": y.detach(), "input": x.grad} | reference.whole_gradients()
        one = trained(mlp(config, True, *shape[:2]), 1, "", shape[0], spread=spread)
        exact = trained(mlp(None, True, *shape[:2]), 1, "", shape[0], spread=spread)
        found[style] = errors(got, per_shard, style)
        found[f"{style}: against global scales"] = errors(got, one, style)
        found[f"{style}: against float32"] = errors(got, exact, style)
        found[f"{style}: one process against float32"] = errors(one, exact, style)
    return found


def collectives(config: Config, dtype: torch.dtype) -> dict[str, Collectives]:
    """Collectives of one forward and backward pass, by style."""
    found = {}
    for style in ("torch", "float8", "torch sp", "float8 sp", "float8 sp shared"):
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
        for style in ("torch", "float8", "torch sp", "float8 sp", "float8 sp shared"):
            model = parallel(RECIPES[recipe].emulated(), style, (32, 64, True))
            passes(model, data(32), style)
            x = of_this_rank(data(32)) if "sp" in style else data(32)
            with torch.no_grad():
                want = model(x)
            with torch.inference_mode():
                found[f"{recipe} {style}"] = torch.equal(model(x), want)
            passes(model, data(32), style)
    return found


def compiled(cases: list[tuple[str, str]], backend: str = "aot_eager") -> dict[str, dict[str, Any] | str]:
    """For each (recipe, style): errors of the compiled model against the eager one on the same ranks, and its graphs."""
    found: dict[str, dict[str, Any] | str] = {}
    for recipe, style in cases:
        torch._dynamo.reset()
        counters.clear()
        config = RECIPES[recipe] if recipe == "tensorwise" else RECIPES[recipe].emulated()
        try:
            eager, model = (parallel(config, style, (32, 64, True)) for _ in range(2))
        except ValueError as refusal:
            found[f"{recipe} {style}"] = str(refusal)
            continue
        run = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        losses, worst = [], 0.0
        for step in range(2):
            want, got = (passes(m, data(32, step), style) for m in (eager, run))
            want, got = want | gradients(eager), got | gradients(model)
            worst = max(worst, *errors(got, want, style).values())
            losses.append([float(x["output"].square().mean()) for x in (got, want)])
            for each in (eager, model):
                each.zero_grad()
                update_scales(each)
        found[f"{recipe} {style}"] = {
            "worst": worst,
            "losses": losses,
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": dict(counters["graph_break"]),
        }
    return found


def rowwise_style_alone() -> dict[str, Any]:
    """One Float8Linear under Float8RowwiseParallel that scatters its output, compiled; its input is a rank's features."""
    torch._dynamo.reset()
    runs = []
    for is_compiled in (False, True):
        model = nn.Sequential(parallel_models.mlp(None, True, 32, 64).down)
        model = convert_to_float8_training(model, config="tensorwise")
        parallelize_module(model, mesh(), {"0": Float8RowwiseParallel(output_layouts=Shard(1))})
        run = (
            torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager") if is_compiled else model
        )
        x = data(64).chunk(dist.get_world_size(), 2)[dist.get_rank()].clone().requires_grad_()
        y = run(x)
        y.square().sum().backward()
        runs.append({"output": y.detach(), "input": x.grad, **gradients(model)})
    return {name: relative(runs[1][name], runs[0][name]) for name in runs[0]}


def nan_on_one_rank() -> list[bool]:
    """A NaN in one rank's part of a weight, of the tokens: everything that shares its scale is NaN, on every rank."""
    found = []
    for style in ("float8", "float8 sp"):
        model = parallel(RECIPES["tensorwise"], style, (32, 64, False))
        if dist.get_rank() == 0:
            model.down.weight.to_local().data[0, 0] = torch.nan
        x = data(32)
        x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()] if "sp" in style else x
        found.append(bool(model(x).isnan().all()))
    model = parallel(RECIPES["tensorwise"], "float8 sp", (32, 64, False))
    x = data(32).chunk(dist.get_world_size(), 1)[dist.get_rank()].clone()
    if dist.get_rank() == 1:
        x[0, 0, 0] = torch.nan
    found.append(bool(model(x).isnan().all()))
    return found


def beside_torchao() -> dict[str, Any]:
    """The same weights and tokens through torchao's styles and layers, and through ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig as TheirConfig
        from torchao.float8 import convert_to_float8_training as convert
        from torchao.float8 import float8_tensor_parallel as theirs
    found: dict[str, Any] = {}
    for style in ("torch", "float8"):
        their_plan = plan("torch") if style == "torch" else {
            "gate": theirs.Float8ColwiseParallel(),
            "up": theirs.Float8ColwiseParallel(),
            "down": theirs.Float8RowwiseParallel(),
        }  # fmt: skip
        peer = convert(mlp(None), config=TheirConfig(emulate=True))
        parallelize_module(peer, mesh(), their_plan)
        ours = parallel(RECIPES["tensorwise"].emulated(), style, (32, 64, True))
        runs, reduced = [], []
        for model in (ours, peer):
            with profile(
                use_kineto=False
            ) as profiler:  # a dispatch mode doesn't see inside of torchao's tensors
                run = passes(model, data(32), style)
            reduced.append(sum(event.name == "gloo:all_reduce" for event in profiler.function_events or []))
            runs.append(run | gradients(model))
        found[style] = {"errors": errors(*runs, style), "all_reduces": reduced}
    return found


def without_is_pinned() -> list[float]:
    """torch 2.11's state: DTensor has no handler of `aten.is_pinned`. Conversion, plan, training, a state dict."""
    op = torch.ops.aten.is_pinned.default
    dispatcher = DTensor._op_dispatcher
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    handlers.pop(op, None)
    model = parallel(RECIPES["tensorwise"], "float8 sp", (32, 64, True))
    refused = False
    try:
        model.up.weight.is_pinned()
    except NotImplementedError:
        refused = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(2):
        y = trained(model, 1, "float8 sp", 32)["output"]
        optimizer.step()
        losses.append(float(y.square().mean()) + step)
    model.load_state_dict(model.state_dict())
    return [*losses, float(refused)]


def custom(power_of_two: bool) -> Recipe:
    """Rowwise, multiplied in float32, with or without scales that are powers of two."""
    config = Float8LinearConfig.from_recipe_name("rowwise")
    return dataclasses.replace(config, emulate=True, round_scales_to_power_of_2=power_of_two).to_recipe()


def verified() -> dict[str, tuple[str, list[str], int]]:
    """The line, problems and FP8 GEMMs of a step, by style and recipe."""
    found = {}
    for name in ("tensorwise", "rowwise", "delayed"):
        for style in ("torch", "float8", "float8 sp", "float8 sp shared"):
            try:
                model = parallel(RECIPES[name], style, (32, 64, True))
            except ValueError:
                continue

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


def embedded(style: type[RowwiseParallel], is_compiled: bool) -> dict[str, Any]:
    """Gradient of the embedding's part on this rank, or what kept it away; refusal of `check_plan` once the MLP is compiled."""
    torch.manual_seed(0)
    model = Embedded()
    convert_to_float8_training(model, config="tensorwise")
    plan_of = {"embedding": style(input_layouts=Replicate(), output_layouts=Shard(1))}
    plan_of |= {f"mlp.{name}" if name else "mlp": each for name, each in plan("float8 sp shared").items()}
    parallelize_module(model, mesh(), plan_of)
    refusal = ""
    if is_compiled:
        model.mlp.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        try:
            check_plan(model, mesh(), {"embedding": plan_of["embedding"]})
        except ValueError as error:
            refusal = str(error)
    tokens = torch.arange(64).view(2, 32)
    try:
        model(tokens).float().square().mean().backward()
    except AttributeError as error:
        return {"error": str(error), "refusal": refusal}
    grad = model.embedding.weight.grad
    if grad is None:
        return {"error": "no gradient", "refusal": refusal}
    assert isinstance(grad, DTensor)
    return {"gradient": grad.to_local(), "refusal": refusal}


def before_compiled() -> dict[str, dict[str, Any]]:
    """`embedded` in eager mode, and compiled with fp8core's style and with torch's."""
    return {
        "eager": embedded(RowwiseParallel, False),
        "waited": embedded(WaitedRowwiseParallel, True),
        "torch": embedded(RowwiseParallel, True),
    }
