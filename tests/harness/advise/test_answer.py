"""The answer as a reader sees it: lines and words. Oracles: the rule of a line's length, and its JSON."""

from __future__ import annotations

import html
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.advise.command import answer, parse
from harness.advise.decide import ON
from harness.advise.memory import GIB, MARGIN, TOO_LARGE, Memory
from harness.advise.views import AdviceView
from harness.store.printer import MOST, as_text

if TYPE_CHECKING:
    from harness.advise.advice import Advice

NEEDS_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="the extra hf is not installed"
)
ROOT = Path(__file__).parents[3]
QWEN = ROOT / "docs" / "examples" / "Qwen3-8B"
FIGURE = re.compile(r"\d+\.\d+")
QUESTIONS = {
    "a step that fits": "model=llama3_8b gpu=h100 dp=8 batch=1 seq=8192 checkpointing=selective",
    "a step that does not": "model=llama3_8b gpu=h100",
    "no FP8 units": "model=llama3_8b gpu=a100 dp=8 checkpointing=full",
    "many GPUs that nobody can tell of": "model=llama3_8b gpu=h100 gpus=1024 seq=8192 batch=1 recipe=rowwise",
    "a pipeline": "model=llama3_405b gpu=h100 gpus=512 seq=8192 batch=1",
    "a schedule": "model=llama3_1b gpu=h200 priority=loss",
    "delayed": "model=llama3_1b gpu=h200 recipe=delayed checkpointing=full",
    "torchao": "model=llama3_1b gpu=h200 library=torchao recipe=tensorwise checkpointing=full",
    "experts": "model=llama_moe gpu=h200",
}


@pytest.fixture(scope="module")
def advice() -> dict[str, Advice]:
    return {name: answer(parse(words.split())) for name, words in QUESTIONS.items()}


def lines(found: Advice) -> list[str]:
    return AdviceView(found).lines()


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_answer_fits_a_terminal_and_a_notebook_shows_the_same(
    name: str, advice: dict[str, Advice]
) -> None:
    text = as_text(AdviceView(advice[name]))
    assert len(text.splitlines()) <= 25
    assert [line for line in text.splitlines() if len(line) > MOST] == []
    assert html.unescape(advice[name]._repr_html_()) == f"<pre>{text}</pre>"


def test_the_examples_of_the_readme_and_of_the_page_are_what_is_printed() -> None:
    """Oracle: the first command of each, which prints code. Figures may differ with another torch."""
    readme, page = (
        (ROOT / name).read_text().split("harness advise ", 1) for name in ("README.md", "docs/advise.md")
    )
    (words, _), (same, rest) = readme[1].split("\n", 1), page[1].split("\n", 1)
    assert words == same
    example = rest.split("```")[2].strip("\n").splitlines()
    printed, due = (
        {FIGURE.sub("#", line) for line in shown} for shown in (example, lines(answer(parse(words.split()))))
    )
    assert printed <= due
    assert "code:" in printed


@pytest.mark.parametrize(
    "words",
    [
        "model=llama3_8b gpu=h100",
        pytest.param("model=llama3_8b gpu=h100 dp=8 batch=8 seq=8192", marks=pytest.mark.slow),
        "model=llama3_8b gpu=h100 gpus=2",
        "model=llama3_8b gpu=h100 dp=8 replicas=8 batch=1 seq=8192 checkpointing=selective",
        "model=gpt2_xl gpu=rtx_4090",
        "model=llama3_3b gpu=rtx_4090 pp=2 seq=4096 batch=1",
        pytest.param(f"model={QWEN} gpu=h100", marks=NEEDS_TRANSFORMERS),
    ],
)
def test_each_way_out_fits_when_it_is_taken(words: str) -> None:
    """What the answer promises is what the same command then says; of weights and optimizer alone never that it fits."""
    found = answer(parse(words.split()))
    assert found.answer == TOO_LARGE
    assert found.memory is not None
    assert found.memory.ways
    for way, promised in found.memory.ways.items():
        asked = {pair.split("=")[0]: pair for pair in (*words.split(), *way.split())}
        if "batch" in way:
            asked.setdefault("seq", "seq=4096")
            asked.pop("tokens", None)
        again = answer(parse(list(asked.values())))
        assert again.memory is not None
        assert again.memory.word == ("fits" if found.memory.whole else "not predicted"), way
        if again.decision == found.decision:
            assert again.memory.needed == pytest.approx(promised, rel=0.05), way


