"""The tutorials do what they say. Oracle: the program, and the output that they print.

Blocks of a tutorial run in turn, in one folder: `sh` commands; `sh plan` those that take long, up to their plan; `sh exit=1` those
that must end so; `python` code in one namespace; `python file=NAME` writes a file; `text` is the output before it, "..." standing
for anything (doctest's ELLIPSIS).
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import blocks

from harness.__main__ import main

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs").glob("tutorial-*.md"))
SLOW = {
    "tutorial-gate-my-ci",
    "tutorial-measure-my-model",
}  # tests of the gate and of suite train run their commands
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def command(line: str, about: str) -> None:
    """Runs `python -m harness ...` in this process, up to its plan where the page says so."""
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "harness"]
    if about == "plan":
        words.append("dry_run=true")
    assert main(words[3:]) == (int(about.removeprefix("exit=")) if about.startswith("exit=") else 0), line


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in SLOW)) for p in TUTORIALS],
)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "published").symlink_to(ROOT / "results" / "published")
    if importlib.util.find_spec("transformers") is None and "transformers" in page.read_text():
        monkeypatch.syspath_prepend(ROOT / "tests" / "harness" / "stand_ins")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    try:
        follow(page, tmp_path)
    finally:  # what was imported from these folders is of this test alone
        for name in set(sys.modules) - before:
            if "stand_ins" in (at := str(getattr(sys.modules[name], "__file__", ""))) or str(tmp_path) in at:
                del sys.modules[name]


def follow(page: Path, folder: Path) -> None:
    """Does what the page says, block by block."""
    names: dict[str, Any] = {}
    output = io.StringIO()
    for language, about, content in blocks(page.read_text()):
        if language == "text":
            assert doctest.OutputChecker().check_output(content, output.getvalue(), FLAGS), output.getvalue()
        elif about.startswith("file="):
            (folder / about.removeprefix("file=")).write_text(content)
        elif language:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                if language == "python":
                    exec(compile(content, page.name, "exec"), names)
                for line in content.strip().splitlines() if language == "sh" else ():
                    command(line, about)
