"""Tensor and sequence parallelism on gloo, 2 and 4 processes.

Oracles: the same model in one process (outputs, the gradient of the input and of every parameter); for rowwise scales a
model in one process cut into layers as the ranks' parts are; torchao's styles in the same run; counts of collectives.
What ran is in `tensor_parallel_worker.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensor_parallel_worker as worker
import torch
from parallel_models import mlp

from fp8core import RECIPES, Recipe, async_tp_reason, check_plan
from harness import ranks

BOUND = 1e-6  # relative, of issue 5: sums of float32 in another order, codes equal
SMALL, LARGE = (32, 64), (128, 512)  # dim, hidden; blocks of 128 need the larger
STYLES = ("torch", "torch sp", "float8", "float8 sp", "float8 sp shared")
Errors = dict[str, dict[str, float] | str]


def in_float32(name: str) -> Recipe:
    return RECIPES[name] if name == "tensorwise" else RECIPES[name].emulated()


def cases() -> list[tuple[str, Any, str, tuple[int, int, bool], int]]:
    """Every style for every recipe; delayed scaling for three steps, so that its scales move."""
    made = []
    for recipe in ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"):
        size = LARGE if recipe in ("blockwise", "mxfp8") else SMALL
        for style in STYLES:
            for bias in (True, False) if recipe == "tensorwise" else (True,):
                name = f"{recipe}/{style}/{'bias' if bias else 'no bias'}"
                made.append((name, in_float32(recipe), style, (*size, bias), 3 if recipe == "delayed" else 1))
    return made


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> list[Errors]:
    return ranks.run(worker.against_one_process, request.param, cases())


def errors_of(found: list[Errors], case: str) -> list[dict[str, float]]:
    """Of each rank; fails where a rank refused the case."""
    got = []
    for rank in found:
        answer = rank[case]
        assert isinstance(answer, dict), answer
        got.append(answer)
    return got


@pytest.mark.parametrize("bias", ["bias", "no bias"])
@pytest.mark.parametrize("style", STYLES)
def test_tensorwise_equals_one_process(found: list[Errors], style: str, bias: str) -> None:
    """Output and all gradients, with sequence parallelism and FP8 all-gathers too."""
    for rank in errors_of(found, f"tensorwise/{style}/{bias}"):
        assert len(rank) == (8 if bias == "bias" else 5)
        assert max(rank.values()) <= BOUND, rank


@pytest.mark.parametrize("style", ["float8", "float8 sp"])
def test_delayed_equals_one_process(found: list[Errors], style: str) -> None:
    """In its third step, with amaxes of the second in use; Float8 styles only."""
    for rank in errors_of(found, f"delayed/{style}/bias"):
        assert max(rank.values()) <= BOUND, rank


@pytest.mark.parametrize("style", ["torch", "torch sp", "float8"])
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_blocks_within_parts_equal_one_process(found: list[Errors], recipe: str, style: str) -> None:
    """Parts of 128 and 256 features hold whole blocks, so each block's scale is the single process's."""
    for rank in errors_of(found, f"{recipe}/{style}/bias"):
        assert max(rank.values()) <= BOUND, rank


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


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_rowwise_scales_its_parts(world: int, power_of_two: bool) -> None:
    """<= 1e-6 against one scale for each part of a row; further from one process's scales for whole rows, and as near to
    float32 as these are. Features of very different magnitudes, so that the two do differ."""
    for rank in ranks.run(worker.rowwise_scales, world, worker.custom(power_of_two), 3.0):
        for style in ("float8", "float8 sp", "float8 sp shared"):
            assert max(rank[style].values()) <= BOUND, rank[style]
            globally = rank[f"{style}: against global scales"]
            assert max(globally.values()) > BOUND
            for name, error in rank[f"{style}: against float32"].items():
                # two independent roundings of the same values: within a tenth of each other
                assert error <= 1.1 * rank[f"{style}: one process against float32"][name] + BOUND


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathers_one_byte_an_element(world: int, dtype: torch.dtype) -> None:
    """Counted at the collectives: half of bfloat16, a quarter of float32, scales apart."""
    tokens, dim = 2 * 32, 32
    part = tokens * dim // world
    size, name = dtype.itemsize, str(dtype).removeprefix("torch.")
    for rank in ranks.run(worker.collectives, world, RECIPES["tensorwise"], dtype):
        calls, sizes = rank["torch sp"]
        assert calls[f"allgather {name}"] == 2  # input forward, grad_output backward
        assert sizes[f"allgather {name}"] == 2 * part * size
        assert "allgather uint8" not in calls
        calls, sizes = rank["float8 sp shared"]
        assert (calls["allgather uint8"], sizes["allgather uint8"]) == (2, 2 * part)
        assert f"allgather {name}" not in calls
        assert rank["float8 sp"][1]["allgather uint8"] == 3 * part  # each of the two readers gathers
        # amaxes: gate and up one each way, down its input and weight in one; the shared input and grad_output one each
        assert rank["float8"][0]["allreduce int32"] == 5
        assert rank["float8 sp shared"][0]["allreduce int32"] == 7
        assert rank["float8 sp shared"][1]["allreduce int32"] == 4 * 8  # eight amaxes in seven calls


def test_delayed_scaling_needs_no_amax_of_others() -> None:
    """Rowwise neither; both are the recipes for slow networks."""
    for rank in ranks.run(worker.collectives, 2, in_float32("rowwise"), torch.float32):
        assert "allreduce int32" not in rank["float8"][0]
        assert rank["float8 sp shared"][1]["allgather uint8"] == 2 * 64 * 32 // 2  # one for both readers
        assert rank["float8 sp"][1]["allgather uint8"] == 2 * 2 * 64 * 32 // 2  # two readers, two casts each


def test_a_nan_on_one_rank_reaches_all() -> None:
    """Tensorwise, one NaN makes all of its tensor NaN, as in one process."""
    assert ranks.run(worker.nan_on_one_rank, 2) == [[True] * 3] * 2


def test_equals_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same losses and gradients as torchao's layers and styles, without more collectives."""
    pytest.importorskip("torchao")
    monkeypatch.setenv("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    for rank in ranks.run(worker.beside_torchao, 2):
        for style in ("torch", "float8"):
            assert max(rank[style]["errors"].values()) <= BOUND, rank[style]
            calls = rank[style]["calls"]
            assert sum(calls["ours"].values()) <= sum(calls["torchao"].values())


def test_never_asks_whether_a_dtensor_is_pinned() -> None:
    """As on torch 2.11, where `aten.is_pinned` has no sharding strategy (reference: platform.md, section 4)."""
    for rank in ranks.run(worker.without_is_pinned, 2):
        *losses, refused = rank
        assert all(map(math.isfinite, losses))
        assert refused == 1.0


def test_bad_plans_are_refused() -> None:
    """Each says what is at fault and the way out; no rank waits for another."""
    wanted = {
        "not converted": "up: Float8ColwiseParallel: Linear is no Float8Linear (left out by module_filter_fn)",
        "multiple of 16": "up: Float8ColwiseParallel, cut column-wise over 2 ranks: N = 24",
        "uneven": "out_features=33 cannot be cut column-wise over 2 ranks: 33 / 2 is no whole number",
        "uneven, torch": "in_features=33 cannot be cut row-wise over 2 ranks",
        "block": "would cut a block; expected a multiple of 128",
        "no such name": "no module is named like 'upp'",
        "twice": "the weight is a DTensor already",
        "convert late": "convert_to_float8_training first, then parallelize_module, then fully_shard",
        "convert after fsdp": "convert_to_float8_training first, then parallelize_module, then fully_shard",
        "tp after fsdp": "is sharded by FSDP already; convert_to_float8_training first",
        "style after fsdp": "the weight is a DTensor already",
        "wrong layout": "it is cut column-wise, so it takes (R,)",
        "features gathered": "an FP8 all-gather takes whole tokens",
        "float8_dtype": "pass float8_dtype=torch.float8_e4m3fn",
        "no reader": "holds no Float8Linear",
        "readers differ": "cast their inputs differently",
        "cast for another layer": "expected [..., 64]",
    }
    for rank in ranks.run(worker.refusals, 2):
        assert rank.keys() == wanted.keys()
        for case, text in wanted.items():
            assert text in rank[case], (case, rank[case])


def test_plan_wants_a_flat_mesh() -> None:
    """Before any process group is needed."""

    class Square:
        ndim = 2

    square: Any = Square()
    with pytest.raises(ValueError, match=r"mesh of one dimension, got 2; pass mesh\['tp'\]"):
        check_plan(mlp("tensorwise"), square, {})


def test_async_tensor_parallelism_is_not_pretended() -> None:
    assert "unsupported here: it needs NVIDIA GPUs, not cpu" in (async_tp_reason("cpu") or "")
