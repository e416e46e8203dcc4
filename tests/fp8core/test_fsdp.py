"""FSDP2 that gathers weights as FP8 codes. Oracle: the same run that gathers them in high precision, bit for bit.

What each rank runs is in `sharding.py`; one launch for each number of ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import sharding
import torch
from parallel_models import several
from sharding import Setting

from harness.machine import ranks

WORLDS = tuple(
    pytest.param(world, marks=[] if world in (2, 3) else pytest.mark.slow) for world in (1, 2, 3, 4, 8)
)
UNEVEN = (48, 50, 7, 33)  # no dimension that 2, 3 or 8 divides, and fewer rows than 8 ranks
OPTIONS = {
    "gathered weights stay after the forward pass": Setting(reshard=False),
    "activation checkpointing": Setting(recompute=True),
    "gradient accumulation": Setting(sizes=UNEVEN, micro=3),
    "kept casts": Setting(micro=2, keep_casts=True, reshard=False),
    "kept casts of freed weights": Setting(micro=2, keep_casts=True),
    "gradient clipping": Setting(sizes=UNEVEN, clip=0.01),
    "CPU offload": Setting(sizes=UNEVEN, offload=True, bias=True),
    "tied weights": Setting(sizes=(64, 64, 64), tied=True),
    "tied weights, delayed": Setting("delayed", sizes=(64, 64, 64), tied=True, steps=3),
    "meta device": Setting(sizes=UNEVEN, meta=True, bias=True),
    "sharded along the other dimension": Setting(placement=1),
    "blocks across the other dimension": Setting("blockwise", sizes=(300, 64), placement=1),
    "casts by operators": Setting(kernels="always"),
    "FP8 matmul": Setting(emulate=False),
    "bfloat16 masters": Setting(sizes=UNEVEN, dtype="bfloat16"),
    "mixed precision": Setting(sizes=UNEVEN, param_dtype="bfloat16", bias=True),
    "fused optimizer": Setting(fused=True),
    "schedule": Setting(sizes=UNEVEN, schedule="warmup_bf16:1step,cooldown_bf16:1step", steps=4),
    "schedule of one GEMM": Setting(schedule="warmup_bf16:1step@grad_input"),
}
HSDP = {"HSDP": Setting(replicas=2), "HSDP, uneven": Setting("delayed", sizes=UNEVEN, replicas=2, steps=3)}


def drawn(world: int) -> list[Setting]:
    """Shapes, recipes and dtypes at random, the same ones in every session."""
    draw = random.Random(world)
    return [
        Setting(
            recipe,
            sizes=tuple(draw.randint(1, 300) for _ in range(draw.randint(2, 4))),
            bias=draw.random() < 0.5,
            param_dtype=draw.choice((None, "bfloat16")),
            reshard=draw.random() < 0.5,
        )
        for recipe in ("tensorwise", "blockwise", draw.choice(("delayed", "static")))
    ]


@cache
def ran(world: int) -> list[dict[Any, Any]]:
    """[rank][task], of one launch."""
    more = {2: OPTIONS, 4: HSDP}.get(world, {})
    settings = [Setting(), Setting(sizes=UNEVEN, micro=2), *drawn(world), *more.values()]
    tasks: dict[Any, Any] = {"compared": (sharding.compare, (settings,))}
    if world == 2:
        tasks |= {keep: (sharding.gathered_codes, (keep,)) for keep in (False, True)}
    return ranks.run(several, world, tasks)


def trained(world: int) -> list[list[dict[str, Any]]]:
    """[rank][setting]: `sharding.compare` of all that is tried with this number of ranks."""
    return [rank["compared"] for rank in ran(world)]


@pytest.mark.parametrize("world", WORLDS)
def test_losses_gradients_and_weights_are_the_same_bits(world: int) -> None:
    for rank, results in enumerate(trained(world)):
        for result in results:
            assert not result["differs"], f"rank {rank}: {result['setting']}"
            assert len(set(result["losses"])) == len(result["losses"]) > 1


@pytest.mark.parametrize("world", WORLDS[1:])
def test_bytes_are_a_quarter_and_scales_take_one_all_reduce(world: int) -> None:
    """Counted at the collective; without biases, which are gathered as they are."""
    for results in trained(world):
        for result in results:
            setting: Setting = result["setting"]
            if setting.bias or setting.schedule:
                continue
            high, fp8 = result["gathered"]
            dtype = setting.param_dtype or setting.dtype
            assert set(high) == {dtype}
            assert fp8 == {"uint8": high[dtype] // getattr(torch, dtype).itemsize}, setting
            assert result["scale_reductions"] == [1] * setting.steps, setting


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_are_those_of_one_process(world: int) -> None:
    """Oracle: one process that sees the data of all ranks; the order of sums differs."""
    for result in trained(world)[0]:
        setting: Setting = result["setting"]
        if (
            setting.param_dtype
            or setting.dtype != "float32"
            or setting.meta
            or setting.schedule
            or setting.clip
        ):
            continue
        oracle = sharding.alone(setting, world)
        for index, expected in enumerate(oracle):
            got = torch.tensor(result["gradients"][index])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, msg=str(setting))


@pytest.mark.slow
def test_compiled_blocks_give_the_same_bits() -> None:
    """Each layer one whole graph, which takes the gathered codes as input; delayed amaxes are noted between its two passes."""
    settings = [Setting(compiled=True), Setting("delayed", compiled=True)]
    for results in ranks.run(sharding.compare, 2, settings):
        for result in results:
            assert not result["differs"]
            assert list(result["gathered"][1]) == ["uint8"]


def test_a_schedule_gathers_in_high_precision_while_it_holds_back() -> None:
    names = list(OPTIONS)
    results = trained(2)[0][-len(names) :]
    schedule = results[names.index("schedule")]
    high, mixed = schedule["gathered"]
    assert schedule["scale_reductions"] == [0, 1, 1, 0]
    assert mixed == Counter({"float32": high["float32"] // 2, "uint8": high["float32"] // 8})
    assert results[names.index("schedule of one GEMM")]["scale_reductions"] == [0, 1]


def test_codes_that_stay_gathered_travel_once_a_window() -> None:
    """Oracle: the run that gathers anew in each pass: the same losses and gradients bit for bit, six times the bytes (three
    microbatches, forward and backward)."""
    freed, kept = ran(2)[0][False], ran(2)[0][True]
    assert kept[:2] == freed[:2]
    assert set(kept[2]) == {"uint8"}
    assert freed[2]["uint8"] == 2 * sharding.MICROBATCHES * kept[2]["uint8"]
