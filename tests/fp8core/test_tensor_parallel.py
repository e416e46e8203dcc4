"""Tensor and sequence parallelism on gloo, 2 and 4 processes.

Oracles: the same model in one process (outputs, the gradient of the input and of every parameter); for rowwise scales a
model in one process cut into layers as the ranks' parts are; torchao's styles in the same run; counts of collectives.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parallel_models import Config, Mlp, gradients, mlp
from tensor_parallel_plans import (
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
    Recipe,
    WaitedRowwiseParallel,
    async_tp_reason,
    check_plan,
    convert_to_float8_training,
    update_scales,
    verify,
)
from fp8core.proof.wire import Collectives, count_collectives

BOUND = 1e-6  # relative: sums of float32 in another order, codes equal
STYLES = ("torch", "torch sp", "float8", "float8 sp", "float8 sp shared")
WORLDS = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
SMALL = (32, 64, True)  # dim, hidden, bias


def in_float32(name: str) -> Recipe:
    return RECIPES[name] if name == "tensorwise" else RECIPES[name].emulated()


def shape_of(recipe: str, bias: bool = True) -> tuple[int, int, bool]:
    """Blocks of 128 need the larger one."""
    return (128, 512, bias) if recipe in ("blockwise", "mxfp8") else (32, 64, bias)


@WORLDS
@pytest.mark.parametrize(
    ("recipe", "styles", "bias"),
    [
        ("tensorwise", STYLES, True),
        ("tensorwise", STYLES, False),
        ("delayed", ("float8", "float8 sp"), True),  # in its third step, with amaxes of the second in use
        # parts of 128 and 256 features hold whole blocks, so each block's scale is the single process's
        ("blockwise", ("torch", "torch sp", "float8"), True),
        ("mxfp8", ("torch", "torch sp", "float8"), True),
    ],
)
@on_ranks(2)
def test_equals_one_process(world: int, recipe: str, styles: tuple[str, ...], bias: bool) -> None:
    """Output and all gradients, with sequence parallelism and FP8 all-gathers too."""
    config, (dim, hidden, _), steps = in_float32(recipe), shape_of(recipe), 3 if recipe == "delayed" else 1
    want = trained(mlp(config, bias, dim, hidden), steps, "", dim)
    for style in styles:
        found = errors(trained(parallel(config, style, (dim, hidden, bias)), steps, style, dim), want, style)
        assert len(found) == (8 if bias else 5)
        assert max(found.values()) <= BOUND, (style, found)


@on_ranks(2)
def test_what_is_not_sound_is_refused_with_the_way_out() -> None:
    in_high_precision = "gather it in high precision"
    refused = {
        ("delayed", "torch"): "take Float8ColwiseParallel",
        ("delayed", "torch sp"): "take Float8ColwiseParallel",
        ("delayed", "float8 sp shared"): "give each layer Float8ColwiseParallel",
    }
    for recipe in ("rowwise_with_gw_hp", "blockwise", "mxfp8"):
        refused |= {(recipe, style): in_high_precision for style in ("float8 sp", "float8 sp shared")}
    for (recipe, style), way in refused.items():
        with pytest.raises(ValueError, match=way):
            parallel(in_float32(recipe), style, shape_of(recipe))
    for style in ("torch", "torch sp", "float8"):
        parallel(in_float32("rowwise_with_gw_hp"), style, SMALL)


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


@WORLDS
@pytest.mark.parametrize("style", ["float8", "float8 sp", "float8 sp shared"])
@on_ranks(2)
def test_rowwise_scales_its_parts(world: int, style: str) -> None:
    """<= 1e-6 against one scale for each part of a row; without powers of two 5e-2 from one process's scales for whole rows.
    Features of very different magnitudes."""
    dim, hidden, spread = 32, 128, 3.0
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("rowwise"), emulate=True, round_scales_to_power_of_2=False
    ).to_recipe()
    got = trained(parallel(config, style, (dim, hidden, True)), 1, style, dim, spread=spread)
    original: Any = mlp(None, True, dim, hidden)
    reference = PerShard(original, world, config)
    to_parts = passes(reference, data(dim, spread=spread), "") | reference.whole_gradients()
    to_whole = trained(mlp(config, True, dim, hidden), 1, "", dim, spread=spread)
    assert max(errors(got, to_parts, style).values()) <= BOUND
    assert 0.01 < max(errors(got, to_whole, style).values()) < 0.1


def collectives(config: Config, style: str, dtype: torch.dtype = torch.float32) -> Collectives:
    """What one forward and backward pass sends."""
    model = parallel(config, style, SMALL).to(dtype)
    with count_collectives() as counts:
        passes(model, data(32).to(dtype), style)
    return counts


@WORLDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_gathers_one_byte_an_element(world: int, dtype: torch.dtype) -> None:
    """Counted at the collectives: half of bfloat16, a quarter of float32, scales apart."""
    part, name = 2 * 32 * 32 // world, str(dtype).removeprefix("torch.")
    plain, float8, apart, shared = (
        collectives(RECIPES["tensorwise"], style, dtype)
        for style in ("torch sp", "float8", "float8 sp", "float8 sp shared")
    )
    assert plain.calls["all_gather", name] == 2  # input forward, grad_output backward
    assert plain.of("all_gather") == {name: 2 * part * dtype.itemsize}
    assert shared.calls["all_gather", "uint8"] == 2
    assert shared.of("all_gather") == {"uint8": 2 * part}
    assert apart.of("all_gather") == {"uint8": 3 * part}  # each of the two readers gathers
    # amaxes: gate and up one each way, down its input and weight in one; the shared input and grad_output one each
    assert float8.calls["all_reduce", "int32"] == 5
    assert shared.calls["all_reduce", "int32"] == 7
    assert shared.bytes["all_reduce", "int32"] == 4 * 8  # eight amaxes in seven calls


@on_ranks(2)
def test_rowwise_scaling_needs_no_amax_of_others() -> None:
    config, both = in_float32("rowwise"), 2 * 64 * 32 // 2  # of both readers' casts
    assert "int32" not in collectives(config, "float8").of("all_reduce")
    assert collectives(config, "float8 sp shared").bytes["all_gather", "uint8"] == both
    # two readers, two casts each
    assert collectives(config, "float8 sp").bytes["all_gather", "uint8"] == 2 * both


@on_ranks(2)
def test_a_nan_on_one_rank_reaches_all() -> None:
    """A NaN of a weight or of the tokens. Tensorwise, one NaN makes all of its tensor NaN, as in one process."""
    for style in ("float8", "float8 sp"):
        model, x = parallel(RECIPES["tensorwise"], style, (32, 64, False)), data(32)
        if style == "float8 sp":
            x = of_this_rank(x).clone()
        if dist.get_rank() == 0:
            (x if style == "float8 sp" else model.down.weight.to_local().data)[..., 0, 0] = torch.nan
        assert model(x).isnan().all(), style


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_inference_mode(recipe: str) -> None:
    """Oracle: the outputs without gradients; between two training steps."""
    for style in STYLES:
        model = parallel(RECIPES[recipe].emulated(), style, SMALL)
        passes(model, data(32), style)
        x = of_this_rank(data(32)) if "sp" in style else data(32)
        with torch.no_grad():
            want = model(x)
        with torch.inference_mode():
            assert torch.equal(model(x), want), style
        passes(model, data(32), style)


@on_ranks(2)
def test_bad_plans_are_refused() -> None:
    """Each says what is at fault and the way out; no rank waits for another."""
    tp, tensorwise = mesh(), RECIPES["tensorwise"]
    emulated = tensorwise.emulated()
    colwise, rowwise = {"up": Float8ColwiseParallel()}, {"down": RowwiseParallel()}
    late, prepared = Float8ColwiseParallel(input_layouts=Shard(2)), {"": plan("float8 sp shared")[""]}

    def checked(model: nn.Module, styles: dict[str, ParallelStyle]) -> nn.Module:
        check_plan(model, tp, styles)
        return parallelize_module(model, tp, styles)

    def sharded() -> nn.Module:
        return fully_shard(mlp(tensorwise), mesh=tp)

    def but_up(model: nn.Module) -> nn.Module:
        return convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn != "up")

    def mixed() -> nn.Module:
        return but_up(
            convert_to_float8_training(mlp(None), config="rowwise", module_filter_fn=lambda _, n: n == "up")
        )

    attempts: tuple[tuple[str, Callable[[], object]], ...] = (
        ("Linear is no Float8Linear", lambda: checked(but_up(mlp(None)), colwise)),
        ("N=24", lambda: checked(mlp(tensorwise, hidden=48), colwise)),
        ("cannot be cut column-wise", lambda: checked(mlp(emulated, hidden=33), colwise)),
        ("cannot be cut row-wise", lambda: checked(mlp(emulated, hidden=33), rowwise)),
        ("would cut a block", lambda: checked(mlp(RECIPES["blockwise"].emulated(), hidden=128), colwise)),
        ("'upp'", lambda: checked(mlp(tensorwise), {"upp": Float8ColwiseParallel()})),
        (
            "convert_to_float8_training first",
            lambda: convert_to_float8_training(parallelize_module(mlp(None), tp, {"up": ColwiseParallel()})),
        ),
        ("sharded by FSDP already", lambda: checked(sharded(), colwise)),
        ("DTensor already", lambda: parallelize_module(sharded(), tp, colwise)),
        ("whole tokens", lambda: checked(mlp(tensorwise), {"up": late}).up(data(32).chunk(2, 2)[0])),
        ("holds no Float8Linear", lambda: checked(mlp(None), prepared)),
        ("differently", lambda: checked(mixed(), prepared)),
    )
    for said, attempt in attempts:
        with pytest.raises(ValueError, match=said):
            attempt()


@pytest.mark.parametrize(
    ("recipe", "style"),
    [
        ("tensorwise", "torch"),
        ("tensorwise", "float8 sp shared"),
        ("rowwise", "float8 sp"),
        ("delayed", "float8"),
    ],
)
@on_ranks(2)
def test_verify_sees_through_the_plan(recipe: str, style: str) -> None:
    """Nine GEMMs of three layers on each rank, whose part of each output is that of the emulated layer."""
    model = parallel(RECIPES[recipe], style, SMALL)

    def step() -> None:
        passes(model, data(32), style)
        update_scales(model)

    proof = verify(step, model, announce=False)
    assert proof.ok, proof.problems
    assert proof.line.startswith("FP8 verified: 3 of 3 Linear layers")
    assert proof.counted == proof.predicted == 9


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


@pytest.mark.slow
@on_ranks(2)
def test_a_compiled_module_returns_the_gradient_of_what_arrived() -> None:
    """Oracle: eager mode, bit for bit. torch's style before a compiled module yields no gradient: see the next test."""
    waited = embedded(WaitedRowwiseParallel, True)
    assert torch.equal(waited, embedded(RowwiseParallel, False))
    assert waited.any()


