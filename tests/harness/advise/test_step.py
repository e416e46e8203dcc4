"""A step's time. Oracles: the closed form 6 MNK / P + b (MK + KN + MN) / BW of a linear, and sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from advise_fixtures import NOTHING, SIX, model, round_h200

from harness.advise.casts import CastCost, RecipeCost
from harness.advise.layer import layer_cost
from harness.advise.model import Exchange, Linear, Traffic
from harness.advise.plan import Recompute
from harness.advise.rates import rates_of
from harness.advise.step import (
    Plan,
    both_steps,
    speedup,
    step_cost,
    step_ratio,
    with_interval,
)
from harness.machine.hardware import named

RATES = round_h200()
BARE = Plan(update_bytes=0.0)


def flat(recipe: RecipeCost, b: float) -> RecipeCost:
    return replace(recipe, casts={t: CastCost(b, kernels=0) for t in recipe.casts})


# GEMM + cast speedup of one linear at M = 16384 by the closed form, for casts of 6 and 4 bytes an element
@pytest.mark.parametrize(
    ("K", "N", "six", "four"),
    [
        (4096, 4096, 1.41, 1.49),
        (4096, 1024, 1.18, 1.30),
        (4096, 14336, 1.49, 1.54),
        (8192, 8192, 1.52, 1.56),
        (768, 768, 0.89, 1.06),
        (768, 2304, 1.05, 1.20),
        (768, 3072, 1.08, 1.22),
    ],
)
def test_layers_of_the_table_of_break_even(K: int, N: int, six: float, four: float) -> None:
    """The table leaves out that results are written, which takes both sides longer: ours lies nearer to 1 by that."""
    layer = Linear("x", K, N, 16384, 0)
    for b, expected in ((6.0, six), (4.0, four)):
        cost = layer_cost(layer, flat(SIX, b), RATES)
        written = 2 * (16384 * (K + N) + K * N) / RATES["bandwidth"]
        bf16, fp8 = sum(cost.bf16.values()) - written, sum(cost.fp8.values()) - written
        assert bf16 / (fp8 + sum(cost.casts.values())) == pytest.approx(expected, abs=0.006)
        assert min(1.0, expected) - 0.01 <= cost.speedup <= max(1.0, expected) + 0.01


def test_amdahl_by_hand() -> None:
    """1 ms of attention and 2 ms between the products are the same on both sides."""
    one = model(("x", 4096, 4096), attention=RATES["attention"] * 1e-3 / 3)
    one = replace(
        one, forward=Traffic(0.0, 1e-3 * RATES["bandwidth"], 0, 0), backward=replace(NOTHING, fused_bytes=4e9)
    )
    cost = layer_cost(one.layers[0], SIX, RATES)
    bf16, fp8 = step_cost(one, RATES, BARE, None), step_cost(one, RATES, BARE, SIX, ["x"])
    assert bf16.attention == fp8.attention == pytest.approx(1e-3)
    assert bf16.between == fp8.between == pytest.approx(2e-3)
    assert bf16.total == pytest.approx(sum(cost.bf16.values()) + 3e-3)
    assert fp8.total == pytest.approx(sum(cost.fp8.values()) + sum(cost.casts.values()) + 3e-3)
    assert step_ratio(one, RATES, BARE, SIX, ["x"]) == pytest.approx(bf16.total / fp8.total)
    assert step_cost(one, RATES, BARE, SIX, []) == bf16, "nothing converted is bf16"


def test_a_shared_cast_is_paid_once_and_a_filtered_layer_pays_none() -> None:
    shared = model(("q", 4096, 4096), ("k", 4096, 1024))
    shared = replace(shared, layers=tuple(replace(layer, input_id=0) for layer in shared.layers))
    casts = [layer_cost(layer, SIX, RATES).casts for layer in shared.layers]
    both = step_cost(shared, RATES, BARE, SIX, ["q", "k"]).casts
    assert both == pytest.approx(sum(sum(c.values()) for c in casts) - casts[1]["input"])
    unshared = replace(SIX, shares_input=False)
    assert step_cost(shared, RATES, BARE, unshared, ["q", "k"]).casts == pytest.approx(
        sum(sum(c.values()) for c in casts)
    )
    assert step_cost(shared, RATES, BARE, SIX, ["k"]).casts == pytest.approx(sum(casts[1].values()))


def test_recomputation_runs_the_forward_pass_again() -> None:
    one = replace(model(("x", 4096, 4096)), forward=replace(NOTHING, fused_bytes=4e9), attention=1e12)
    cost = layer_cost(one.layers[0], SIX, RATES)
    plain = step_cost(one, RATES, BARE, SIX, ["x"])
    full = step_cost(one, RATES, replace(BARE, again=Recompute(1.0, 1.0, 1.0)), SIX, ["x"])
    assert full.linear - plain.linear == pytest.approx(cost.fp8["output"])
    again = cost.forward_casts
    assert full.casts - plain.casts == pytest.approx(again["input"] + again["weight"])
    assert again["grad_output"] == 0, "the backward pass runs once"
    assert again["input"] < cost.casts["input"], "nor is the backward layout cast again"
    b = SIX.casts["input"].forward
    assert again["input"] == pytest.approx(16384 * 4096 * b / (RATES["bandwidth"] * RATES["casts"]))
    assert full.attention == pytest.approx(plain.attention * 4 / 3)
    assert full.between - plain.between == pytest.approx(1e-3)


def test_a_gemm_that_the_recipe_leaves_alone_gains_nothing() -> None:
    two = replace(SIX, fp8_gemms=("output", "grad_input"))
    cost = layer_cost(Linear("x", 4096, 4096, 16384, 0), two, RATES)
    assert cost.fp8["grad_weight"] == cost.bf16["grad_weight"]
    assert cost.fp8["output"] < cost.bf16["output"]


def test_launches_bound_a_small_model_in_eager_mode() -> None:
    """1,000 operators at 8 us keep a device busy for 8 ms at least; compiled, few kernels do not."""
    small = replace(model(("x", 256, 256), tokens=256), forward=Traffic(1e6, 1e6, 1000, 10))
    eager = step_cost(small, RATES, replace(BARE, compiled=False), None)
    assert eager.total == pytest.approx(8e-3)
    assert step_cost(small, RATES, BARE, None).total < 1e-3
    fp8 = step_cost(small, RATES, replace(BARE, compiled=False), SIX, ["x"])
    assert fp8.total == pytest.approx(8e-3 + 6 * 8e-6), "six more launches"


def test_accumulation_repeats_all_but_the_update() -> None:
    one = model(("x", 4096, 4096))
    once, four = (step_cost(one, RATES, Plan(accumulation=n), None) for n in (1, 4))
    assert four.linear == 4 * once.linear
    assert four.optimizer == once.optimizer == pytest.approx(40 * 4096**2 / RATES["bandwidth"])


def test_sharding_hides_behind_computation_but_for_its_ends() -> None:
    """FSDP on 8 GPUs of 1 GB of weights: 2 gathers of bf16 and one float32 reduction; one block of 11 is not hidden."""
    big = replace(model(("x", 16384, 16384), tokens=65536), parameters=500_000_000, blocks=10)
    plan = Plan(dp=8, update_bytes=0.0, copied=False)
    link = RATES["link"]
    gather, reduce = 1e9 * 7 / 8 / link, 2e9 * 7 / 8 / link
    ends = step_cost(big, RATES, plan, None).communication
    hops = 8.4e-6 + 7 * 3.4e-6  # NCCL's own estimate of a ring's start and of a step, of which it has seven
    assert ends == pytest.approx((gather + reduce) / 11 + 2 * hops, rel=1e-6)
    few = big.with_tokens(256)
    exposed = step_cost(few, RATES, plan, None)
    whole = 2 * gather + reduce
    assert exposed.communication == pytest.approx(whole + 3 * 11 * hops - exposed.linear, rel=1e-6)


def test_weights_gathered_in_fp8_take_half_as_long() -> None:
    few = replace(model(("x", 16384, 16384), tokens=64), blocks=10)
    sends = replace(SIX, gathered_weight=SIX.casts["weight"])
    plan = Plan(dp=8, copied=False)
    bf16 = step_cost(few, RATES, plan, SIX, ["x"])
    fp8 = step_cost(few, RATES, plan, sends, ["x"])
    kept = step_cost(few, RATES, replace(plan, gather_fp8=False), sends, ["x"])
    assert kept == bf16
    sent = 2 * 16384**2 * 7 / 8 / RATES["link"]
    assert bf16.total - fp8.total == pytest.approx(sent, rel=0.05), "half of two gathers"
    assert fp8.casts / bf16.casts < 0.2, "each casts its eighth of the weight, and little else with 64 tokens"


def test_tensor_parallel_exchanges_are_exposed_unless_they_overlap() -> None:
    """1 GB gathered forward and scattered backward, on 2 GPUs half of it each; in FP8 the gather takes half."""
    one = model(("x", 4096, 4096))
    exchange = Exchange(1e9, ("x",), True)
    plan = replace(BARE, tp=2, exchanges=(exchange,))
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


def test_fsdp2_copies_what_it_gathers_and_reduces() -> None:
    """500M weights: twice 1 GB read and written, gradients read in bf16 and written in float32; nothing hides them."""
    big = replace(model(("x", 16384, 16384), tokens=65536), parameters=500_000_000, blocks=10)
    plan = Plan(dp=8, update_bytes=0.0)

    def added(recipe: RecipeCost | None, plan: Plan) -> float:
        copied, not_copied = (
            step_cost(big, RATES, replace(plan, copied=c), recipe, ["x"]).communication for c in (True, False)
        )
        return (copied - not_copied) * RATES["bandwidth"]

    assert added(None, plan) == pytest.approx(4e9 + 1e9 + 2e9)
    assert added(None, replace(plan, accumulation=3)) == pytest.approx(3 * 4e9 + 3e9)
    assert added(None, replace(plan, accumulation=3, reduce_each=True)) == pytest.approx(3 * 4e9 + 3 * 3e9)
    sends = replace(SIX, gathered_weight=SIX.casts["weight"])
    assert added(sends, plan) == pytest.approx(7e9 - 4 * 16384**2), (
        "a byte less of each weight that is sent in FP8"
    )


def test_copies_of_the_weights_reduce_among_themselves() -> None:
    """16 GPUs on two nodes: a copy a node gathers by NVLink; its shard of gradients goes between nodes."""
    few = replace(model(("x", 16384, 16384), tokens=256), parameters=500_000_000, blocks=10)
    plan = Plan(dp=16, update_bytes=0.0, copied=False)
    one, two = (step_cost(few, RATES, replace(plan, replicas=n), None) for n in (1, 2))
    start, hop = 8.4e-6, 3.4e-6
    sharded = (2e9 + 2e9) * 7 / 8 / RATES["link"] + 33 * (start + 7 * hop)
    among = 2 * (2e9 / 8) / 2 / RATES["network"] + 11 * (start + 2 * 14e-6)
    compute = two.total - two.communication
    assert two.communication == pytest.approx(sharded + among - compute, rel=1e-6)
    assert one.communication != two.communication
    held = replace(plan, update_bytes=16.0)
    assert step_cost(few, RATES, replace(held, replicas=2), None).optimizer == pytest.approx(
        2 * step_cost(few, RATES, held, None).optimizer
    ), "each GPU updates twice as many weights"


def test_scales_that_are_applied_afterwards_take_a_pass_of_their_own() -> None:
    after = replace(SIX, rescaled=4.0)
    one = model(("x", 4096, 1024))
    before = step_cost(one, RATES, BARE, SIX, ["x"])
    found = step_cost(one, RATES, replace(BARE, again=Recompute(1.0)), after, ["x"])
    again = step_cost(one, RATES, replace(BARE, again=Recompute(1.0)), SIX, ["x"])
    once = 4 * 16384 * 4096 / RATES["bandwidth"]
    assert found.casts - again.casts == pytest.approx(once), "backward runs once"
    assert step_cost(one, RATES, BARE, after, ["x"]).casts - before.casts == pytest.approx(once)
    kept = replace(after, fp8_gemms=("output", "grad_weight"))
    assert "grad_input" not in layer_cost(one.layers[0], kept, RATES).casts


def test_what_a_measured_step_has_beyond_its_parts_is_kept() -> None:
    one = model(("x", 4096, 4096))
    bf16 = step_cost(one, RATES, BARE, None).total
    fp8 = step_cost(one, RATES, BARE, SIX, ["x"]).total
    anchored = replace(BARE, bf16_step_s=2 * bf16)
    assert step_ratio(one, RATES, anchored, SIX, ["x"]) == pytest.approx(2 * bf16 / (fp8 + bf16))
    faster = replace(BARE, bf16_step_s=bf16 / 2)
    assert both_steps(one, RATES, faster, SIX, ["x"])[0].unexplained == 0


def test_the_interval_follows_from_the_rates() -> None:
    """A ratio of two rates with 10 % and 5 %: sqrt(0.1^2 + 0.05^2) about, 95 % of it."""
    from harness.advise.rates import PUBLISHED, Figure, Rates

    rates = Rates("two", {"a": Figure(2.0, 0.10, PUBLISHED, ""), "b": Figure(1.0, 0.05, PUBLISHED, "")})
    found = with_interval(lambda r: r["a"] / r["b"], rates)
    assert found.value == 2
    assert found.high / found.value == pytest.approx(1.234, abs=0.01)
    assert found.value / found.low == pytest.approx(found.high / found.value)
    exact = speedup(model(("x", 4096, 4096)), rates_of(named("h200")), BARE, SIX, ["x"])
    assert exact.low < exact.value < exact.high
