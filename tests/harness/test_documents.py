"""What README and docs tell a reader to type. Oracle: the program itself, which must take it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.__main__ import main

ROOT = Path(__file__).parents[2]
# What a reader puts in for a name of his own; a command that holds one can't be composed as it stands.
OWN = ("<", "RUN", "DIR", "FILE", "my.", "my_package.")


def commands() -> list[list[str]]:
    """The words after `python -m harness` of every sweep in a block of code."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in re.findall(
                r"^python -m harness (.*sweep=.*)$", block.replace("\\\n", " "), re.MULTILINE
            ):
                words = shlex.split(line, comments=True)
                if not any(own in word for own in OWN for word in words) and words not in found:
                    found.append(words)
    return found


def test_there_are_commands() -> None:
    assert len(commands()) >= 8


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_the_documents_composes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the plan, on a CPU: every name and value is known, and there is something to run."""
    monkeypatch.chdir(tmp_path)
    if any(word.startswith("--") for word in words):  # asks for no run
        assert main(words) == 0, capsys.readouterr().err
        return
    code = main([*words, "device=cpu", *([] if "dry_run=true" in words else ["dry_run=true"])])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert " cases" in captured.out
    assert not list(tmp_path.iterdir())


def test_the_code_of_the_readme_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """Each block in turn, around a small model; the names that it leaves to the reader are given."""
    torch.manual_seed(0)

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.lm_head = nn.Linear(32, 64), nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.body(x).relu()).square().mean()

    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step() -> None:
        model(torch.randn(16, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()

    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "train_step": train_step,
        "batches": lambda step: [(torch.randn(16, 32),)] * 2,
        "steps": 1001,  # one more than it warms up
    }
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(
        r"^```python\n(.*?)^```", text.partition("## Train with it")[2], re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    said = capsys.readouterr().out
    assert "FP8 verified: 1 of 2 Linear layers" in said
    assert "body" in said


def test_the_map_of_the_readme_is_the_tree() -> None:
    """Oracle: the folders. Every folder of code is on the map under the one it lies in, and nothing else is."""
    block = re.search(
        r"^## Map\n\n```\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert block is not None
    told: list[str] = []
    above = ""
    for line in block[1].splitlines():
        name, words = line.strip().split(maxsplit=1)
        above = above if line.startswith("  ") else name
        told.append(above + name if line.startswith("  ") else name)
        assert words
    inside = {"fp8core": "*/__init__.py", "harness": "*/__init__.py", "tests": "*/*.py"}
    top = ("fp8core", "harness", "sweeps", "results", "reports", "docs", "tests")
    there = {f"{name}/" for name in top}
    for name, pattern in inside.items():
        there |= {f"{name}/{path.parent.name}/" for path in (ROOT / name).glob(pattern)}
    assert set(told) == there
    assert len(told) == len(set(told))