def test_plan_wants_a_flat_mesh() -> None:
    """Before any process group is needed."""

    class Square:
        ndim = 2

    square: Any = Square()
    with pytest.raises(ValueError, match=r"mesh of one dimension, got 2; pass mesh\['tp'\]"):
        check_plan(mlp("tensorwise"), square, {})


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["torch.compile(block)", "block.compile()"])
def test_a_plan_before_a_compiled_block_is_refused(is_wrapped: bool) -> None:
    """Both spellings of compiling lose the gradient; without compiling, and with fp8core's style, there is no refusal."""

    class Flat:
        ndim = 1

    mesh: Any = Flat()
    for style, is_compiled in (
        (RowwiseParallel, True),
        (WaitedRowwiseParallel, True),
        (RowwiseParallel, False),
    ):
        model: Any = Embedded()
        if is_compiled and is_wrapped:
            model.mlp = torch.compile(model.mlp, backend="eager")
        elif is_compiled:
            model.mlp.compile(backend="eager")
        plan = {"embedding": style(input_layouts=Replicate(), output_layouts=Shard(1))}
        refused = is_compiled and style is RowwiseParallel
        with pytest.raises(ValueError, match=r"take fp8core\.Waited") if refused else nullcontext():
            check_plan(model, mesh, plan)


