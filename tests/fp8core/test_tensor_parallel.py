"""Tensor and sequence parallelism on gloo, 2 and 4 processes.

Oracles: the same model in one process (outputs, the gradient of the input and of every parameter); for rowwise scales a
model in one process cut into layers as the ranks' parts are; torchao's styles in the same run; counts of collectives.
What ran is in `tensor_parallel_worker.py`.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import tensor_parallel_worker as worker
import torch
from parallel_models import mlp, several
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from fp8core import RECIPES, Recipe, WaitedRowwiseParallel, async_tp_reason, check_plan
from harness.machine import ranks

BOUND = 1e-6  # relative: sums of float32 in another order, codes equal
SMALL, LARGE = (32, 64), (128, 512)  # dim, hidden; blocks of 128 need the larger
STYLES = worker.STYLES
WORLDS = (2, pytest.param(4, marks=pytest.mark.slow))
Errors = dict[str, dict[str, float] | str]


def in_float32(name: str) -> Recipe:
    return RECIPES[name] if name == "tensorwise" else RECIPES[name].emulated()


def cases() -> list[tuple[str, Any, str, tuple[int, int, bool], int]]:
    """Every style; delayed scaling for three steps, so that its scales move. Rowwise has a reference of its own."""
    made = []
    for recipe in ("tensorwise", "delayed", "rowwise_with_gw_hp", "blockwise", "mxfp8"):
        size = LARGE if recipe in ("blockwise", "mxfp8") else SMALL
        for style in STYLES:
            for bias in (True, False) if recipe == "tensorwise" else (True,):
                name = f"{recipe}/{style}/{'bias' if bias else 'no bias'}"
                made.append((name, in_float32(recipe), style, (*size, bias), 3 if recipe == "delayed" else 1))
    return made


@cache
def ran(world: int) -> list[dict[str, Any]]:
    """[rank][task]: what all tests look at, of one launch."""
    tasks: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "errors": (worker.against_one_process, (cases(),)),
        "rowwise": (worker.rowwise_scales, ()),
        "sent in float32": (worker.collectives, (RECIPES["tensorwise"], torch.float32)),
        "sent in bfloat16": (worker.collectives, (RECIPES["tensorwise"], torch.bfloat16)),
    }
    if world == 2:
        tasks |= {
            "sent of rowwise": (worker.collectives, (in_float32("rowwise"), torch.float32)),
            "evaluated": (worker.evaluated, ()),
            "nan": (worker.nan_on_one_rank, ()),
            "refusals": (worker.refusals, ()),
            "verified": (worker.verified, ()),
            "compiled": (worker.compiled, ([("tensorwise", "float8 sp")],)),
        }
    return ranks.run(several, world, tasks, timeout_s=400)


def each(world: int, task: str) -> list[Any]:
    """What a task returned, by rank."""
    return [rank[task] for rank in ran(world)]


@pytest.fixture(scope="module", params=WORLDS)
def found(request: pytest.FixtureRequest) -> list[Errors]:
    return each(request.param, "errors")


@pytest.mark.parametrize(
    ("recipe", "styles", "bias"),
    [
        ("tensorwise", STYLES, "bias"),
        ("tensorwise", STYLES, "no bias"),
        ("delayed", ("float8", "float8 sp"), "bias"),  # in its third step, with amaxes of the second in use
        # parts of 128 and 256 features hold whole blocks, so each block's scale is the single process's
        ("blockwise", ("torch", "torch sp", "float8"), "bias"),
        ("mxfp8", ("torch", "torch sp", "float8"), "bias"),
    ],
)
def test_equals_one_process(found: list[Errors], recipe: str, styles: tuple[str, ...], bias: str) -> None:
    """Output and all gradients, with sequence parallelism and FP8 all-gathers too."""
    for style, rank in itertools.product(styles, found):
        errors = rank[f"{recipe}/{style}/{bias}"]
        assert isinstance(errors, dict), errors
        assert len(errors) == (8 if bias == "bias" else 5)
        assert max(errors.values()) <= BOUND, (style, errors)


def test_what_is_not_sound_is_refused_with_the_way_out(found: list[Errors]) -> None:
    refused = {case: rank for case, rank in found[0].items() if isinstance(rank, str)}
    ways = {
        "delayed/torch": "take Float8ColwiseParallel",
        "delayed/torch sp": "take Float8ColwiseParallel",
        "delayed/float8 sp shared": "give each layer Float8ColwiseParallel",
        "rowwise_with_gw_hp/float8 sp": "gather it in high precision",
        "rowwise_with_gw_hp/float8 sp shared": "gather it in high precision",
        **{
            f"{blocks}/{style}": "gather it in high precision"
            for blocks in ("blockwise", "mxfp8")
            for style in ("float8 sp", "float8 sp shared")
        },
    }
    assert {case.removesuffix("/bias") for case in refused} == set(ways)
    for case, way in ways.items():
        assert way in refused[f"{case}/bias"]


@pytest.mark.parametrize("world", WORLDS)
def test_rowwise_scales_its_parts(world: int) -> None:
    """<= 1e-6 against one scale for each part of a row; without powers of two 5e-2 from one process's scales for whole rows.
    Features of very different magnitudes."""
    for rank in each(world, "rowwise"):
        for to_parts, to_whole in rank.values():
            assert max(to_parts.values()) <= BOUND, to_parts
            assert 0.01 < max(to_whole.values()) < 0.1


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathers_one_byte_an_element(world: int, dtype: torch.dtype) -> None:
    """Counted at the collectives: half of bfloat16, a quarter of float32, scales apart."""
    tokens, dim = 2 * 32, 32
    part = tokens * dim // world
    size, name = dtype.itemsize, str(dtype).removeprefix("torch.")
    for rank in each(world, f"sent in {name}"):
        sent = rank["torch sp"]
        assert sent.calls["all_gather", name] == 2  # input forward, grad_output backward
        assert sent.bytes["all_gather", name] == 2 * part * size
        assert "uint8" not in sent.of("all_gather")
        sent = rank["float8 sp shared"]
        assert sent.calls["all_gather", "uint8"] == 2
        assert sent.of("all_gather") == {"uint8": 2 * part}
        assert rank["float8 sp"].of("all_gather") == {"uint8": 3 * part}  # each of the two readers gathers
        # amaxes: gate and up one each way, down its input and weight in one; the shared input and grad_output one each
        assert rank["float8"].calls["all_reduce", "int32"] == 5
        assert rank["float8 sp shared"].calls["all_reduce", "int32"] == 7
        assert rank["float8 sp shared"].bytes["all_reduce", "int32"] == 4 * 8  # eight amaxes in seven calls


def test_delayed_scaling_needs_no_amax_of_others() -> None:
    """Rowwise neither; both are the recipes for slow networks."""
    for rank in each(2, "sent of rowwise"):
        assert "int32" not in rank["float8"].of("all_reduce")
        both = 2 * 64 * 32 // 2  # of both readers' casts
        assert rank["float8 sp shared"].bytes["all_gather", "uint8"] == both
        assert rank["float8 sp"].bytes["all_gather", "uint8"] == 2 * both  # two readers, two casts each


def test_a_nan_on_one_rank_reaches_all() -> None:
    """Tensorwise, one NaN makes all of its tensor NaN, as in one process."""
    assert each(2, "nan") == [[True] * 2] * 2


def test_inference_mode() -> None:
    """Oracle: the outputs without gradients; between two training steps."""
    for rank in each(2, "evaluated"):
        assert len(rank) == 2 * len(STYLES)
        assert all(rank.values()), rank


def test_bad_plans_are_refused() -> None:
    """Each says what is at fault and the way out; no rank waits for another."""
    wanted = {
        "not converted": "Linear is no Float8Linear",
        "multiple of 16": "N=24",
        "uneven": "cannot be cut column-wise",
        "uneven, torch": "cannot be cut row-wise",
        "block": "would cut a block",
        "no such name": "'upp'",
        "convert late": "convert_to_float8_training first",
        "tp after fsdp": "sharded by FSDP already",
        "style after fsdp": "DTensor already",
        "features gathered": "whole tokens",
        "no reader": "holds no Float8Linear",
        "readers differ": "differently",
    }
    for rank in each(2, "refusals"):
        assert rank.keys() == wanted.keys()
        for case, text in wanted.items():
            assert text in rank[case], (case, rank[case])


def test_verify_sees_through_the_plan() -> None:
    """Nine GEMMs of three layers on each rank, whose part of each output is that of the emulated layer."""
    for rank in each(2, "verified"):
        assert len(rank) == len(worker.VERIFIED)
        for case, (line, problems, counted) in rank.items():
            assert not problems, (case, problems)
            assert line.startswith("FP8 verified: 3 of 3 Linear layers, 9 FP8 GEMMs a step as predicted"), (
                case
            )
            assert counted == 9


@pytest.mark.slow
def test_a_compiled_module_returns_the_gradient_of_what_arrived() -> None:
    """Oracle: eager mode, bit for bit. torch's style before a compiled module yields no gradient: see the next test."""
    for eager, waited in ranks.run(worker.before_compiled, 2, timeout_s=500):
        assert torch.equal(waited, eager)
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
        model: Any = worker.Embedded()
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


