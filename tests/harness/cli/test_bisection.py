"""Culprits. Oracle: a planted fault, NaN in the first step whenever one GEMM of one layer runs in FP8; nothing trains."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from harness.__main__ import main
from harness.cli import bisection
from harness.training.loop import Curves, Result

if TYPE_CHECKING:
    from harness.training.loop import TrainingJob

SICK, GEMM = "layers.0.mlp.up", "grad_input"
WORDS = ["sweep=divergence", "device=cpu", "axes.steps=60", "axes.seed=[0,1,2]", "bisect=tensorwise"]


def trained(job: TrainingJob, device: str) -> Result:
    """What training would return: NaN at step 0 with the sick GEMM in FP8, else a falling curve of the seed."""
    held = {rule for text in str(job.schedule).split(",") for rule in [text.removeprefix("keep_bf16@")]}
    curves = Curves()
    curves.add("heldout_loss", 0, 3.6)
    if job.setup.recipe is not None and not held & {SICK, f"{SICK}:{GEMM}"}:
        return Result(curves, 0, "loss is nan at step 0", {})
    loss = 2.1 + 1.4 * np.exp(-np.arange(60) / 8) + np.random.default_rng(job.setup.seed).normal(0, 0.01, 60)
    for step, value in enumerate(loss.tolist()):
        curves.add("loss", step, value)
        curves.add("grad_norm", step, 1.0)
    curves.add("heldout_loss", 60, float(loss[-1]))
    return Result(curves, None, "", {})


def test_nan_in_the_first_step_is_bisected_as_any_other_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bisection, "train", trained)
    assert main(WORDS) == 0
    printed = capsys.readouterr().out
    assert f"tensorwise, layers: {SICK} fails by itself; everything else in FP8 passes" in printed
    assert f"tensorwise, GEMMs: {SICK}:{GEMM} fails by itself" in printed


def test_a_run_without_a_single_loss_has_broken_at_its_first_step() -> None:
    run = bisection._run(Result(Curves(), 0, "loss is nan at step 0", {}), 60)
    assert run.broke_at == 0
    assert math.isnan(run.loss.values[0])


def test_an_error_of_training_or_of_the_verdict_is_no_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only bisection's own word, that FP8 is not the cause, may be printed as what was found."""

    def broken(job: TrainingJob, device: str) -> Result:
        if job.setup.recipe is None:  # the control trains before the bisection begins
            return trained(job, device)
        raise ValueError("a fault of the harness")

    monkeypatch.setattr(bisection, "train", broken)
    assert main(WORDS) == 7
    assert "internal error: ValueError: a fault of the harness" in capsys.readouterr().err


@pytest.mark.parametrize("dry", ["false", "true"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep=train", "bisect=tensorwise_eager"], "training runs, which only sweep=divergence has"),
        (["sweep=divergence", "bisect=tensorwize"], "unknown arm 'tensorwize' (nearest: tensorwise)"),
        (
            ["sweep=divergence", "bisect=base"],
            "expected an arm that runs FP8 from the first step to the last",
        ),
        (["sweep=divergence", "bisect=base_to_tensorwise"], "expected an arm that runs FP8 from the first"),
        (
            ["sweep=divergence", "bisect=tensorwise", "resume=x"],
            "a bisection stores nothing, so resume=x",
        ),
    ],
)
def test_what_cannot_be_bisected_is_refused_whether_dry_or_not(
    words: list[str], message: str, dry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "device=cpu", f"dry_run={dry}"]) == 2
    assert message in capsys.readouterr().err
