"""A positive word only where nothing that is known speaks against it. Oracles: drawn records, and the printed code itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from advice_asked import plain, refused
from advise_fixtures import SIX, model, round_h200
from hypothesis import given
from hypothesis import strategies as st

from harness.advise import decide, losses
from harness.advise.casts import CastCost, RecipeCost
from harness.advise.command import answer, parse
from harness.advise.losses import FACTOR, GapInterval, Loss
from harness.advise.views import AdviceView
from harness.training.step import Step

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
    by_time = decide.advise(model(("x", 8192, 8192)), RATES, Step(compiled=True), SIX)
    assert by_time.verdict == decide.ON
    judged = replace(by_time, loss=found)
    assert judged.verdict == (decide.OFF if near and word == "FAIL" else decide.ON)
    assert judged.by_time == decide.ON
    assert decide.best([by_time, judged], careful=False) is by_time


@pytest.mark.parametrize("word", ["PASS", "FAIL", "INCONCLUSIVE"])
def test_a_loss_stands_with_its_gap_whatever_its_word(word: str) -> None:
    """Oracle: the record. An INCONCLUSIVE without its gap hides what the seeds gave."""
    found = answer(parse(["model=llama3_1b", "gpu=h200", "checkpointing=full"]))
    known = replace(loss(10**9, 10**9, word), interval=GapInterval(0.5, 1.5, 0.9))
    view = AdviceView(replace(found, chosen=replace(found.chosen, loss=known)))
    (line,) = (line for line in view.lines() if line.startswith("loss: "))
    assert [text for text in (word, known.gap, "90 % interval +0.500 to +1.500 %") if text not in line] == []
    expected = {"gap": known.gap, "interval": {"low": 0.5, "high": 1.5, "confidence": 0.9}}
    assert view.data()["loss"] | expected == view.data()["loss"]


@given(value=st.floats(1.0, 3.0), width=st.sampled_from([1024, 8192, 16384]))
def test_an_upper_bound_is_never_on(value: float, width: int) -> None:
    part = model(("x", width, width), whole=False)
    found = decide.advise(part, RATES, Step(compiled=True), SIX)
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
    found = decide.advise(model(("x", 8192, 8192)), RATES, Step(tp=tp, compiled=True), rows)
    assert found.step.low < 0.847 or not found.converted
    assert found.verdict not in decide.POSITIVE


def test_a_throughput_above_the_peak_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """8.03e9 parameters, 6 FLOPs each a token: 989e12 / 48e9 are some 20,500 tokens a second at most."""
    asked = ("model=llama3_8b", "gpu=h200", "checkpointing=full", "recipe=tensorwise")
    assert "bf16_tokens_per_s=21000" in refused(capsys, *asked, "bf16_tokens_per_s=21000")
    assert plain(capsys, *asked, "bf16_tokens_per_s=11000")["decision_by_time"] == decide.ON