def test_async_tensor_parallelism_is_not_pretended() -> None:
    assert "unsupported here: it needs NVIDIA GPUs, not cpu" in (async_tp_reason("cpu") or "")


COMPILED = [
    (recipe, style)
    for recipe in ("tensorwise", "rowwise", "delayed", "rowwise_with_gw_hp")
    for style in STYLES
    if recipe != "delayed" or style in ("float8", "float8 sp")  # else amaxes would be DTensors: refused
    if recipe != "rowwise_with_gw_hp"
    or style in ("torch", "torch sp", "float8")  # else refused, see the errors
]


@pytest.mark.parametrize(
    ("recipe", "style", "backend"),
    [
        ("tensorwise", "float8 sp", "aot_eager"),
        *(pytest.param(*case, "aot_eager", marks=pytest.mark.slow) for case in COMPILED),
        *(pytest.param(*c, "inductor", marks=pytest.mark.slow) for c in COMPILED if c[0] == "tensorwise"),
    ],
)
@on_ranks(2)
def test_compiled_plans_are_eager(recipe: str, style: str, backend: str) -> None:
    """Oracle: the eager model on the same ranks; full graphs, so a break raises. Every recipe and plan that is not refused."""
    counters.clear()
    eager, model = (parallel(in_float32(recipe), style, SMALL) for _ in range(2))
    run = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    for step in range(2):
        want, got = (passes(m, data(32, step), style) for m in (eager, run))
        found = errors(got | gradients(model), want | gradients(eager), style)
        assert max(found.values()) <= BOUND, found
        for each in (eager, model):
            each.zero_grad()
            update_scales(each)
    assert not counters["graph_break"]


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("style", ["torch", "float8"])
@on_ranks(2)
def test_equals_torchao(style: str) -> None:
    """Same outputs and gradients as torchao's layers and styles, with fewer all-reduces."""
    os.environ["TORCHAO_FORCE_SKIP_LOADING_SO_FILES"] = "1"
    from torchao.float8 import Float8LinearConfig as TheirConfig
    from torchao.float8 import convert_to_float8_training as convert
    from torchao.float8 import float8_tensor_parallel as theirs

    col, row = theirs.Float8ColwiseParallel, theirs.Float8RowwiseParallel
    their_plan = plan("torch") if style == "torch" else {"gate": col(), "up": col(), "down": row()}
    peer = convert(mlp(None), config=TheirConfig(emulate=True))
    parallelize_module(peer, mesh(), their_plan)
    runs, reduced = [], []
    for model in (parallel(RECIPES["tensorwise"].emulated(), style, SMALL), peer):
        with profile(use_kineto=False) as seen:  # a dispatch mode doesn't see inside of torchao's tensors
            run = passes(model, data(32), style)
        reduced.append(sum(event.name == "gloo:all_reduce" for event in seen.function_events or []))
        runs.append(run | gradients(model))
    # torchao's styles cast gradients before the bias is summed, so its gradient is that of FP8 codes; ours is not
    rounded = {name for name, error in errors(*runs, style).items() if error > BOUND}
    assert rounded == ({"gate.bias", "up.bias", "down.bias"} if style == "float8" else set())
    # Ours: the output, gradients of two inputs, and 5 amaxes; torchao takes one for each tensor, cut or not
    ours, other = reduced
    assert ours == 3 + 5 < other
