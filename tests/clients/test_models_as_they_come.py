"""The Hugging Face part of docs/tutorial-measure-my-model.md with the real library. Oracle: the model called by hand."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import torch

from harness import store
from harness.__main__ import main
from harness.training.models import resolve
from harness.training.setup import Setup, prepare

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "tutorial-measure-my-model.md"
SECTION = PAGE.read_text().split("## 7. A Hugging Face model")[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_llama.py").write_text(SECTION.split("```python file=my_llama.py\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_llama", None)


def done(line: str) -> tuple[str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as told:
        code = main(shlex.split(line)[3:])
    assert code == 0, (said.getvalue(), told.getvalue())
    return said.getvalue(), told.getvalue()


def test_a_step_of_a_llama_is_the_step_by_hand(folder: Path) -> None:
    import my_llama

    spec = resolve('{"_target_": "my_llama.build", "batch": "my_llama.batch"}')
    trainee = prepare(Setup(model=spec.name, batch=4, seq=32, compute="fp32"), "cpu")
    plain = my_llama.build()
    plain.load_state_dict(trainee.model.state_dict())
    loss = plain(**my_llama.batch(5, 2, 4, "cpu")).loss
    loss.backward()
    assert torch.equal(trainee.gradients([spec.batch(5, 2, 4, "cpu")]), loss.detach())
    for mine, theirs in zip(trainee.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_the_tutorial_runs_with_it(folder: Path) -> None:
    commands = [line for line in SECTION.splitlines() if line.startswith("python -m harness")]
    advice, step, loss = commands
    said, _ = done(advice)
    assert "512 tokens a pass" in said
    done(f"{step} report=false")
    rows = store.read(folder / "results")
    rows = rows[(rows["metric"] == "time_ms") & (rows["arm"] == "rowwise_eager")]
    assert set(rows["status"]) == {"ok"}
    ran = json.loads(rows.iloc[0]["resolved"])
    assert ran["loss_from"] == "output.loss"
    assert ran["tokens_per_step"] == 4 * 32
    assert ran["fp8_layers"] == 15  # 7 of each block, and the head
    done(f"{loss} dry_run=true")
