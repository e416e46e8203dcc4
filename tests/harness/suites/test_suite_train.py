"""Suite `train`. Oracles: planted faults, an allocator that is told to run out, the model's own batches and counts."""

from __future__ import annotations

import gzip
import json
import math
import re
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from operator_tape import OperatorTape
from torch import Tensor
from torch._C._autograd import DeviceType
from train_cases import case, execute, row

from fp8core import Float8Linear
from harness.advise import training
from harness.advise.advised_arms import advised_arms
from harness.advise.rates import rates_of
from harness.machine import mfu
from harness.machine.hardware import named
from harness.machine.kernels_by_name import CLASSES
from harness.peers import PEERS
from harness.store.compare import paired_ratios, rows_of
from harness.store.errors import MemoryShortageError, UsageError
from harness.suites import train
from harness.training import captured, on_paper, setup, steps, timed
from harness.training.models import MODELS
from harness.training.models.flops import recomputed
from harness.training.setup import Trainee

USERS = '{"_target_": "model_for_training.build", "batch": "model_for_training.batch", "width": 32}'


# What is measured


def test_an_arm_ends_as_rows_with_what_it_took(tmp_path: Path) -> None:
    frame = execute(tmp_path, ["bf16_eager", "tensorwise_eager"])
    assert set(frame["status"]) == {"ok", "skipped"}
    got = row(frame, "tensorwise_eager")
    assert got["value"] > 0
    facts = got["resolved"]
    assert facts["tokens_per_step"] == 32
    assert facts["fp8_gemms"] == facts["fp8_gemms_expected"] == 27
    assert facts["verify"].startswith("FP8 verified: 9 of 9 Linear layers")
    assert facts["layers"] == "all 2"
    assert len(facts["data_sha256"]) == 64
    assert abs(facts["first_loss"] - facts["first_loss_control"]) < 0.01
    assert json.loads(got["timing"])["method"] == "perf_counter_adjoining"
    flops = json.loads(got["flops"])
    of_bf16 = json.loads(row(frame, "bf16_eager")["flops"])
    assert sum(flops.values()) == sum(of_bf16.values()), "the same products, in another dtype"
    assert set(of_bf16) == {"fp32"}
    assert row(frame, "bf16_eager")["resolved"]["fp8_gemms"] == 0
    predicted = row(frame, "tensorwise_eager", "predicted_memory_bytes")
    assert predicted["value"] == sum(facts["memory"].values()) > 4 * 4 * facts["parameters"]
    for metric in ("peak_memory_bytes", "reserved_memory_bytes", "joules_per_token"):
        assert "cpu" in row(frame, "bf16_eager", metric)["reason"]
    (ratio,) = paired_ratios(frame).to_dict("records")
    assert (ratio["arm"], ratio["baseline"]) == ("tensorwise_eager", "bf16_eager")


@pytest.mark.parametrize("arm", [a for a in train.ARMS if a.endswith("_eager")])
def test_every_eager_arm_is_right_or_says_what_is_missing(arm: str) -> None:
    of = case(model="llama_tiny" if train.ARMS[arm].arm.casts == train.FUSED else "nano")
    why = train.unsupported(of, arm, "cpu")
    if why is not None:
        assert why.kind == "device"
        return
    numerics = train.build(of, arm, "cpu").check()
    assert numerics.ok, numerics.reason


@pytest.mark.parametrize("mode", train.MODES)
def test_a_peer_that_cannot_train_under_autocast_is_skipped_with_the_reason(mode: str) -> None:
    """Oracle: torchao 0.18 itself, whose step fails if it is made all the same; another release may train."""
    arm = f"torchao_rowwise_with_gw_hp_{mode}"
    why = train.unsupported(case(compute="bf16_autocast"), arm, "cpu")
    if PEERS["torchao"].missing("cpu") is not None:
        pytest.skip("torchao is not installed")
    if why is None:
        assert train.build(case(compute="bf16_autocast"), arm, "cpu").check().ok
        return
    assert why.kind == "device"
    assert (
        "can't train rowwise_with_gw_hp on a float32 input under autocast (expected m1 and m2" in why.reason
    )
    with pytest.raises(RuntimeError, match="same dtype"):
        train.build(case(compute="bf16_autocast"), "torchao_rowwise_with_gw_hp_eager", "cpu").check()
    for compute in ("bf16", "fp32"):
        assert train.unsupported(case(compute=compute), "torchao_rowwise_with_gw_hp_eager", "cpu") is None
    for recipe in ("tensorwise", "rowwise"):
        assert train.unsupported(case(compute="bf16_autocast"), f"torchao_{recipe}_eager", "cpu") is None


