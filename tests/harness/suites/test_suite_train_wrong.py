"""Suite `train`: steps that are recorded and replayed, and planted faults: a wrong arm gets no speed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from operator_tape import OperatorTape
from torch import Tensor
from train_cases import case, execute, row

from fp8core import Float8Linear
from harness.engine import arm_process
from harness.suites import train
from harness.training import cuda_graph, setup, steps, timed

if TYPE_CHECKING:
    from harness.training.setup import Trainee

# Steps that are recorded and replayed


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[OperatorTape]:
    """Steps are recorded by their operators; the tapes in the order in which they were begun."""
    begun: list[OperatorTape] = []

    def begin() -> OperatorTape:
        begun.append(OperatorTape())
        return begun[-1]

    monkeypatch.setattr(cuda_graph, "CudaTape", begin)
    monkeypatch.setattr(cuda_graph, "refused", lambda *_: "")
    return begun


@pytest.mark.parametrize(
    ("axes", "arm"),
    [
        ({"accumulation": 2, "checkpointing": "full"}, "delayed_graph"),
        ({"model": "llama_tiny", "compute": "bf16_autocast"}, "tensorwise_graph"),
    ],
)
def test_replayed_arms_take_the_eager_arm_s_steps(
    axes: dict[str, Any], arm: str, tapes: list[OperatorTape]
) -> None:
    """Bitwise, in every block: the eager arm's losses after as many steps as the warm-up takes."""
    eager = train._timed(case(**axes), arm.replace("graph", "eager"), 2, "cpu")
    made = train._timed(case(**axes), arm, 2, "cpu")
    assert made.check().ok
    assert made.resolved["compile"] == "eager, recorded as one CUDA graph"
    assert made.resolved["replayed_losses"] == made.resolved["eager_losses"]
    with eager.resident():
        want = [eager.stepper.run() for _ in range(cuda_graph.WARM_UP + timed.STEPS + 1)][
            cuda_graph.WARM_UP :
        ]
    for _ in range(2):
        with made.resident():
            assert not tapes[-1].replays, "recording is no part of what is timed"
            got = [made.stepper.run().clone() for _ in want]
        assert torch.equal(torch.stack(got), torch.stack(want))
        assert tapes[-1].replays == len(want)
    assert len(tapes) == 3, "each time that memory comes back it is recorded anew"
    assert all(tape.erased for tape in tapes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("axes", "arm"),
    [
        ({}, "bf16_graph"),
        ({"accumulation": 2}, "tensorwise_graph"),
        ({"checkpointing": "full"}, "delayed_graph"),
    ],
)
def test_on_a_gpu_replays_agree_with_eager_steps(axes: dict[str, Any], arm: str) -> None:
    """Oracle: the check of the arm itself, in which the same steps run eagerly; then two blocks of one graph each."""
    made = train._timed(case(compute="bf16_autocast", **axes), arm, 2, "cuda")
    numerics = made.check()
    assert numerics.ok, numerics.reason
    losses = []
    for _ in range(2):
        with made.resident():
            losses.append([float(made.stepper.run()) for _ in range(timed.STEPS + 1)])
    assert losses[0] == pytest.approx(losses[1], abs=steps.LOSS_BOUND)
    assert losses[0][timed.STEPS] < losses[0][0], "the first batch again, after as many steps"


def weights_that_stay(tape: OperatorTape) -> None:
    tape.calls[:] = [call for call in tape.calls if "adamw" not in str(call.func)]


def a_batch_that_is_not_read(tape: OperatorTape) -> None:
    tokens = next(call for call in tape.calls if "embedding" in str(call.func)).args[1]
    tokens.zero_()


@pytest.mark.parametrize("change", [weights_that_stay, a_batch_that_is_not_read])
def test_replays_that_are_not_the_eager_steps_are_a_failed_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tapes: list[OperatorTape], change: Any
) -> None:
    replay = OperatorTape.replay

    def changed(tape: OperatorTape) -> None:
        change(tape)
        replay(tape)

    monkeypatch.setattr(OperatorTape, "replay", changed)
    frame = execute(tmp_path, ["bf16_eager", "bf16_graph"])
    assert re.fullmatch(
        r"numerics: loss \d\.\d+ in replay [01], \d\.\d+ in the same step run eagerly: at most 0\.02 allowed",
        row(frame, "bf16_graph")["reason"],
    )
    assert row(frame, "bf16_eager")["status"] == "ok"


