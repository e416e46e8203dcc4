"""Oracle: the sweeps on disk and the contract of the command line (one line, the nearest name, exit 2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.cli.config import load
from harness.store import outside
from harness.store.errors import UsageError

SWEEP = """\
# Does the toy pay?
suite: toy
axes:
  n: ${on_device:[1, 2], [1000]}
  kind: a
timing: {min_rounds: 4}
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_sweep(enter_folder_with_sweep: Callable[[str, str], None]) -> None:
    enter_folder_with_sweep("toy", SWEEP)


def cpu(asked: str) -> str:
    return "cpu" if asked == "auto" else asked


@pytest.mark.parametrize("written", ["[012345678901,12e456789012]", "['012345678901', \"12e456789012\"]"])
def test_ids_of_cases_are_texts_whatever_they_look_like(written: str) -> None:
    """A number would lose its zero, and 12e456789012 would be infinite."""
    assert load(["sweep=toy", f"cases={written}"], cpu).config.cases == ["012345678901", "12e456789012"]
    assert load(["sweep=toy", "cases=012345678901"], cpu).config.cases == ["012345678901"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep=toi"], r"unknown sweep 'toi' \(nearest: toy\)"),
        (["seed=1"], "one sweep=NAME is needed, got 0; known: "),
        (["sweep=toy", "axis.n=1"], r"unknown key 'axis.n' \(nearest: axes\)"),
        (["sweep=toy", "M=512"], r"unknown key 'M'; an axis is written axes.M="),
        (["sweep=toy", "timing.min_round=3"], r"nearest: timing.min_rounds"),
        (["sweep=toy", "rounds=0"], "timing: "),
        (["sweep=toy", "axes.n=1,2"], r"use key=\[value1,value2\]"),
        (["sweep=toy", "seed=x"], "^seed=x: expected an integer$"),
        (["sweep=toy", "arms=a"], r"^arms=a: expected a list: arms=\[NAME,NAME\]$"),
        (["sweep=toy", "axes=3"], "^axes=3: expected the names below it one by one: axes.NAME=VALUE$"),
        (["sweep=toy", "hydra=3"], "^unknown key 'hydra'; known: arms, "),
        (
            ["sweep=toy", "parts.x.axes.n=3"],
            "^unknown key 'parts.x.axes.n': sweep 'toy' has none of that name to set$",
        ),
        (
            ["sweep=peers", "parts.gemm.arms=3"],
            r"^parts.gemm.arms=3: expected a list: parts.gemm.arms=\[NAME,NAME\]$",
        ),
        (
            ["sweep=toy", "axes.n=${nope}"],
            r"^axes.n: nothing to fill in for \$\{\.\.\.\}: Interpolation key 'nope' not found$",
        ),
        (
            ["sweep=toy", "budget_s=-1"],
            "^budget_s=-1: expected a finite number of seconds from 0; null sets no limit$",
        ),
        (["sweep=toy", "quick"], "'quick' is not key=value"),
        (["sweep=toy", "axes.n=[1"], "axes.n"),
        (["sweep=toy", "dry_run=perhaps"], "^dry_run=perhaps: expected true or false$"),
    ],
)
def test_what_is_refused_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load(words, cpu)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("chosen", ["bad", "extends"])
def test_a_sweep_file_that_is_not_yaml_is_named(chosen: str, tmp_path: Path) -> None:
    (tmp_path / "sweeps" / "bad.yaml").write_text("axes: [1, {")
    (tmp_path / "sweeps" / "extends.yaml").write_text("# Bad?\ndefaults: [toy, bad, _self_]\n")
    (tmp_path / "sweeps" / "beside.yaml").write_text("# Good?\ndefaults: [toy, _self_]\n")
    with pytest.raises(UsageError, match=r"cannot read .*bad.yaml"):
        load([f"sweep={chosen}"], cpu)
    for other in ("toy", "beside"):  # what they do not extend is not read
        assert load([f"sweep={other}"], cpu).config.suite == "toy"


def test_a_sweep_file_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweeps" / "odd.yaml").write_text("# Odd?\nsuit: toy\n")
    with pytest.raises(UsageError, match=r"^sweep .odd.: unknown key .suit.$"):
        load(["sweep=odd"], cpu)


@pytest.mark.parametrize(
    "line",
    [
        "# ${oc.env:HF_TOKEN}",
        "model: {data_path: '${oc.env:HF_TOKEN}'}",
        "arms: ['${oc.decode:${oc.env:HF_TOKEN}}']",
        "axes: {n: '${on_device:${oc.env:HF_TOKEN},1}'}",
        "device: oc\nmodel: ${${device}.env:HF_TOKEN}",
        "axes: &a {n: *a}",
        "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))]),
        "axes: " + "[" * 100_000,
        "model: LARGEST",
    ],
)
def test_a_sweep_file_reads_nothing_of_this_machine_and_ends(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    if "LARGEST" in line:  # not in memory from the collection to the end
        line = line.replace("LARGEST", "a" * outside.LARGEST)
    (tmp_path / "odd.yaml").write_text(f"{line}\nsuite: toy\n")
    with pytest.raises(UsageError) as refused:
        load(["sweep=odd", f"config_dir={tmp_path}"], cpu)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("key", ["results_dir", "reports_dir", "data_path", "hydra.run.dir"])
@pytest.mark.parametrize(
    "reader",
    ["oc.env:HF_TOKEN", "oc.env:HF_TOKEN,none", "oc.select:results_dir", "now:%Y", "hydra:runtime.cwd"],
)
def test_what_a_file_reads_of_the_machine_reaches_no_other_key(
    reader: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    file = OmegaConf.create({"suite": "toy", "axes": {"kind": [f"${{{key}}}"]}})
    OmegaConf.update(file, key, f"results/${{{reader}}}")
    OmegaConf.save(file, tmp_path / "odd.yaml")
    with pytest.raises(UsageError) as refused:
        load(["sweep=odd", f"config_dir={tmp_path}"], cpu)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "line", ["model: {_target_: os.system}", 'axes: {model: \'{"\\u005ftarget_": "os.system"}\'}']
)
def test_a_dry_run_of_a_file_from_elsewhere_calls_nothing(line: str, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(f"# ?\n{line}\nsuite: toy\n")
    words = ["sweep=odd", f"config_dir={tmp_path}", "dry_run=true"]
    with pytest.raises(UsageError, match="trust=true"):
        load(words, cpu)
    assert load([*words, "trust=true"], cpu).config.trust
