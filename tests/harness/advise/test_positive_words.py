"""A positive word only where nothing that is known speaks against it. Oracles: drawn records, and the printed code itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from advice_asked import plain, refused
from advise_fixtures import SIX, model, round_h200
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fp8core import audit
from fp8core.recipe import RECIPES, Gemm, Recipe
from harness.advise import decide, losses
from harness.advise.casts import FP8CORE, CastCost, RecipeCost, not_by_default
from harness.advise.losses import FACTOR, Loss
from harness.advise.plan import Plan
from harness.advise.recipes import candidates, described, unavailable
from harness.advise.views import HEADS, as_code

RATES = round_h200()
SIZES = st.integers(10**5, 10**12)


def loss(parameters: int, tokens: int, word: str, recipe: str = "six") -> Loss:
    return Loss(recipe, "drawn", parameters, tokens, word, "+1 %", "8", "here")


@given(
    there=st.tuples(SIZES, SIZES),
    here=st.tuples(SIZES, SIZES),
    word=st.sampled_from(["PASS", "FAIL", "INCONCLUSIVE"]),
)
def test_a_verdict_on_a_loss_counts_near_its_size_alone(
    there: tuple[int, int], here: tuple[int, int], word: str
) -> None:
    """Oracle: both ratios by hand. A FAIL that counts takes the word away; any other changes none."""
    near = all(max(a / b, b / a) <= FACTOR for a, b in zip(there, here, strict=True))
    found = losses.of("six", *here, among=(loss(*there, word), loss(*here, "FAIL", "other")))
    assert found is not None
    assert found.counts == near
    by_time = decide.advise(model(("x", 8192, 8192)), RATES, Plan(update_bytes=0.0), SIX)
    assert by_time.verdict == decide.ON
    judged = replace(by_time, loss=found)
    assert judged.verdict == (decide.OFF if near and word == "FAIL" else decide.ON)
    assert judged.by_time == decide.ON
    assert decide.best([by_time, judged], careful=False) is by_time


def test_a_fail_outweighs_a_nearer_pass_and_unknown_tokens_let_it_count() -> None:
    known = (loss(10**9, 10**9, "PASS"), loss(3 * 10**9, 10**12, "FAIL"))
    assert losses.of("six", 10**9, None, known) == replace(known[1], counts=True)
    assert losses.of("six", 10**9, 10**9, known) == replace(known[0], counts=True)
    assert losses.of("none", 10**9, None, known) is None


def test_the_answer_carries_the_published_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: eight seeds of tensorwise, FAIL, results/published/cpu/2026-11-23."""
    found = plain(capsys, "model=llama3_8b", "gpu=h200", "recipe=tensorwise", "checkpointing=full")
    assert (found["loss"]["word"], found["loss"]["counts"]) == ("FAIL", False)


@given(value=st.floats(1.0, 3.0), width=st.sampled_from([1024, 8192, 16384]))
def test_an_upper_bound_is_never_on(value: float, width: int) -> None:
    part = model(("x", width, width), whole=False)
    found = decide.advise(part, RATES, Plan(update_bytes=0.0), SIX)
    assert found.verdict not in decide.POSITIVE
    assert found.step.low <= 1


