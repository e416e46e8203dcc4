"""What is sent and not hidden. Oracles: bytes over bandwidths by hand, pass by pass; the bubble of arXiv:2104.04473."""

from __future__ import annotations

from dataclasses import replace

import pytest
from advise_fixtures import SIX, model, round_h200

from harness.advise import decide
from harness.advise.casts import CastCost
from harness.advise.model import Exchange
from harness.advise.plan import Plan
from harness.advise.rates import rates_of
from harness.advise.step import Pass, as_sent, pipeline, sharding, step_cost
from harness.machine.hardware import named

RATES = round_h200()
ONE = replace(model(("x", 16384, 16384)), parameters=500_000_000, blocks=10)
PLAN = Plan(dp=8, update_bytes=0.0, copied=False)
HOPS = 8.4e-6 + 7 * 3.4e-6  # a ring of eight: its start and seven steps
GATHER = 1e9 * 7 / 8 / RATES["link"] + 11 * HOPS
REDUCE = 2e9 * 7 / 8 / RATES["link"] + 11 * HOPS


def exposed(busy: Pass, plan: Plan = PLAN) -> float:
    return sharding(ONE, RATES, plan, busy)


def test_each_pass_hides_its_own_sends_and_no_other() -> None:
    """A long backward pass does not hide what the forward pass waits for; pooled over the step it would have."""
    ends = (GATHER + REDUCE) / 11
    assert exposed(Pass(1.0, 2.0)) == pytest.approx(ends)
    assert exposed(Pass(0.0, 2.0)) == pytest.approx(GATHER + REDUCE / 11), "the forward gather is in the open"
    assert exposed(Pass(1.0, 0.0)) == pytest.approx(GATHER / 11 + GATHER + REDUCE)
    assert exposed(Pass(0.0, 0.0)) == pytest.approx(2 * GATHER + REDUCE)


def test_the_reduction_hides_behind_the_last_backward_pass_alone() -> None:
    """Three microbatches, each backward pass as long as a gather: three first gathers, and the one reduction whole."""
    three = replace(PLAN, accumulation=3)
    assert exposed(Pass(1.0, GATHER), three) == pytest.approx(3 * GATHER / 11 + REDUCE)
    each = exposed(Pass(1.0, GATHER), replace(three, reduce_each=True))
    assert each == pytest.approx(3 * (GATHER / 11 + REDUCE))


def test_a_step_that_waits_for_its_weights_takes_as_long_as_they_do() -> None:
    """Copies and tensor parallelism's exchanges keep the GPU busy while weights arrive: they are no time on top."""
    few = replace(ONE, layers=tuple(replace(la, tokens=256) for la in ONE.layers), tokens=256)
    bare = step_cost(few, RATES, PLAN, None)
    copied = step_cost(few, RATES, replace(PLAN, copied=True), None)
    assert bare.total == pytest.approx(2 * GATHER + REDUCE)
    assert copied.total == pytest.approx(bare.total), "3.5 ms of copies lie within 12 ms of sending"
    plan = replace(PLAN, tp=2, exchanges=(Exchange(1e8, ("x",), True),))
    alone = replace(plan, exchanges=())
    assert step_cost(few, RATES, plan, None).total == pytest.approx(step_cost(few, RATES, alone, None).total)


def test_a_cast_before_the_gather_is_of_a_shard() -> None:
    sends = replace(SIX, gathered_weight=CastCost(5.0, 2.0))
    assert as_sent(sends, replace(PLAN, dp=64)).casts["weight"].streamed == 5 / 64
    assert as_sent(sends, replace(PLAN, dp=64, replicas=8)).casts["weight"].streamed == 5 / 8
    assert as_sent(sends, replace(PLAN, gather_fp8=False)) == sends
    assert as_sent(sends, replace(PLAN, dp=1)) == sends
    assert as_sent(SIX, PLAN) == SIX


def test_a_pipeline_idles_while_it_fills_and_drains() -> None:
    """1F1B: (p - 1) of m microbatches; interleaved with v parts a GPU: 1/v of that. Activations go by InfiniBand."""
    plan = Plan(pp=8, dp=8, accumulation=32)
    once = 2 * ONE.tokens * 16384 / RATES["network"]
    busy = Pass(0.1, 0.2)
    assert pipeline(ONE, RATES, plan, busy) == pytest.approx(7 * 0.3 + 2 * 7 * once)
    two = pipeline(ONE, RATES, replace(plan, virtual=2), busy)
    assert two == pytest.approx(7 * 0.3 / 2 + 2 * 15 * once)
    assert pipeline(ONE, RATES, Plan(), busy) == 0
    slow = pipeline(ONE, RATES, plan, Pass(0.0, 0.0))
    assert slow == pytest.approx(2 * (7 + 32) * once), "nothing hides what goes between stages"


def test_the_gather_in_fp8_is_chosen_where_it_gains() -> None:
    """A step that waits for its weights gains by half the bytes of them; one GPU, or rows' scales, gather none in FP8."""
    few = replace(ONE, layers=tuple(replace(la, tokens=2048) for la in ONE.layers), tokens=2048)
    sends = replace(SIX, gathered_weight=CastCost(5.0, 2.0))
    found = decide.advise(few, RATES, PLAN, sends, "", None)
    off = decide.advise(few, RATES, PLAN, sends, "", False)
    assert found.fp8_all_gather
    assert not off.fp8_all_gather
    assert found.step.value > off.step.value
    for other in (
        decide.advise(few, RATES, PLAN, SIX, "", None),
        decide.advise(few, RATES, Plan(), sends, "", None),
    ):
        assert not other.fp8_all_gather


def test_a_layer_says_that_the_step_waits_for_communication() -> None:
    """Few tokens between nodes: products are a tenth of the time, and FP8 that sends bf16 gains nothing."""
    few = replace(ONE, layers=tuple(replace(la, tokens=4096) for la in ONE.layers), tokens=4096)
    many = replace(PLAN, dp=64, tp=2, exchanges=(Exchange(1e7, ("x",), True),))
    found = decide.advise(few, rates_of(named("h100")), many, SIX)
    assert [a.reason for a in found.layers] == ["no: the step waits for communication"]
    assert found.layers[0].ratio.low > 1
