"""A step's time. Oracles: the closed form 6 MNK / P + b (MK + KN + MN) / BW of a linear, and sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from advise_fixtures import NOTHING, SIX, model, round_h200

from harness.advise import decide
from harness.advise.casts import CastCost, RecipeCost
from harness.advise.layer import layer_cost
from harness.advise.model import Exchange, Linear, Traffic, split
from harness.advise.plan import Plan, Recompute
from harness.advise.rates import rates_of
from harness.advise.step import (
    Pass,
    as_sent,
    pipeline,
    sharding,
    speedup,
    step_cost,
    step_ratio,
    with_interval,
)
from harness.advise.trace import trace
from harness.machine.hardware import named
from harness.store.errors import UsageError
from harness.training.models import resolve

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


def test_launches_bound_a_small_model_in_eager_mode() -> None:
    """1,000 operators at 8 us keep a device busy for 8 ms at least; compiled, few kernels do not."""
    small = replace(model(("x", 256, 256), tokens=256), forward=Traffic(1e6, 1e6, 1000, 10))
    eager = step_cost(small, RATES, replace(BARE, compiled=False), None)
    assert eager.total == pytest.approx(8e-3)
    assert step_cost(small, RATES, BARE, None).total < 1e-3
    fp8 = step_cost(small, RATES, replace(BARE, compiled=False), SIX, ["x"])
    assert fp8.total == pytest.approx(8e-3 + 6 * 8e-6), "six more launches"


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


def test_parts_add_up_and_each_block_exchanges_four_times() -> None:
    """Llama: q, k, v and gate, up split by columns, o and down by rows (arXiv:1909.08053): per block two gathers and two
    scatters of tokens x width forward; the head gathers once more."""
    whole = trace(resolve("llama3_8b"), 1, 8192)
    part, exchanges = split(whole, 8)
    assert sum(layer.flops for layer in part.layers) * 8 == sum(layer.flops for layer in whole.layers)
    assert part.attention * 8 == whole.attention
    assert part.parameters * 8 == pytest.approx(whole.parameters, abs=8)
    sizes = {layer.fqn.rsplit(".", 1)[-1]: (layer.K, layer.N) for layer in part.layers}
    assert sizes["k"] == (4096, 128)
    assert sizes["o"] == (512, 4096)
    assert sizes["down"] == (1792, 4096)
    gathers, scatters = [e for e in exchanges if e.gathers], [e for e in exchanges if not e.gathers]
    assert (len(gathers), len(scatters)) == (2 * 32 + 1, 2 * 32)
    assert {e.sent for e in exchanges} == {2.0 * 8192 * 4096}
    assert gathers[0].layers == tuple(f"layers.0.attention.{n}" for n in "qkv")


def test_what_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"a layer 'blocks\.0\.router', whose split is not known"):
        split(model(("blocks.0.router", 64, 8)), 2)
    with pytest.raises(UsageError, match="tp=3 does not divide q, whose 64 features"):
        split(model(("q", 64, 64)), 3)
    with pytest.raises(UsageError, match="whose 50257 features"):
        split(trace(resolve("gpt2"), 1, 64), 2)


def test_a_cast_before_the_gather_is_of_a_shard() -> None:
    """Oracle: by hand; of 5 bytes an element a GPU moves those of its shard, and codes are transposed whole."""
    sends, plan = replace(SIX, gathered_weight=CastCost(5.0, 2.0)), Plan(dp=64, gather_fp8=True)
    weight = as_sent(sends, plan).casts["weight"]
    assert (weight.streamed, weight.strided) == (5 / 64, 2.0)
    assert as_sent(sends, replace(plan, replicas=8)).casts["weight"].streamed == 5 / 8
    for kept in (replace(plan, gather_fp8=False), replace(plan, dp=1)):
        assert as_sent(sends, kept) == sends
    assert as_sent(SIX, plan) == SIX


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