@pytest.mark.parametrize("words", [("dp=64", "tokens=16"), ("dp=64", "batch=1", "seq=128")])
def test_a_gain_of_the_gather_alone_is_called_so(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("model=llama3_8b", "gpu=h200", "recipe=tensorwise", *words)
    found = plain(capsys, *asked)
    assert found["decision_by_time"] == decide.GATHER
    assert found["pays_from_tokens"] > found["tokens"]
    assert "with_fp8_all_gather" in found["filter"]["code"]
    assert plain(capsys, *asked, "fp8_all_gather=false")["decision_by_time"] not in decide.POSITIVE


@given(b=st.floats(2.0, 8.0), tp=st.sampled_from([2, 4, 8]))
def test_products_of_rows_under_tensor_parallelism_are_never_sure(b: float, tp: int) -> None:
    """Published: 0.85 to 1.10 of bf16, which the interval has to hold."""
    casts = {t: CastCost(b) for t in ("input", "weight", "grad_output")}
    rows = RecipeCost("rows", "kernels", casts, fuses_gathers=False)
    found = decide.advise(model(("x", 8192, 8192)), RATES, Plan(tp=tp, update_bytes=0.0), rows)
    assert found.step.low < 0.847 or not found.converted
    assert found.verdict not in decide.POSITIVE


def test_a_throughput_above_the_peak_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """8.03e9 parameters, 6 FLOPs each a token: 989e12 / 48e9 are some 20,500 tokens a second at most."""
    asked = ("model=llama3_8b", "gpu=h200", "checkpointing=full", "recipe=tensorwise")
    assert "bf16_tokens_per_s=21000" in refused(capsys, *asked, "bf16_tokens_per_s=21000")
    assert plain(capsys, *asked, "bf16_tokens_per_s=11000")["decision_by_time"] == decide.ON


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Recipe:
    """A recipe as the how-to adds one: one literal, under a name that no list has."""
    like = RECIPES[request.param]
    added = replace(like, name=f"outside_{like.name[::-1]}")
    monkeypatch.setitem(RECIPES._entries, added.name, added)
    return added


@pytest.mark.parametrize("outside", ["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"], indirect=True)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_recipe_under_another_name_is_judged_alike(
    outside: Recipe, compiled: bool, request: pytest.FixtureRequest
) -> None:
    like = request.node.callspec.params["outside"]
    found, known = candidates(compiled)[outside.name], candidates(compiled)[like]
    assert replace(found, name=like) == known
    assert bool(not_by_default(FP8CORE, found)) == bool(not_by_default(FP8CORE, known))
    for capability in ("8.9", "9.0", "12.0", "gfx942"):
        assert unavailable(outside.name, capability, compiled) == unavailable(like, capability, compiled)


def test_the_format_makes_no_scale_finer(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = RECIPES["tensorwise"].output.a
    assert cast is not None
    e4m3 = replace(RECIPES["tensorwise"], name="all_e4m3", grad_input=Gemm(cast, cast), grad_weight=Gemm(cast, cast))  # fmt: skip
    assert described(e4m3, compiled=True).one_scale
    once = replace(cast, scaling="static")  # a scale that is measured once is no general advice
    gemm = Gemm(once, once)
    static = Recipe("once", "", gemm, gemm, gemm)
    monkeypatch.setitem(RECIPES._entries, "once", static)
    assert "once" not in candidates(True)


def tiny(**names: int) -> nn.Module:
    module = nn.Module()
    for name, width in names.items():
        module.add_module(name, nn.Linear(64, width))
    return module


@pytest.mark.parametrize("name", HEADS)
def test_the_printed_code_finds_the_head_of_the_readers_model(name: str) -> None:
    """Whatever it is called, or it stops: it never converts silently what the text leaves in bf16."""
    code = as_code("tensorwise", {"words": ["head"], "names": []}, heads=HEADS)
    names: dict[str, Any] = {"model": tiny(up=64, **{name: 256})}
    exec(code, names)
    assert {layer.fqn for layer in audit(names["model"]).converted} == {"up"}
    other = {"model": tiny(up=64, classifier=256)}
    with pytest.raises(AssertionError):
        exec(code, other)
    assert not audit(other["model"]).converted


@pytest.mark.parametrize("left", [{"words": ["k"], "names": []}, {"words": [], "names": ["layers.0.k"]}])
def test_the_printed_code_stops_where_a_name_is_not_there(left: dict[str, list[str]]) -> None:
    module = tiny(q_proj=64, k_proj=64)
    with pytest.raises(AssertionError):
        exec(as_code("tensorwise", left), {"model": module})
    assert not audit(module).converted
