"""Models as they come on the command line. Oracle: the plan's own exit codes and words, and a row that a sweep stored."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from harness import store
from harness.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path

GPT, TINY = "model._target_=language_models.gpt", "model._target_=stand_in_config.Auto.from_config"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stand_in_config.py").write_text(
        "import language_models as lm\n"
        "class Auto:\n"
        "    from_config = classmethod(lambda cls, config: lm.TinyForCausalLM(config))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


NESTED = (TINY, "model.config._target_=language_models.Config", "model.config.vocab_size=48")


def ended(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main([*words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_loss_on_random_tokens_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with and without a verdict, in the plan."""
    for judge in ("true", "false"):
        code, said = ended(
            capsys, "sweep=divergence", GPT, "axes.steps=100", f"train.judge={judge}", "device=cpu"
        )
        assert code == 2
        assert "a loss on random tokens says nothing of training; name model.batch=" in said
        assert said.count("\n") == 1


def test_random_tokens_are_said_before_a_sweep_and_in_an_advice(capsys: pytest.CaptureFixture[str]) -> None:
    words = "model.batch is not named: random tokens below 48, 32 a sequence: times and shapes alone"
    code, said = ended(capsys, "sweep=train", *NESTED, "device=cpu", "dry_run=true")
    assert (code, words in said) == (0, True)
    code, said = ended(capsys, "advise", *NESTED, "gpu=h200")
    assert code == 0
    assert words in " ".join(said.split())
    code, said = ended(capsys, "advise", GPT, "model.batch=language_models.in_order", "gpu=h200")
    assert (code, "model.batch is not named" in said) == (0, False)


def test_a_batch_without_labels_ends_a_sweep_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = "model.batch=language_models.without_labels"
    code, said = ended(capsys, "sweep=train", *NESTED, batch, "device=cpu")
    assert code == 2
    assert "output.loss of stand_in_config.Auto.from_config is None; the batch has input_ids" in said
    assert not (tmp_path / "results").exists()


def test_a_step_of_a_model_as_it_comes_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "axes.compute=bf16",
        "axes.batch=4",
        "arms=[bf16_eager,rowwise_eager]",
        "rounds=3",
        "report=false",
    )
    code, said = ended(
        capsys, "sweep=train", *NESTED[:2], "model.batch=language_models.by_name", *words, "device=cpu"
    )
    assert code == 0, said
    rows = store.read(tmp_path / "results")
    rows = rows[(rows["metric"] == "time_ms") & (rows["arm"] == "rowwise_eager")]
    assert set(rows["status"]) == {"ok"}
    ran = json.loads(rows.iloc[0]["resolved"])
    assert ran["batch_handed_over"] == "by name: input_ids, labels, attention_mask"
    assert ran["loss_from"] == "output.loss, bfloat16 turned to float32"
    assert (ran["tokens_per_step"], ran["fp8_layers"]) == (64, 3)
