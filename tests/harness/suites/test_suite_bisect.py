"""Bisection. Oracles: planted culprits, counts of runs, a fault in one GEMM of a real training run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from train_cases import divergence_case

from fp8core import Float8Linear, PrecisionSchedule
from harness.__main__ import main
from harness.suites import divergence
from harness.training.bisect import Finding, bisect, locate, schedule_with
from harness.training.loop import train
from harness.training.setup import prepare


def planted(*culprits: set[str]) -> tuple[Any, list[frozenset[str]]]:
    """A run that fails if all members of one of the sets are in FP8; and what was asked."""
    asked: list[frozenset[str]] = []

    def fails(chosen: frozenset[str]) -> bool:
        asked.append(chosen)
        return any(culprit <= chosen for culprit in culprits)

    return fails, asked


UNITS = [f"layers.{i}" for i in range(32)]


@pytest.mark.parametrize("index", range(32))
def test_one_culprit_is_found_wherever_it_is_in_logarithmic_time(index: int) -> None:
    fails, asked = planted({UNITS[index]})
    assert bisect(UNITS, fails) == Finding(((UNITS[index],),), True, len(asked))
    assert len(asked) <= 2 * 5 + 3  # 2 log2(32), and all, none and the rest
    assert len(set(asked)) == len(asked)


def test_an_interaction_is_said_to_be_one() -> None:
    finding = bisect(UNITS, planted({"layers.3", "layers.20"})[0])
    assert finding.culprits == (("layers.3", "layers.20"),)
    assert "layers.3 and layers.20 fail together and not one without the other" in str(finding)
    assert finding.rest_passes


def test_several_culprits_are_found_one_after_the_other_up_to_a_number() -> None:
    fails, _ = planted({"layers.1"}, {"layers.9"}, {"layers.30"})
    found = bisect(UNITS, fails)
    assert {units[0] for units in found.culprits} == {"layers.1", "layers.9", "layers.30"}
    assert found.rest_passes
    few = bisect(UNITS, fails, most=1)
    assert len(few.culprits) == 1
    assert str(few).count("what is left fails too: there are more") == 1


def test_a_run_that_passes_or_that_fails_without_fp8_is_not_searched() -> None:
    assert bisect(UNITS, lambda chosen: False) == Finding((), True, 1)
    with pytest.raises(ValueError, match="FP8 is not the cause"):
        bisect(UNITS, lambda chosen: True)


def test_the_schedule_of_a_bisection_is_what_it_says() -> None:
    layers = ["hidden", "out"]
    everything = frozenset(
        f"{layer}:{gemm}" for layer in layers for gemm in ("output", "grad_input", "grad_weight")
    )
    assert schedule_with(layers, everything) == ""
    assert schedule_with(layers, frozenset()) == "keep_bf16@hidden,keep_bf16@out"
    assert PrecisionSchedule.parse(schedule_with(layers, frozenset({"out:output"})))


def test_a_fault_in_one_gemm_of_one_layer_of_a_real_run_is_located() -> None:
    """Planted: an amax of infinity in one layer, for the gradient of its weight alone, which therefore is NaN."""
    sick = "layers.1.mlp.up"

    def plant(trainee: Any) -> None:
        layer = trainee.model.get_submodule(sick)
        assert isinstance(layer, Float8Linear)
        layer.recipe = dataclasses.replace(layer.recipe, grad_weight=divergence.UNSCALED.grad_weight)
        layer.amaxes = Float8Linear(16, 16, config=divergence.UNSCALED).amaxes
        divergence.scale_by_one(trainee)
        assert layer.amaxes is not None
        layer.amaxes.in_use.fill_(math.inf)

    short = divergence_case(steps=1, diagnose_every=0, eval_batches=0)
    layers = [
        m.fqn for m in prepare(divergence.job_of(short, "tensorwise", "cpu").setup, "cpu").audit.converted
    ]

    def fails(in_fp8: frozenset[str]) -> bool:
        job = divergence.job_of(short, "tensorwise", "cpu")
        job.schedule, job.alter = PrecisionSchedule.parse(schedule_with(layers, in_fp8)), plant
        return bool(train(job, "cpu").stopped)

    by_layer, by_gemm = locate(layers, fails)
    assert by_layer.culprits == ((sick,),)
    assert by_gemm is not None
    assert by_gemm.culprits == ((f"{sick}:grad_weight",),)
    assert by_gemm.rest_passes


def test_bisect_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A correct recipe has nothing to be found, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    words = [
        "sweep=divergence",
        "device=cpu",
        "axes.steps=50",
        "axes.lr_warmup=5",
        "axes.seed=[0,1,2]",
        "axes.seq=16",
    ]
    words += ["axes.eval_batches=2", "axes.diagnose_every=0", "axes.lr=0.003"]
    assert main([*words, "bisect=tensorwise"]) == 0
    assert "nothing to find: with every unit in FP8 the run passes (1 run)" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bisect=tensrwise"], "unknown arm 'tensrwise' (nearest: tensorwise)"),
        (["bisect=base"], "bisect=base: expected an arm that runs FP8 from the first step to the last"),
        (["bisect=base_to_tensorwise"], "expected an arm that runs FP8 from the first step"),
    ],
)
def test_what_cannot_be_bisected_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep=divergence", "device=cpu", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_bisect_needs_the_sweep_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep=cast", "device=cpu", "bisect=eager"]) == 2
    assert "which only sweep=divergence has" in capsys.readouterr().err
