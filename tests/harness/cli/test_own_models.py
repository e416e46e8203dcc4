"""Models as they come on the command line. Oracle: the plan's own exit codes and words, and a row that a sweep stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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


def test_random_tokens_are_said_before_a_sweep_and_in_an_advice(capsys: pytest.CaptureFixture[str]) -> None:
    words = "model.batch is not named: random tokens below 48, 32 a sequence: times and shapes alone"
    code, said = ended(capsys, "sweep=train", *NESTED, "device=cpu", "dry_run=true")
    assert (code, words in said) == (0, True)
    code, said = ended(capsys, "advise", *NESTED, "gpu=h200")
    assert code == 0
    assert words in " ".join(said.split())
    code, said = ended(capsys, "advise", GPT, "model.batch=language_models.in_order", "gpu=h200")
    assert (code, "model.batch is not named" in said) == (0, False)