def assert_compiled(found: list[dict[str, Any]], cases: list[tuple[str, str]]) -> None:
    for rank in found:
        for recipe, style in cases:
            run = rank[f"{recipe} {style}"]
            assert run["worst"] <= BOUND, (recipe, style)
            assert run["breaks"] == {}


def test_compiled_sequence_parallelism_is_eager() -> None:
    """Oracle: the eager model on the same ranks; full graphs, so a break raises."""
    assert_compiled(each(2, "compiled"), [("tensorwise", "float8 sp")])


COMPILED = [
    (recipe, style)
    for recipe in ("tensorwise", "rowwise", "delayed", "rowwise_with_gw_hp")
    for style in STYLES
    if recipe != "delayed" or style in ("float8", "float8 sp")  # else amaxes would be DTensors: refused
    if recipe != "rowwise_with_gw_hp"
    or style in ("torch", "torch sp", "float8")  # else refused, see the errors
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_plans_are_eager(backend: str) -> None:
    """Oracle: the eager model on the same ranks, every recipe and plan that is not refused."""
    cases = COMPILED if backend == "aot_eager" else [c for c in COMPILED if c[0] == "tensorwise"]
    assert_compiled(ranks.run(worker.compiled, 2, cases, backend, timeout_s=1500), cases)
