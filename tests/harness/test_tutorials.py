"""The tutorials and the troubleshooting table do what they say. Oracle: the program, and the output that they print.

Blocks of a tutorial run in turn, in one folder: `sh` commands; `sh plan` those that take long, up to their plan;
`sh exit=1` those that must end so; `python` code in one namespace; `python file=NAME` and `diff` change files; `text` is the output before it, "..." standing for
anything (doctest's ELLIPSIS). A tutorial that changes the project does so in a copy, in processes of its own.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import blocks

from harness.__main__ import commands, main

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs").glob("tutorial-*.md"))
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
COPIED = ("fp8core", "harness", "sweeps", "pyproject.toml", "tests/fp8core")


class Reader:
    """Someone who does what a tutorial says, in a folder."""

    def __init__(self, folder: Path, in_a_copy: bool) -> None:
        self.folder, self.in_a_copy = folder, in_a_copy
        self.names: dict[str, Any] = {}
        self.output = ""

    def do(self, language: str, about: str, content: str) -> None:
        if language == "text":
            assert doctest.OutputChecker().check_output(content, self.output, FLAGS), self.output
        elif language == "diff":
            self.patch(content)
        elif about.startswith("file="):
            (self.folder / about.removeprefix("file=")).write_text(content)
        elif language == "python":
            self.output = (
                self.in_process([sys.executable, "-c", content]) if self.in_a_copy else self.execute(content)
            )
        else:
            assert language == "sh"
            lines = content.strip().splitlines()
            ends = int(about.removeprefix("exit=")) if about.startswith("exit=") else 0
            self.output = "".join(self.command(line, plan=about == "plan", ends=ends) for line in lines)

    def command(self, line: str, *, plan: bool, ends: int) -> str:
        words = shlex.split(line)
        if plan and any(w.startswith("sweep=") for w in words):
            words.append("dry_run=true")
        if words[1:3] != ["-m", "harness"]:
            return self.in_process([sys.executable, *words[1:]])
        code, output, errors = run(words[3:])
        assert code == ends, (line, output, errors)
        return output

    def execute(self, source: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(source, "tutorial", "exec"), self.names)
        return said.getvalue()

    def in_process(self, words: list[str]) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        done = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def patch(self, diff: str) -> None:
        """Applies a diff whose hunks have no line numbers: what it takes away must be there exactly once."""
        target = self.folder / re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)[0]
        text = target.read_text()
        for hunk in diff.split("@@\n")[1:]:
            old, new = (
                "".join(line[1:] + "\n" for line in hunk.splitlines() if line[0] in kept)
                for kept in (" -", " +")
            )
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        target.write_text(text)


def run(words: list[str]) -> tuple[int, str, str]:
    """Exit code, output and messages of `python -m harness ...` in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as told:
        code = main(words)
    return code, said.getvalue(), told.getvalue()


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [step for step in blocks(page.read_text()) if step[0]]
    in_a_copy = any(about.startswith("file=fp8core/") for _, about, _ in steps)
    if in_a_copy:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, tmp_path / name)
    else:
        if any("transformers" in content for language, _, content in steps if language == "python") and (
            importlib.util.find_spec("transformers") is None
        ):
            monkeypatch.syspath_prepend(ROOT / "tests" / "harness" / "stand_ins")
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "published").symlink_to(ROOT / "results" / "published")
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, in_a_copy)
    try:
        for step in steps:
            reader.do(*step)
    finally:
        for name in ("my_model", "my_llama"):
            sys.modules.pop(name, None)
        if (module := sys.modules.get("transformers")) and "stand_ins" in str(module.__file__):
            del sys.modules["transformers"]
    assert {language for language, _, _ in steps} >= {"sh", "text"}


def test_there_is_a_tutorial_for_each_task() -> None:
    assert {page.stem.removeprefix("tutorial-") for page in TUTORIALS} >= {
        "measure-my-gpu",
        "measure-my-model",
        "read-a-report",
        "add-a-kernel",
        "gate-my-ci",
    }


def rows() -> list[tuple[str, str, str, str]]:
    """(symptom, cause, command, what it shows) of each row of docs/troubleshooting.md."""
    lines = (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("| ")]
    return [tuple(c.strip() for c in row) for row in cells if row[0].strip() != "symptom"]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_command_of_the_troubleshooting_table_runs(
    row: tuple[str, str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweeps up to their plan, on a CPU; what a row says is refused is refused in these words."""
    _, _, command, shows = row
    words = shlex.split(command.strip("`"))
    assert words[:3] == ["python", "-m", "harness"]
    assert shows
    monkeypatch.chdir(tmp_path)
    words = words[3:]
    if words[0] == "resume=RUN_ID":
        assert run(["sweep=cast", "device=cpu", "run_id=RUN_ID", "budget_s=0", "report=false"])[0] == 0
        words += ["dry_run=true"]
    elif not words[0].startswith("sweep="):
        assert words[0] in commands()
        # "doctor" is run by a tutorial; what takes RUN needs a run of the reader's own.
        if words[0] == "doctor" or "RUN" in words:
            return
    else:
        words = [w for w in words if w != "resume=RUN_ID"] + ["device=cpu", "dry_run=true"]
    code, output, errors = run(words)
    if shows.startswith("refused: "):
        assert code == 2
        assert re.findall(r"`(.*?)`", shows)[0] in errors
        return
    assert code == 0, (output, errors)