@pytest.mark.parametrize(
    "axes",
    [
        {"compute": "bf16_autocast"},
        {"compute": "bf16"},
        {"accumulation": 3},
        {"checkpointing": "full"},
        {"checkpointing": "selective"},
        {"model": "llama_tiny"},
        {"model": "llama_moe_tiny"},
        {"model": USERS, "batch": 16},
        {"layers": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("arm", ["tensorwise_eager", "torchao_tensorwise_eager", "bf16_eager"])
def test_every_axis_is_checked_the_same_way(axes: dict[str, Any], arm: str) -> None:
    if train.unsupported(case(**axes), arm, "cpu") is not None:
        pytest.skip("torchao is not installed")
    work = train.build(case(**axes), arm, "cpu")
    numerics = work.check()
    assert numerics.ok, numerics.reason
    assert sum(work.flops.values()) > 0
    if axes.get("accumulation"):
        once = train.build(case(), arm, "cpu")
        assert work.tokens == 3 * once.tokens
        assert sum(work.flops.values()) == 3 * sum(once.flops.values())
        casts = {"tensorwise_eager": "once a step", "torchao_tensorwise_eager": "each microbatch"}
        assert work.resolved.get("weight_casts") == casts.get(arm)
    if axes.get("layers"):
        assert work.resolved["layers"] == "truncated to 1 of 2 layers"


def test_fused_arms_take_the_control_s_step_with_fused_modules(tmp_path: Path) -> None:
    arms = ["bf16_eager", "bf16_fused_eager", "tensorwise_fused_eager"]
    frame = execute(tmp_path, arms, model="llama_tiny", compute="bf16")
    said = {arm: row(frame, arm) for arm in arms}
    assert {arm: r["resolved"]["norm_and_swiglu"] for arm, r in said.items()} == {
        "bf16_eager": "PyTorch's",
        "bf16_fused_eager": "fp8core's fused kernels",
        "tensorwise_fused_eager": "fp8core's fused kernels",
    }
    assert said["tensorwise_fused_eager"]["baseline"] == "bf16_fused_eager"
    assert "verify" in said["tensorwise_fused_eager"]["resolved"]
    why = train.unsupported(case(model="nano"), "bf16_fused_eager", "cpu")
    assert why is not None
    assert "no RMSNorm and no SwiGLU" in why.reason


def test_a_model_whose_own_code_raises_is_a_failed_row(tmp_path: Path) -> None:
    """A ValueError of its forward pass, which only FP8 meets."""
    model = '{"_target_": "model_for_training.fastidious", "batch": "model_for_training.batch"}'
    frame = execute(tmp_path, ["bf16_eager", "tensorwise_eager"], model=model, batch=16, seq=1)
    assert row(frame, "bf16_eager")["status"] == "ok"
    failed = row(frame, "tensorwise_eager")
    assert (failed["status"], failed["cause"]) == ("failed", "build")
    assert failed["reason"].endswith("ValueError: hidden: plain layers only")


def test_experts_in_fp8() -> None:
    """Oracle: `verify` within the check, and the FLOPs of the same case with experts in high precision."""
    mixture = case(model="llama_moe_tiny")
    assert "experts" not in dict(mixture.axes)  # left open it changes no case
    converted = case(model="llama_moe_tiny", experts="fp8")
    for arm, more in (("rowwise_eager", True), ("bf16_eager", False)):
        left, work = train.build(mixture, arm, "cpu"), train.build(converted, arm, "cpu")
        numerics = work.check()
        assert numerics.ok, numerics.reason
        assert (work.flops.get("e4m3", 0) > left.flops.get("e4m3", 0)) == more
        assert sum(work.flops.values()) == sum(left.flops.values())
    for axes, arm, part in (
        ({"model": "llama_moe_tiny"}, "torchao_rowwise_eager", "none for experts"),
        ({"model": "llama_moe_tiny"}, "delayed_eager", "not defined for groups"),
        ({"model": "nano"}, "rowwise_eager", "no module with a GroupedMatmul"),
    ):
        why = train.unsupported(case(**axes, experts="fp8"), arm, "cpu")
        assert why is not None
        assert part in why.reason


def test_all_arms_train_on_the_same_batches() -> None:
    arms = [train._timed(case(), arm, 2, "cpu") for arm in ("bf16_eager", "rowwise_eager")]
    for a, b in zip(arms[0].batches, arms[1].batches, strict=True):
        assert all(torch.equal(x, y) for m, n in zip(a, b, strict=True) for x, y in zip(m, n, strict=True))
    assert not torch.equal(arms[0].batches[0][0][0], arms[0].batches[1][0][0])


def test_a_step_sees_the_same_sequences_however_it_is_cut() -> None:
    whole = train._timed(case(batch=4), "bf16_eager", 4, "cpu").batches[1]
    parts = train._timed(case(accumulation=2), "bf16_eager", 2, "cpu").batches[1]
    for i in range(2):
        assert torch.equal(whole[0][i], torch.cat([part[i] for part in parts]))


@pytest.mark.parametrize("arm", ["bf16_eager", "delayed_eager"])
def test_every_block_times_the_same_steps(arm: str) -> None:
    """Bitwise: losses of two blocks, and of another arm built from the same case."""
    losses = []
    for made in (train._timed(case(), arm, 2, "cpu"), train._timed(case(), arm, 2, "cpu")):
        for _ in range(2):
            with made.resident():
                losses.append(torch.stack([made.run() for _ in range(timed.STEPS + 1)]))
    assert all(torch.equal(losses[0], other) for other in losses[1:])


# Steps that are recorded and replayed


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[OperatorTape]:
    """Steps are recorded by their operators; the tapes in the order in which they were begun."""
    begun: list[OperatorTape] = []

    def begin() -> OperatorTape:
        begun.append(OperatorTape())
        return begun[-1]

    monkeypatch.setattr(captured, "CudaTape", begin)
    monkeypatch.setattr(captured, "refused", lambda *_: "")
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
        want = [eager.run() for _ in range(captured.WARM_UP + timed.STEPS + 1)][captured.WARM_UP :]
    for _ in range(2):
        with made.resident():
            assert not tapes[-1].replays, "recording is no part of what is timed"
            got = [made.run().clone() for _ in want]
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
            losses.append([float(made.run()) for _ in range(timed.STEPS + 1)])
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


def test_a_step_that_cannot_be_recorded_is_a_failed_row(tmp_path: Path, tapes: list[OperatorTape]) -> None:
    """It spoils its process; here, where there is no other, for the arms beside it too (else: test_executor_arms.py)."""
    model = '{"_target_": "model_for_training.copies", "batch": "model_for_training.batch"}'
    frame = execute(tmp_path, ["bf16_eager", "bf16_graph", "tensorwise_graph"], model=model, batch=16)
    why = "CaptureError: the step can't be recorded as a CUDA graph: RefusedError: aten.lift_fresh"
    assert row(frame, "bf16_graph")["reason"].startswith(why)
    for arm in ("bf16_eager", "tensorwise_graph"):
        (reason,) = frame[(frame["arm"] == arm) & (frame["metric"] == "time_ms")]["reason"]
        assert reason.startswith(f"the device was lost in arm bf16_graph: {why}")


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


def flip_one_sign(trainee: Trainee) -> None:
    layer = next(m for m in trainee.model.modules() if isinstance(m, Float8Linear))
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
        (flip_one_sign, r"cosine of -(?:0\.99\d|1\.000) .*; 1 of 1\d weights are as wrong"),
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
    assert row(frame, "bf16_eager")["status"] == "ok"


def test_a_peer_that_runs_no_fp8_is_found_by_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    if train.unsupported(case(), "torchao_tensorwise_eager", "cpu") is not None:
        pytest.skip("torchao is not installed")
    monkeypatch.setattr(setup, "replace_by_peer", lambda model, *_: model)

    def plain(made: setup.Setup, device: str, **more: Any) -> Trainee:
        trainee = setup.prepare(made, device, **more)
        for layer in trainee.model.modules():
            if isinstance(layer, Float8Linear):
                layer.recipe = layer.recipe.emulated()
        return trainee

    monkeypatch.setattr(timed, "prepare", plain)
    numerics = train.build(case(), "torchao_tensorwise_eager", "cpu").check()
    assert numerics.reason == "0 FP8 GEMMs ran in a step where 27 were due: it did not run as asked"


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


# Memory


def runs_out(monkeypatch: pytest.MonkeyPatch, when: Any) -> None:
    """A step of a trainee of which `when` says so meets an allocator that has nothing left."""
    step = Trainee.step

    def refused(self: Trainee, batches: Any, *more: Any, **named: Any) -> Tensor:
        if when(self.setup):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(self, batches, *more, **named)

    monkeypatch.setattr(Trainee, "step", refused)


def test_an_arm_that_runs_out_of_memory_says_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_out(monkeypatch, lambda made: made.recipe is not None)
    frame = execute(tmp_path, ["bf16_eager", "rowwise_eager"])
    got = row(frame, "rowwise_eager")
    assert got["status"] == "failed"
    assert got["reason"].startswith("out of memory: a training step; predicted GiB by part: weights 0.00")
    assert "remedies: batch=1 saves" in got["reason"]
    assert "checkpointing=full saves" in got["reason"]
    assert set(got["resolved"]["remedies"]) == {"batch=1", "checkpointing=full"}
    assert all(saved > 0 for saved in got["resolved"]["remedies"].values())
    assert set(got["resolved"]["memory"]) >= {"weights", "gradients", "optimizer", "activations"}
    assert row(frame, "bf16_eager")["status"] == "ok"


def test_what_ran_out_of_memory_is_let_go_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the report of it is on its way, no tensor of the step that failed is kept."""
    held: list[weakref.ref[Tensor]] = []
    made = train._timed(case(), "rowwise_eager", 2, "cpu")

    def refused(self: Trainee, batches: Any, *more: Any, **named: Any) -> Tensor:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Trainee, "step", refused)
    with pytest.raises(MemoryShortageError, match=r"a training step; predicted"):
        made.check()
    assert [ref() for ref in held] == [None], "pytest still holds the error, and so all frames"


def test_memory_that_runs_out_while_it_is_timed_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10**6))
    runs_out(monkeypatch, lambda made: made.recipe is not None and next(calls) > 8)
    frame = execute(tmp_path, ["bf16_eager", "rowwise_eager"])
    got = row(frame, "rowwise_eager")
    assert got["reason"].startswith("out of memory: a training step; predicted")
    assert set(got["resolved"]["remedies"]) == {"batch=1", "checkpointing=full"}
    assert row(frame, "bf16_eager")["status"] == "ok"


def test_the_control_is_run_in_parts_where_it_does_not_fit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    timed.control_of.cache_clear()
    whole = train._timed(case(batch=4), "tensorwise_eager", 4, "cpu").control
    timed.control_of.cache_clear()
    runs_out(monkeypatch, lambda made: made.recipe is None and made.batch > 1)
    parts = train._timed(case(batch=4), "tensorwise_eager", 4, "cpu").control
    assert parts.first.loss == pytest.approx(whole.first.loss, rel=1e-6)
    assert parts.first.grad_norm == pytest.approx(whole.first.grad_norm, rel=1e-4)
    timed.control_of.cache_clear()


def test_what_is_predicted_not_to_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = on_paper.total(on_paper.memory(train._setup(case(), "bf16_eager", 2), "cpu"))
    monkeypatch.setattr(train, "free_bytes", lambda device: needed - 1)
    monkeypatch.setattr(timed, "prepare", lambda *_: pytest.fail("was made"))
    why = train.unsupported(case(), "bf16_eager", "cpu")
    assert why is not None
    assert why.kind == "device"
    assert why.reason.startswith(
        "out of memory, predicted: a training step needs 0.00 GiB and 0.00 GiB are free"
    )
    assert "GiB by part: " in why.reason


@pytest.mark.parametrize("arms", [["bf16_eager"], ["bf16_eager", "tensorwise_eager", "rowwise_eager"]])
def test_weights_that_do_not_fit_are_refused_without_a_pass_on_paper(
    arms: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass on paper over 80 blocks takes a minute. Oracle: 16 bytes a parameter of AdamW in float32, 256 bytes for words."""
    monkeypatch.setattr(on_paper, "predict", lambda *_, **__: pytest.fail("ran the model on paper"))
    gib = 16 * (MODELS["llama3_70b"].parameters - 2 * (128256 - 256) * 8192) / 2**30
    with pytest.raises(
        UsageError,
        match=rf"none of the arms .* out of memory, predicted: .* at least {gib:.2f} GiB .*by part: optimizer",
    ):
        execute(tmp_path, arms, model="llama3_70b", seq=4096)


def test_a_model_of_which_nothing_can_be_converted_says_which_layers_and_why() -> None:
    model = '{"_target_": "model_for_training.odd", "batch": "model_for_training.batch"}'
    why = train.unsupported(case(model=model), "tensorwise_eager", "cpu")
    assert why is not None
    assert why.kind == "shape"
    assert why.reason.startswith(
        "Odd: no layer can be converted to recipe tensorwise; narrow: N=10 (columns of B) is not a"
    )
    assert train.unsupported(case(model=model), "bf16_eager", "cpu") is None


def test_prediction_is_of_the_setup_and_not_of_how_it_is_compiled() -> None:
    eager, compiled = (train._setup(case(), arm, 2) for arm in ("rowwise_eager", "rowwise_compile"))
    assert on_paper.memory(eager, "cpu") == on_paper.memory(compiled, "cpu")
    assert on_paper.memory(eager, "cpu") != on_paper.memory(train._setup(case(), "bf16_eager", 2), "cpu")


def test_a_stored_step_tells_its_mfu_and_what_recomputation_adds(tmp_path: Path) -> None:
    """harness.machine.mfu on real rows, as if an H200 had taken that long: PaLM's formula for bf16, blocks run again for HFU."""
    frame = execute(tmp_path, ["bf16_eager", "tensorwise_eager"], checkpointing="full", compute="bf16")
    device = named("h200")
    times = {r["arm"]: r for r in rows_of(frame[frame["metric"] == "time_ms"])}
    for arm, stored in times.items():
        palm, causal = mfu.of_row(stored, device)
        flops = sum(json.loads(stored["flops"]).values())
        assert (palm.formula, causal.formula) == ("palm", "causal")
        assert palm.model_tflops == pytest.approx(flops / (stored["value"] * 1e-3) / 1e12)
        assert palm.tokens_per_s == json.loads(stored["resolved"])["tokens_per_step"] / (
            stored["value"] * 1e-3
        )
        assert causal.mfu_mixed < palm.mfu_mixed
        assert palm.hfu > palm.mfu_mixed
        again = train._setup(case(checkpointing="full", compute="bf16"), arm, 2)
        added = on_paper.recomputed_flops(again)["palm"]
        assert sum(added.values()) == sum(recomputed(on_paper.skeleton(again), 2, again.seq).values()) > 0
    bf16 = mfu.of_row(times["bf16_eager"], device)[0]
    assert bf16.mfu_mixed == pytest.approx(bf16.model_tflops / 989.0, rel=1e-9)
    assert mfu.of_row(times["tensorwise_eager"], device)[0].fp8_share > 0.5


@pytest.mark.parametrize(("fits", "expected"), [(1, 1), (4, 4), (7, 4), (64, 32)])
def test_the_largest_batch_is_tried_and_not_only_predicted(
    monkeypatch: pytest.MonkeyPatch, fits: int, expected: int
) -> None:
    """Room for 16 sequences by the prediction; the allocator says otherwise. One step beyond it is tried too."""
    room = on_paper.total(on_paper.memory(train._setup(case(), "tensorwise_eager", 16), "cpu"))
    monkeypatch.setattr(train, "free_bytes", lambda device: room)
    runs_out(monkeypatch, lambda made: made.recipe is not None and made.batch > fits)
    found = train.largest(case(batch=train.MAX), "tensorwise_eager", "cpu")
    assert found.setup.batch == found.resolved["batch"] == expected
    assert found.workload().tokens == found.resolved["tokens_per_step"] == 16 * expected
    assert found.check().ok


def test_not_even_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "free_bytes", lambda device: 2**22)
    runs_out(monkeypatch, lambda made: made.recipe is not None)
    with pytest.raises(MemoryShortageError, match="checkpointing=full saves"):
        train.largest(case(batch=train.MAX), "tensorwise_eager", "cpu")


def test_the_largest_batch_is_skipped_on_a_cpu() -> None:
    why = train.unsupported(case(batch=train.MAX), "bf16_eager", "cpu")
    assert why is not None
    assert why.reason == "batch=max is determined on a GPU; give a number"


# Profile


def test_a_profile_is_a_trace_and_a_time_for_each_class(tmp_path: Path) -> None:
    frame = execute(
        tmp_path, ["bf16_eager", "tensorwise_eager"], profile=True, profile_start=1, profile_end=2
    )
    parts = frame[(frame["metric"] == "kernel_time_ms") & (frame["arm"] == "tensorwise_eager")]
    assert set(parts["part"]) == {"fp8_gemm", "cast", "attention", "optimizer", "other"}
    assert set(frame["part"]) - {""} <= set(CLASSES)
    assert (parts["value"] > 0).all()
    control = frame[(frame["metric"] == "kernel_time_ms") & (frame["arm"] == "bf16_eager")]
    assert "fp8_gemm" not in set(control["part"])
    facts = row(frame, "tensorwise_eager")["resolved"]
    assert facts["trace_steps"] == [1, 2]
    with gzip.open(tmp_path / facts["trace"]) as file:
        events = json.load(file)["traceEvents"]
    assert {e["name"] for e in events} >= {"step 1", "step 2", "aten::_scaled_mm"}
    assert "step 0" not in {e["name"] for e in events}


def kernel(name: str, us: float, annotation: bool = False) -> Any:
    """An event of the device's own."""
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA,
        self_device_time_total=us,
        kernels=[],
        is_user_annotation=annotation,
    )


def operator(name: str, parent: Any = None, kernels: tuple[tuple[str, float], ...] = ()) -> Any:
    """An operator on the host, with the kernels that it launched."""
    launched = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels]
    return SimpleNamespace(
        name=name, device_type=DeviceType.CPU, cpu_parent=parent, kernels=launched, self_cpu_time_total=1e6
    )


