"""A step's time. Oracles: the closed form 6 MNK / P + b (MK + KN + MN) / BW of a linear, and sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from advise_fixtures import NOTHING, SIX, model, round_h200

from harness.advise.casts import CastCost
from harness.advise.layer import layer_cost
from harness.advise.model import GroupExchange, VectorTraffic, split
from harness.advise.step import (
    Pass,
    as_sent,
    pipeline,
    step_cost,
    step_ratio,
)
from harness.advise.trace import trace
from harness.store.errors import UsageError
from harness.training.models import resolve
from harness.training.step import Step

RATES = round_h200()
BARE = Step(compiled=True)


def test_amdahl_by_hand() -> None:
    """1 ms of attention and 2 ms between the products are the same on both sides."""
    one = model(("x", 4096, 4096), attention=RATES["attention"] * 1e-3 / 3)
    one = replace(
        one,
        parameters=0,
        forward=VectorTraffic(0.0, 1e-3 * RATES["bandwidth"], 0, 0),
        backward=replace(NOTHING, fused_bytes=4e9),
    )
    cost = layer_cost(one.layers[0], SIX, RATES)
    bf16, fp8 = step_cost(one, RATES, BARE, None), step_cost(one, RATES, BARE, SIX, ["x"])
    assert bf16.attention == fp8.attention == pytest.approx(1e-3)
    assert bf16.between == fp8.between == pytest.approx(2e-3)
    assert bf16.total == pytest.approx(sum(cost.bf16.values()) + 3e-3)
    assert fp8.total == pytest.approx(sum(cost.fp8.values()) + sum(cost.casts.values()) + 3e-3)
    assert step_ratio(one, RATES, BARE, SIX, ["x"]) == pytest.approx(bf16.total / fp8.total)
    assert step_cost(one, RATES, BARE, SIX, []) == bf16, "nothing converted is bf16"


def test_tensor_parallel_exchanges_are_exposed_unless_they_overlap() -> None:
    """1 GB gathered forward and scattered backward, on 2 GPUs half of it each; in FP8 the gather takes half."""
    one = replace(model(("x", 4096, 4096)), exchanges=(GroupExchange(1e9, ("x",), True),))
    plan = replace(BARE, tp=2)
    each = 1e9 / 2 / RATES["link"] + 8.4e-6 + 3.4e-6
    assert step_cost(one, RATES, plan, None).communication == pytest.approx(2 * each)
    halved = replace(plan, tp_gather_fp8=True)
    sends = replace(SIX, gathered_weight=CastCost(6.0))
    sent = step_cost(one, RATES, halved, sends, ["x"]).communication
    assert sent == pytest.approx(1.5 * each, rel=0.05), "and two amaxes"
    cannot = step_cost(one, RATES, halved, SIX, ["x"]).communication
    assert cannot == pytest.approx(2 * each, rel=0.05), (
        "scales of rows or blocks are not known before it is sent"
    )
    times = layer_cost(one.layers[0], SIX, RATES).bf16
    overlapped = step_cost(one, RATES, replace(plan, tp_overlap=True), None).communication
    assert overlapped == pytest.approx(2 * each - times["output"] - times["grad_input"])
    blind = replace(SIX, fuses_gathers=False)
    fp8 = layer_cost(one.layers[0], blind, RATES).fp8
    some = step_cost(one, RATES, replace(plan, tp_overlap=True), blind, ["x"]).communication
    assert some == pytest.approx(2 * each - fp8["grad_input"], rel=0.05), (
        "only the scatter hides; and two amaxes"
    )


RATES = round_h200()
ONE = replace(model(("x", 16384, 16384)), parameters=500_000_000, blocks=10)


def test_a_pipeline_idles_while_it_fills_and_drains() -> None:
    """1F1B: (p - 1) of m microbatches; interleaved with v parts a GPU: 1/v of that. Activations go by InfiniBand."""
    plan = Step(compiled=True, pp=8, dp=8, accumulation=32)
    once = 2 * ONE.tokens * 16384 / RATES["network"]
    busy = Pass(0.1, 0.2)
    assert pipeline(ONE, RATES, plan, busy) == pytest.approx(7 * 0.3 + 2 * 7 * once)
    two = pipeline(ONE, RATES, replace(plan, virtual=2), busy)
    assert two == pytest.approx(7 * 0.3 / 2 + 2 * 15 * once)
    assert pipeline(ONE, RATES, Step(compiled=True), busy) == 0
    slow = pipeline(ONE, RATES, plan, Pass(0.0, 0.0))
    assert slow == pytest.approx(2 * (7 + 32) * once), "nothing hides what goes between stages"


def test_what_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"a layer 'blocks\.0\.router', whose split is not known"):
        split(model(("blocks.0.router", 64, 8)), 2)
    with pytest.raises(UsageError, match="tp=3 does not divide q, whose 64 features"):
        split(model(("q", 64, 64)), 3)
    with pytest.raises(UsageError, match="whose 50257 features"):
        split(trace(resolve("gpt2"), 1, 64), 2)


def test_a_split_model_of_more_tokens_sends_as_much_more() -> None:
    """Oracle: the model of more tokens, split."""
    whole = model(("q", 64, 64), ("o", 64, 64))
    more = 4 * whole.tokens
    assert split(whole, 2).with_tokens(more).exchanges == split(whole.with_tokens(more), 2).exchanges != ()


def test_a_cast_before_the_gather_is_of_a_shard() -> None:
    """Oracle: by hand; of 5 bytes an element a GPU moves those of its shard, and codes are transposed whole."""
    sends, plan = (
        replace(SIX, gathered_weight=CastCost(5.0, 2.0)),
        Step(compiled=True, dp=64, gather_fp8=True),
    )
    weight = as_sent(sends, plan).casts["weight"]
    assert (weight.streamed, weight.strided) == (5 / 64, 2.0)
    assert as_sent(sends, replace(plan, replicas=8)).casts["weight"].streamed == 5 / 8
    for kept in (replace(plan, gather_fp8=False), replace(plan, dp=1)):
        assert as_sent(sends, kept) == sends
    assert as_sent(SIX, plan) == SIX
