"""A trial against a sweep: bf16 of a converted model is bf16, and both give the same ratio. Bars: the A/A noise floors.

On a machine whose cores others use too the floors are far above 1.1, and then neither is judged.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from train_cases import QUICK, execute

import harness
from fp8core import PrecisionSchedule, convert_to_float8_training
from harness import ab
from harness.store.compare import paired_ratios
from harness.training.batches import corpus_of, microbatches_of
from harness.training.setup import Setup, prepare
from harness.training.timed import STEPS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.benchmark_bar
NOISY = 1.10  # a floor above it decides nothing
SIZE = {"batch": 2, "seq": 32}
ROUNDS = 10
TIMING = replace(QUICK, min_rounds=ROUNDS, max_rounds=ROUNDS, max_seconds=600.0, block_ms=40.0)


def batches(model: str) -> list[list[tuple[torch.Tensor, ...]]]:
    text: Any = corpus_of(model, "stdlib", "")
    return [
        microbatches_of(model, text, step, 0, (1, SIZE["batch"], SIZE["seq"]), "cpu") for step in range(STEPS)
    ]


def judged(floor: float) -> float:
    if not floor <= NOISY:
        pytest.skip(f"could not judge: two copies of bf16 seem up to {floor:.3f}x apart here")
    return floor


def test_held_in_bf16_a_converted_model_is_as_fast_as_a_plain_one() -> None:
    """Whole steps of `nano` (9 Linear layers), float32: no arithmetic is converted, so only Python's own work differs."""
    setup = Setup("nano", **SIZE, compute="fp32", vocab_size=256)
    plain, held = prepare(setup, "cpu"), prepare(setup, "cpu")
    convert_to_float8_training(held.model)
    assert PrecisionSchedule.parse("keep_bf16").apply(held.model, 0, 1) == 9
    text = batches("nano")
    for step in range(3):  # bit for bit, with what the optimizer makes of it
        assert torch.equal(plain.step(text[step]), held.step(text[step]))
    for mine, theirs in zip(held.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    found = harness.measure(
        {"plain": lambda: plain.step(text[0]), "held": lambda: held.step(text[0])},
        rounds=ROUNDS,
        device="cpu",
    )
    effect = found["held"]
    print(
        f"\nheld in bf16 against nn.Linear: {effect.speedup:.4f}x ({math.exp(-effect.log_high):.4f} to "
        f"{math.exp(-effect.log_low):.4f}), {effect.rounds} rounds, floor {found.floor:.4f}x"
    )
    floor = judged(found.floor)
    # The interval may reach out of the floor; a ratio known to lie outside of it would not
    assert math.exp(-effect.log_low) >= 1 / floor
    assert math.exp(-effect.log_high) <= floor


def test_a_trial_gives_the_ratio_of_the_sweep(tmp_path: Path) -> None:
    """The same model, weights, batches, recipe and optimizer, by `ab.Trial` in a loop and by sweep=train."""
    arms = ["bf16_eager", "tensorwise_eager"]
    frame = execute(tmp_path, arms, timing=TIMING, control=True, compute="fp32", **SIZE)
    (swept,) = paired_ratios(frame).to_dict("records")
    trainee = prepare(Setup("nano", **SIZE, compute="fp32", vocab_size=256), "cpu")
    text = batches("nano")
    trial = ab.Trial(trainee.model, "tensorwise", steps=7 + 15 * ROUNDS)
    for step in range(trial.plan.steps):
        with trial.step():
            trial.loss(trainee.step(text[step % STEPS]))
    result = trial.result()
    assert result.proved, result.doubt
    apart = abs(math.log(result.effect.speedup / swept["speedup"]))
    floor = max(judged(result.floor), judged(swept["floor"]))
    print(
        f"\nab.Trial {result.effect.speedup:.4f}x ({math.exp(-result.effect.log_high):.4f} to "
        f"{math.exp(-result.effect.log_low):.4f}, floor {result.floor:.4f}x), sweep=train {swept['speedup']:.4f}x "
        f"({swept['low']:.4f} to {swept['high']:.4f}, floor {swept['floor']:.4f}x): {math.expm1(apart):.2%} apart"
    )
    # Each ratio is uncertain by its own interval, beside the floor
    own = [
        (result.effect.log_high - result.effect.log_low) / 2,
        math.log(swept["high"] / swept["low"]) / 2,
    ]
    assert apart <= math.log(floor) + math.hypot(*own)


def test_a_held_layer_costs_microseconds() -> None:
    """Forward of one layer of 16x16, where nothing but dispatch takes time."""
    plain = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    held = convert_to_float8_training(copy.deepcopy(plain))
    PrecisionSchedule.parse("keep_bf16").apply(held, 0, 1)
    x = torch.randn(16, 16, requires_grad=True)
    found = harness.measure(
        {"plain": lambda: plain(x), "held": lambda: held(x)},
        timing=TIMING,
        device="cpu",
    )
    frame = found.to_frame()
    more_us = 1e3 * (frame.loc["held", "median_ms"] - frame.loc["plain", "median_ms"])
    print(f"\na held layer: {more_us:.2f} us more a forward pass; floor {found.floor:.3f}x")
    assert more_us < 10