def test_a_step_that_cannot_be_recorded_is_a_failed_row(
    tmp_path: Path, tapes: list[OperatorTape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It spoils its process; here, where there is no other, for the arms beside it too (else: test_survival.py)."""
    monkeypatch.setattr(arm_process, "_spoiled", [])  # of this process, which other tests use
    model = '{"_target_": "model_for_training.copies", "batch": "model_for_training.batch"}'
    frame = execute(tmp_path, ["bf16_eager", "bf16_graph", "tensorwise_graph"], model=model, batch=16)
    why = "CaptureError: the step can't be recorded as a CUDA graph: RefusedError: aten.lift_fresh"
    for arm in ("bf16_eager", "bf16_graph", "tensorwise_graph"):
        reasons = frame[(frame["arm"] == arm) & (frame["status"] == "failed")]["reason"]
        assert len(reasons)
        assert reasons.str.contains(why, regex=False).all()


# A wrong arm gets no speed


def wrong(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Every FP8 trainee is changed after it was made."""

    def prepare(made: setup.Setup, device: str, **more: Any) -> Trainee:
        trainee = setup.prepare(made, device, **more)
        if made.recipe is not None:
            change(trainee)
        return trainee

    monkeypatch.setattr(timed, "prepare", prepare)


def emulate(trainee: Trainee) -> None:
    layer = next(m for m in trainee.model.modules() if isinstance(m, Float8Linear))
    layer.recipe = layer.recipe.emulated()


def half_the_gradient(trainee: Trainee) -> None:
    run = trainee.run

    def half(*batch: Tensor) -> Tensor:
        loss = run(*batch)
        return loss / 2 + loss.detach() / 2

    trainee.run = half


def another_loss(trainee: Trainee) -> None:
    run = trainee.run
    trainee.run = lambda *batch: run(*batch) + 0.03


def flip_the_sign(trainee: Trainee) -> None:
    """Negate the gradient of every FP8 weight; loss and norm do not change."""
    for layer in trainee.model.modules():
        if isinstance(layer, Float8Linear):
            layer.weight.register_hook(lambda grad: -grad)


def fewer_calls(trainee: Trainee) -> None:
    layer: Any = next(m for m in trainee.model.modules() if isinstance(m, Float8Linear))
    layer.forward = lambda x: torch.nn.functional.linear(
        x.hp if hasattr(x, "hp") else x, layer.weight, layer.bias
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (emulate, "FP8 NOT verified: "),
        (half_the_gradient, "norm of the first gradients"),
        (another_loss, r"first loss .*: 0\.0.* apart, 0\.02 allowed"),
        (flip_the_sign, r"cosine of -(?:0\.99\d|1\.000) .*; 9 of 1\d weights are as wrong"),
        (fewer_calls, "FP8 NOT verified: "),
    ],
)
def test_a_wrong_arm_is_a_failed_row_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    wrong(monkeypatch, change)
    frame = execute(tmp_path, ["bf16_eager", "tensorwise_eager"])
    failed = frame[(frame["arm"] == "tensorwise_eager") & (frame["status"] != "skipped")]
    assert set(failed["status"]) == {"failed"}
    assert failed["reason"].str.contains(reason).all()
    assert row(frame, "bf16_eager")["status"] == "ok", row(frame, "bf16_eager")["reason"]


def test_bounds_of_the_first_step() -> None:
    base = steps.FirstStep(5.0, 2.0)
    for mine, fine in (
        ((5.019, 2.0), True),
        ((5.021, 2.0), False),
        ((4.979, 2.0), False),
        ((5.0, 2.19), True),
        ((5.0, 2.21), False),
        ((5.0, 1.83), True),
        ((5.0, 1.81), False),
        ((float("nan"), 2.0), False),
        ((5.0, float("nan")), False),
        ((float("inf"), 2.0), False),
    ):
        assert (steps.first_step_fault(steps.FirstStep(*mine), base) == "") is fine, mine


def test_the_loss_bound_follows_the_logits() -> None:
    """Oracle: by hand, 4 % of a spread of 1.4 is 0.056; the spread itself by numpy's rule on a known product."""
    base = steps.FirstStep(6.5, 2.0, logit_spread=1.4)
    for gap, fine in ((0.055, True), (-0.055, True), (0.057, False), (float("nan"), False)):
        assert (steps.first_step_fault(steps.FirstStep(6.5 + gap, 2.0), base) == "") is fine, gap
    assert steps.FirstStep(5.0, 2.0, logit_spread=0.1).loss_bound == steps.LOSS_BOUND
    for lost in (math.inf, math.nan):
        broken = steps.FirstStep(lost, 2.0, logit_spread=lost)
        assert steps.first_step_fault(base, broken)
        assert steps.first_step_fault(broken, broken)
    model: Any = torch.nn.Module()
    trainee: Any = SimpleNamespace(model=model, setup=SimpleNamespace(vocab_size=2))
    with steps.spread_of_logits(trainee) as without_a_head:
        pass
    model.head = torch.nn.Identity()
    with steps.spread_of_logits(trainee) as spread:
        model.head(torch.tensor([1.0, 3.0]).repeat(2, 700, 1))
        model.head(torch.randn(2, 3, 4))  # no logits of this vocabulary
        model.head("no tensor")
    model.head(torch.zeros(2, 3, 2))
    assert spread == [pytest.approx(math.sqrt(2))]
    assert not without_a_head


def test_only_the_controls_logits_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an arm's check keeps in memory is what its steps keep."""
    timed.control_of.cache_clear()
    made = train._timed(case(), "tensorwise_eager", 2, "cpu")
    assert made.control.logit_spread > 0
    monkeypatch.setattr(steps, "spread_of_logits", None)
    assert made.check().ok


def test_bounds_of_the_first_gradients() -> None:
    """By hand: 59 and 61 degrees between two vectors, one that is gone, and one that is not there to be compared."""
    base = steps.FirstStep(5.0, 2.0, {"a": torch.tensor([1.0, 0.0]), "unused": torch.zeros(2)})

    def fault(gradient: list[float]) -> str:
        mine = steps.FirstStep(5.0, 2.0, {"a": torch.tensor(gradient), "unused": torch.ones(2)})
        return steps.first_step_fault(mine, base)

    for degrees, fine in ((0, True), (59, True), (61, False), (180, False)):
        angle = math.radians(degrees)
        assert (fault([1e-9 * math.cos(angle), 1e-9 * math.sin(angle)]) == "") is fine, degrees
    assert fault([0.0, 0.0]).startswith("first gradient of a has a cosine of 0.000")
    assert "cosine of nan" in fault([float("nan"), 0.0])
    gone = steps.first_step_fault(steps.FirstStep(5.0, 2.0), base)
    assert gone == "no gradient of a in the first step (2 in all), the baseline has one"
