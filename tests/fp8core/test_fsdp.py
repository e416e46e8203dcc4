"""FSDP2 that gathers weights as FP8 codes. Oracle: the same run that gathers them in high precision, bit for bit."""

from __future__ import annotations

import random

import pytest
import sharding
import torch
from on_ranks import on_ranks
from sharding import Setting

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


@pytest.mark.parametrize("world", WORLDS)
@on_ranks(2)
def test_gathered_codes_change_no_bit(world: int) -> None:
    """Losses, gradients and weights; and, as sums are in another order, the gradients of one process that sees the data of
    all ranks, closely. Counted at the collective without biases, which are gathered as they are: a quarter of the bytes, and
    one all-reduce a step for the scales."""
    more = {2: OPTIONS, 4: HSDP}.get(world, {})
    for setting in (Setting(), Setting(sizes=UNEVEN, micro=2), *drawn(world), *more.values()):
        high, fp8 = (sharding.train(setting, fp8) for fp8 in (False, True))
        assert not fp8.differs_from(high), setting
        assert len(set(fp8.losses)) == len(fp8.losses) > 1
        dtype = setting.param_dtype or setting.dtype
        if world > 1 and not (setting.bias or setting.schedule):
            assert set(high.gathered) == {dtype}
            assert fp8.gathered == {"uint8": high.gathered[dtype] // getattr(torch, dtype).itemsize}, setting
            assert fp8.scale_reductions == [1] * setting.steps, setting
        if dtype == "float32" and not (setting.meta or setting.schedule or setting.clip):
            for got, expected in zip(fp8.gradients, sharding.alone(setting, world), strict=False):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, msg=str(setting))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@on_ranks(2)
def test_compiled_blocks_give_the_same_bits(recipe: str) -> None:
    """Each layer one whole graph, which takes the gathered codes as input; delayed amaxes are noted between its two passes."""
    high, fp8 = (sharding.train(Setting(recipe, compiled=True), fp8) for fp8 in (False, True))
    assert not fp8.differs_from(high)
    assert list(fp8.gathered) == ["uint8"]


@on_ranks(2)
def test_a_schedule_gathers_in_high_precision_while_it_holds_back() -> None:
    high, mixed = (sharding.train(OPTIONS["schedule"], fp8) for fp8 in (False, True))
    assert mixed.scale_reductions == [0, 1, 1, 0]
    size = high.gathered["float32"]
    assert mixed.gathered == {"float32": size // 2, "uint8": size // 8}
    assert sharding.train(OPTIONS["schedule of one GEMM"], True).scale_reductions == [0, 1]


@on_ranks(2)
def test_codes_that_stay_gathered_travel_once_a_window() -> None:
    """Oracle: the run that gathers anew in each pass: the same losses and gradients bit for bit, six times the bytes (three
    microbatches, forward and backward)."""
    (*freed, anew), (*kept, once) = (sharding.gathered_codes(keep) for keep in (False, True))
    assert kept == freed
    assert set(once) == {"uint8"}
    assert anew["uint8"] == 2 * sharding.MICROBATCHES * once["uint8"]