def test_kernels_are_named_by_themselves_or_by_what_launched_them() -> None:
    """By hand, two steps: a kernel of no name within an FP8 layer casts; one that no operator claims has its name."""
    layer = operator("_ScaledLinear")
    plain, gemm, copied = (
        "elementwise_kernel",
        "nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT",
        "triton_poi_fused_add_4",
    )
    events = [
        layer,
        operator("aten::mul", layer, ((plain, 300.0),)),
        operator("aten::_scaled_mm", layer, ((gemm, 4000.0),)),
        operator("aten::add", None, ((plain, 500.0),)),
        kernel(plain, 300.0),
        kernel(plain, 500.0),
        kernel(gemm, 4000.0),
        kernel(copied, 700.0),
        kernel("triton_red_fused_abs_max_2", 100.0),
        kernel("step 0", 9000.0, annotation=True),
    ]
    assert steps.breakdown(events, 2) == pytest.approx({"cast": 0.2, "fp8_gemm": 2.0, "other": 0.6})


@pytest.mark.slow
def test_compiled_arms_are_compiled_cold_and_warm_and_never_again(tmp_path: Path) -> None:
    if train.unsupported(case(), "bf16_compile", "cpu") is not None:
        pytest.skip("no compiler here")
    frame = execute(tmp_path, ["bf16_compile", "delayed_compile"])
    assert set(frame["status"]) == {"ok", "skipped"}
    for arm in ("bf16_compile", "delayed_compile"):
        compiling = frame[(frame["arm"] == arm) & (frame["metric"] == "compile_s")].set_index("part")["value"]
        assert compiling["warm"] < compiling[""]
        facts = row(frame, arm)["resolved"]
        assert (facts["compile_graphs"], facts["compile_graph_breaks"], facts["compile_cache"]) == (
            1,
            0,
            "cold",
        )