def test_what_does_not_fit_is_the_answer_and_has_no_code(advice: dict[str, Advice]) -> None:
    """Whatever FP8 would gain: the decision by time stands in the JSON alone, and nothing positive begins a line."""
    found = AdviceView(advice["a step that does not"])
    assert (found.tone, found.data()["decision"], found.data()["decision_by_time"]) == ("bad", TOO_LARGE, ON)
    assert "code:" not in found.lines()
    assert not [line for line in found.lines() if line.startswith(f"FP8: {ON}")]
    assert "code:" in lines(advice["a step that fits"])


@pytest.mark.parametrize(
    ("needed", "is_whole", "word"),
    [
        (100, True, "fits"),
        (101, True, "tight"),
        (117, True, "tight"),
        (118, True, TOO_LARGE),
        (100, False, "not predicted"),
        (117, False, "not predicted"),
        (118, False, TOO_LARGE),
    ],
)
def test_the_word_for_memory(needed: int, is_whole: bool, word: str) -> None:
    """By hand, of a GPU of 117 bytes: it fits where 1.17 times as much would, and a lower bound never does."""
    assert MARGIN == 1.17
    assert Memory({"weights": 1000}, {"weights": needed}, 117, is_whole, {}).word == word
    assert Memory({"weights": needed}, None, 117, is_whole, {}).word == word


def test_a_lower_bound_never_fits(advice: dict[str, Advice]) -> None:
    """Experts' activations are not predicted: weights alone leave room, and the word is neither fits nor tight."""
    memory = advice["experts"].memory
    assert memory is not None
    assert not memory.whole
    assert memory.needed < memory.device
    assert memory.word == "not predicted"
    assert "fits" not in " ".join(lines(advice["experts"]))


def test_a_pipeline_is_bounded_by_its_weights_alone(advice: dict[str, Advice]) -> None:
    """By hand: 16 bytes of 405.85e9 parameters over 512 GPUs are 11.8 GiB; what else a stage holds is not predicted."""
    memory = advice["a pipeline"].memory
    assert memory is not None
    assert memory.needed / GIB == pytest.approx(11.8, abs=0.05)
    assert (memory.word, memory.unknown) == ("not predicted", "a pipeline")


def test_four_bits_are_quoted_with_their_loss_and_never_predicted() -> None:
    """Oracle: the ledger. Row 1, 8B: 11 arms against 3, a worse loss at equal tokens, sooner on 8 B200; no pair ran on an H100."""
    asked = answer(parse(["model=llama3_8b", "gpu=b200", "gpus=8", "formats=all"]))
    assert asked.four_bits is not None
    first, lora = asked.four_bits.public
    assert (first.precision, first.against, first.word, first.gap) == (
        "NVFP4",
        "FP8-current",
        "FAIL",
        "+0.812 %",
    )
    assert (first.arms, first.gpus, lora.gpus) == ("11 arms against 3", "8 B200", "8 B200")
    assert (first.time, first.time_arms) == ("0.918 (0.886 to 0.952)", "7 arms against 1")
    loss, time = first.lines(8_030_261_248, None)
    assert "FAIL" in loss
    assert "B200" not in loss  # of all arms, on several machines
    assert "not near" not in loss
    assert "0.918" in time
    assert "not near" in first.lines(1_000_000, None)[0]
    assert "not near" in first.lines(8_030_261_248, 15 * 10**12)[0]
    assert asked.four_bits.elsewhere == 2
    assert asked.four_bits.losses["mxfp4"] is None
    assert not {option.recipe.name for option in asked.options} & {"nvfp4", "mxfp4"}
    lines = AdviceView(asked).lines()
    assert any("FAIL +0.812 %" in line for line in lines)
    assert any("mxfp4 was judged at no size" in line for line in lines)
    assert max(map(len, lines)) <= MOST
    assert AdviceView(asked).data()["four_bits"]["public"][0]["gpus"] == "8 B200"
    elsewhere = answer(parse(["model=llama3_8b", "gpu=h100", "formats=all"])).four_bits
    assert elsewhere is not None
    assert elsewhere.public == ()
    assert elsewhere.elsewhere == 4
    assert answer(parse(["model=llama3_8b", "gpu=b200"])).four_bits is None
