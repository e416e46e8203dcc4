"""`list` and `sweep=NAME --help`: the oracle is each table itself, read apart from the command."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import fp8core
import harness
from fp8core import RECIPES
from harness.__main__ import main
from harness.cli.config import sweeps
from harness.machine.hardware import named
from harness.suites import SUITES
from harness.training.models import MODELS

ROOT = Path(__file__).parents[3]


def first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line[:1].strip()]


@pytest.mark.parametrize(
    ("what", "expected"), [("sweeps", sweeps), ("models", lambda: MODELS), ("recipes", lambda: RECIPES)]
)
def test_each_name_of_a_table_is_listed_once(what, expected, capsys) -> None:
    assert main(["list", what]) == 0
    assert sorted(first_words(capsys.readouterr().out)) == sorted(expected())


def test_each_listed_gpu_is_one_that_advise_takes(capsys) -> None:
    assert main(["list", "gpus"]) == 0
    names = first_words(capsys.readouterr().out)
    assert len(names) > 20
    assert all(named(name) for name in names)
    assert len({named(name).key for name in names}) == len(names)


def test_arms_are_those_of_the_suite(capsys) -> None:
    assert main(["list", "arms", "gemm"]) == 0
    assert first_words(capsys.readouterr().out) == list(SUITES["gemm"].ARMS)


def test_arms_without_a_suite_says_which_there_are(capsys) -> None:
    assert main(["list", "arms"]) == 2
    error = capsys.readouterr().err
    assert "list arms SUITE" in error
    assert "gemm" in error
    assert error.count("\n") == 1


def test_help_of_a_sweep_has_its_question_axes_arms_and_shape_sets(capsys) -> None:
    assert main(["sweep=gemm", "--help"]) == 0
    text = capsys.readouterr().out
    assert "How much faster than bf16 is the FP8 matrix product alone" in text
    assert all(f"axes.{axis}" in text for axis in SUITES["gemm"].AXES)
    assert all(arm in text for arm in SUITES["gemm"].ARMS)
    assert "llama3_70b" in text
    assert "nanogpt" in text


def test_versions_are_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert harness.__version__ == fp8core.__version__ == project["version"]
    assert project["scripts"]["fp8-harness"] == "harness.__main__:console"