# Requests that are refused


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"model": "gpt3"}, "unknown model 'gpt3'"),
        ({"data": "wiki"}, "unknown data 'wiki'"),
        ({"seq": 257}, "seq=257: model nano takes at most 256 tokens"),
        ({"layers": 3}, "layers=3: model nano has 2"),
        ({"profile_start": 5}, "profile_end=3 lies before profile_start=5"),
        ({"ceilings": "a-run"}, r"ceilings=a-run is read with axes\.convert=advised alone; add it or leave"),
    ],
)
def test_what_cannot_be_is_refused(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        case(**axes)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            "fails",
            r"fails\(step=0, seed=0, batch_size=2, device=cpu\) failed: FileNotFoundError: no data today",
        ),
        ("unseeded", "unseeded returned two different batches for the same step=0 and seed=0"),
    ],
)
def test_a_batch_function_that_cannot_be_used_is_refused_before_anything_is_built(
    batches: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        case(model=f'{{"_target_": "model_for_training.build", "batch": "model_for_training.{batches}"}}')


# Only the layers that pay

SLOW = {"bf16": 3e10, "fp8": 1e15, "dispatch": 1e-12, "launch": 1e-12}


def machine(monkeypatch: pytest.MonkeyPatch, **figures: float) -> None:
    """Advises as if here were an H200, with some of its figures changed."""
    rates = rates_of(named("h200"))
    changed = {name: replace(rates.figures[name], value=value) for name, value in figures.items()}
    made = training.Machine(replace(rates, figures={**rates.figures, **changed}), "9.0", "abc")
    monkeypatch.setattr(training, "machine_here", lambda device, run: made)


def test_a_recorded_step_is_advised_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction is of eager and compiled steps, which wait for launches that a recorded one does not have."""
    machine(monkeypatch)
    of = case(model="llama_tiny", compute="bf16_autocast", convert="advised")
    monkeypatch.setattr(train.captured, "refused", lambda device, experts: "")
    why = train.unsupported(of, "tensorwise_graph", "cpu")
    assert why is not None
    assert "take RECIPE_eager" in why.reason
    assert train.unsupported(of, "tensorwise_eager", "cpu") is None


def test_an_advised_arm_converts_the_layers_that_pay_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, at 30 GFLOP/s in bf16 and 2 us a kernel: three products of 48 x 48 with 32 tokens take 4.9 us each, in FP8 2
    and six kernels of casts 12 in all: 0.82x. A layer three times as wide takes three times as long in bf16 alone."""
    machine(monkeypatch, **SLOW)
    arms = ["bf16_eager", "tensorwise_eager", "torchao_tensorwise_eager"]
    frame = execute(tmp_path, arms, compute="bf16_autocast", convert="advised")
    facts = row(frame, "tensorwise_eager")["resolved"]
    advice = facts["advice"]
    left = ["layers.0.attention.proj", "layers.1.attention.proj"]
    assert list(advice["left_in_bf16"]) == left
    assert all(why.startswith("0.82x predicted") for why in advice["left_in_bf16"].values())
    assert len(advice["converted"]) == facts["fp8_layers"] == 7
    assert facts["fp8_gemms"] == facts["fp8_gemms_expected"] == 3 * 7
    assert facts["skipped_layers"] == dict.fromkeys(left, "left out by module_filter_fn")
    assert (facts["convert"], advice["decision"], advice["mode"]) == ("advised", "only these layers", "eager")
    assert (advice["ceilings_sha256"], advice["rates"]["bf16"]["value"]) == ("abc", 3e10)
    flops = json.loads(row(frame, "tensorwise_eager")["flops"])
    assert 0 < flops["e4m3"] < sum(flops.values())
    assert "advice" not in row(frame, "bf16_eager")["resolved"]
    if PEERS["torchao"].missing("cpu") is None:
        theirs = row(frame, "torchao_tensorwise_eager")["resolved"]
        assert theirs["advice"] == advice, "the same places"
        assert theirs["fp8_gemms"] == 3 * 7
    (found, *_) = advised_arms(frame)
    assert (found.converted, found.layers) == (7, 9)


@pytest.mark.parametrize("arm", ["tensorwise_eager", "torchao_tensorwise_eager", "delayed_fused_eager"])
def test_where_nothing_pays_an_advised_arm_is_its_control(monkeypatch: pytest.MonkeyPatch, arm: str) -> None:
    """Layers of width 48 on an H200: no FP8 GEMM runs, which the same count proves that proves a control."""
    machine(monkeypatch)
    of = case(model="llama_tiny", compute="bf16_autocast", convert="advised")
    if train.unsupported(of, arm, "cpu") is not None:
        pytest.skip("torchao is not installed")
    work = train.build(of, arm, "cpu")
    assert work.check().ok
    facts: Any = work.resolved
    assert (facts["fp8_gemms"], facts["fp8_gemms_expected"], facts["fp8_layers"]) == (0, 0, 0)
    assert facts["recipe"] == "bf16"
    assert facts["advice"]["decision"] == "off"
    assert facts["advice"]["runs_as"] == "its control: no layer is converted"
    assert facts["advice"]["recipe"] == train.ARMS[arm].recipe
    assert set(work.flops) == {"bf16"}
    if arm.endswith(train.FUSED):
        assert facts["norm_and_swiglu"] == "fp8core's fused kernels"


def test_cases_of_before_keep_their_ids() -> None:
    assert not {"convert", "ceilings"} & dict(case().axes).keys()
    advised = case(convert="advised", compute="bf16")
    assert advised.case_id != case(compute="bf16").case_id
    there = case(convert="advised", compute="bf16", ceilings="somewhere")
    assert there.case_id == advised.case_id, "its content is known by the sha256 in the rows"
    assert "somewhere" not in there.axes_json


@pytest.mark.parametrize(
    ("axes", "arm", "kind", "reason"),
    [
        ({}, "tensorwise_eager", "device", "this is a cpu; leave axes.convert out to convert all layers"),
        ({}, "bf16_eager", None, ""),
        ({"compute": "fp32"}, "tensorwise_eager", "shape", "with compute=fp32 take axes.convert=all"),
        (
            {"experts": "fp8", "model": "llama_moe_tiny"},
            "tensorwise_eager",
            "shape",
            "with it leave experts=hp",
        ),
    ],
)
def test_where_there_is_no_advice_the_arm_says_why(
    axes: dict[str, Any], arm: str, kind: str | None, reason: str
) -> None:
    why = train.unsupported(case(**{"compute": "bf16", "convert": "advised", **axes}), arm, "cpu")
    assert (why.kind if why else None) == kind
    assert reason in (why.reason if why else "")


def test_the_largest_batch_is_advised_at_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the tokens make twice the work of a product, and leave its casts at their 2 us: then the narrow layers pay too."""
    machine(monkeypatch, **SLOW)
    of = case(compute="bf16_autocast", convert="advised")
    left = [train._timed(of, "tensorwise_eager", batch, "cpu").setup.left_out for batch in (2, 4)]
    assert [len(names) for names in left] == [2, 0]


def test_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="whole models"):
        train.points(["llama3_8b"], {}, None)


@pytest.mark.parametrize(
    ("axes", "arm", "kind", "reason"),
    [
        (
            {"batch": 1, "seq": 17},
            "tensorwise_eager",
            "shape",
            "batch x seq = 17 tokens; GEMM grad_weight takes",
        ),
        ({"batch": 1, "seq": 17}, "rowwise_with_gw_hp_eager", None, ""),
        ({"batch": 1, "seq": 17}, "bf16_eager", None, ""),
        ({}, "mxfp8_eager", "device", "no kernel for 1x32"),
        ({}, "nocompile_tensorwise_eager", "device", "Triton"),
        ({}, "tensorwise_graph", "device", "a step is recorded as a CUDA graph; a cpu has none"),
    ],
)
def test_what_cannot_run_says_why(axes: dict[str, Any], arm: str, kind: str | None, reason: str) -> None:
    why = train.unsupported(case(**axes), arm, "cpu")
    assert (why.kind if why else None) == kind
    assert reason in (why.reason if why else "")


def test_ratios_are_taken_within_a_mode() -> None:
    for arm, info in train.ARMS.items():
        mode = "_fused_eager" if info.arm.casts == train.FUSED else f"_{info.arm.mode}"
        own = {"bf16_eager": ""} | dict.fromkeys(
            ("bf16_compile", "bf16_fused_eager", "bf16_graph"), "bf16_eager"
        )
        mode = "_eager" if mode == f"_{train.LINEARS}" else mode  # all but its Linears is
        assert info.baseline == own.get(arm, f"bf16{mode}")
        assert bool(info.recipe) == (not arm.startswith("bf16_"))
