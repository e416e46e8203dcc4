"""doctor, advise, former commands, help, and the targets of make that the README names."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from command_line import run

from harness.__main__ import FORMER_COMMANDS

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "report",
    "gate",
    "verdict",
    "import",
    "doctor",
    "advise",
    "diff",
    "fleet",
    "-m",
)


def test_help_names_every_command_every_sweep_and_every_key(tmp_path: Path) -> None:
    ended = run(tmp_path, "--help")
    text = "\n".join(ended.out)
    assert ended.code == 0
    assert [name for name in COMMANDS if f"python -m harness {name} " not in text] == []
    for path in (ROOT / "sweeps").glob("*.yaml"):
        question = path.read_text().splitlines()[0].removeprefix("# ")
        assert re.search(rf"^  {path.stem} +{re.escape(question)}$", text, re.MULTILINE), path.stem
    for key in ("results_dir=", "axes.NAME=", "arms=", "device=", "rounds=", "seed=", "resume=", "dry_run="):
        assert key in text


@pytest.mark.parametrize(
    "words", [["-h"], *([name, "--help"] for name in ("gate", "diff", "advise", "fleet", "verdict"))]
)
def test_each_help_is_exit_0(words: list[str], tmp_path: Path) -> None:
    ended = run(tmp_path, *words)
    assert ended.code == 0
    assert ended.out


def test_the_version_is_named(tmp_path: Path) -> None:
    ended = run(tmp_path, "--version")
    assert ended.code == 0
    assert ended.out[0].startswith("fp8-harness")


def test_a_sweep_of_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "ours.yaml").write_text(
        "# Is it ours?\ndefaults: [gemm, _self_]\nshapes: []\naxes: {M: [64], K: [64], N: [32, 48]}\n"
    )
    assert "  ours       Is it ours?" in run(tmp_path, "--help").out
    ended = run(tmp_path, "sweep=ours", "axes.role=output", "arms=[bf16_eager]", "device=cpu", "dry_run=true")
    assert ended.code == 0
    assert "2 cases" in ended.out[0]
    assert "nothing was measured" in ended.out[-1]


@pytest.mark.slow
def test_doctor_is_exit_0_and_has_a_line_for_every_recipe_and_backend(tmp_path: Path) -> None:
    import fp8core

    ended = run(tmp_path, "doctor", "device=cpu")
    text = "\n".join(ended.out)
    assert ended.code == 0
    for name in (*fp8core.RECIPES, *fp8core.BACKENDS):
        assert name in text, name


def test_advise_predicts_as_plain_values_and_names_the_filter(tmp_path: Path) -> None:
    ended = run(tmp_path, "advise", "model=llama3_8b", "gpu=h200", "tokens=16384", "json=true")
    assert ended.code == 0
    document = json.loads("\n".join(ended.out))
    assert isinstance(document, dict)
    text = "\n".join(run(tmp_path, "advise", "model=nano", "gpu=h200").out)
    assert "tensorwise" in text


@pytest.mark.parametrize("command", FORMER_COMMANDS)
def test_a_command_that_is_gone_is_exit_2_and_says_what_does_it_now(command: str, tmp_path: Path) -> None:
    assert FORMER_COMMANDS[command] in run(tmp_path, command, "--trials", "100").refused()


def test_the_targets_that_the_readme_names_exist_and_begin_what_they_say() -> None:
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "README.md").read_text()
    # In code alone: prose has the verb.
    code = "\n".join(re.findall(r"```\n.*?```|`[^`\n]+`", readme, re.DOTALL))
    named = set(re.findall(r"\bmake (?:[A-Z]+=\S+ )*([a-z][a-z-]+)", code))
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    assert {"quick", "gpu", "docs"} <= named
    assert (
        named | {"test", "test-nightly", "gate", "bench", "check", "format", "aot", "published", "studies"}
        <= targets
    )
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "PY=python3", "quick", "ARGS=rounds=3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "python3 -m harness sweep=quick rounds=3"


@pytest.mark.parametrize(("word", "instead"), [("gpu", "make gpu"), ("gemm", "sweep=gemm")])
def test_a_sweep_that_is_given_as_a_command_is_told_how(word: str, instead: str, tmp_path: Path) -> None:
    assert instead in run(tmp_path, word).refused()
