"""Suite `train`. Oracles: the model's own batches and counts. Faults, memory and advice have files of their own."""

from __future__ import annotations

import gzip
import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from train_cases import case, execute, row

from harness.advise import training
from harness.advise.advised_arms import advised_arms
from harness.advise.decide import HEAD
from harness.advise.rates import rates_of
from harness.machine.hardware import named
from harness.machine.kernels_by_name import CLASSES
from harness.peers import PEERS
from harness.store.errors import MemoryShortageError, UsageError
from harness.suites import train
from harness.training import meta_estimate, steps, timed
from harness.training.models import MODELS
from harness.training.setup import Trainee

USERS = '{"_target_": "model_for_training.build", "batch": "model_for_training.batch", "width": 32}'


# What is measured


AXES: list[dict[str, Any]] = [
    {"compute": "bf16_autocast"},
    {"compute": "bf16"},
    {"accumulation": 3},
    {"checkpointing": "selective"},
    {"model": "llama_moe_tiny"},
    {"model": USERS, "batch": 16},
    {"checkpointing": "full"},
    {"model": "llama_tiny"},
    {"layers": 1},
]


@pytest.mark.parametrize(
    ("arm", "axes"),
    [
        *((arm, axes) for arm in ("tensorwise_eager", "bf16_eager") for axes in AXES),
        *(("torchao_tensorwise_eager", axes) for axes in AXES[:6]),  # what its layers may meet in another way
    ],
    ids=str,
)
def test_every_axis_is_checked_the_same_way(arm: str, axes: dict[str, Any]) -> None:
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


def test_the_control_is_run_in_parts_where_it_does_not_fit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    timed.control_of.cache_clear()
    whole = train._timed(case(batch=4), "tensorwise_eager", 4, "cpu").control
    timed.control_of.cache_clear()
    runs_out(monkeypatch, lambda made: made.recipe is None and made.batch > 1)
    parts = train._timed(case(batch=4), "tensorwise_eager", 4, "cpu").control
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    timed.control_of.cache_clear()


def test_what_is_predicted_not_to_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = meta_estimate.total(meta_estimate.memory(train._setup(case(), "bf16_eager", 2), "cpu"))
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
    monkeypatch.setattr(meta_estimate, "predict", lambda *_, **__: pytest.fail("ran the model on paper"))
    gib = 16 * (MODELS["llama3_70b"].parameters - 2 * (128256 - 256) * 8192) / 2**30
    with pytest.raises(
        UsageError,
        match=rf"none of the arms .* out of memory, predicted: .* at least {gib:.2f} GiB .*by part: optimizer",
    ):
        execute(tmp_path, arms, model="llama3_70b", seq=4096)


@pytest.mark.parametrize(("fits", "expected"), [(1, 1), (4, 4), (7, 4), (64, 32)])
def test_the_largest_batch_is_tried_and_not_only_predicted(
    monkeypatch: pytest.MonkeyPatch, fits: int, expected: int
) -> None:
    """Room for 16 sequences by the prediction; the allocator says otherwise. One step beyond it is tried too."""
    room = meta_estimate.total(meta_estimate.memory(train._setup(case(), "tensorwise_eager", 16), "cpu"))
    monkeypatch.setattr(train, "free_bytes", lambda device: room)
    runs_out(monkeypatch, lambda made: made.recipe is not None and made.batch > fits)
    found = train.largest(case(batch=train.MAX), "tensorwise_eager", "cpu")
    assert found.setup.batch == found.resolved["batch"] == expected
    assert found.workload().tokens == found.resolved["tokens_per_step"] == 16 * expected
    assert found.check().ok


# Only the layers that pay

SLOW = {"bf16": 3e10, "fp8": 1e15, "dispatch": 1e-12, "launch": 1e-12}


def machine(monkeypatch: pytest.MonkeyPatch, **figures: float) -> None:
    """Advises as if here were an H200, with some of its figures changed."""
    rates = rates_of(named("h200"))
    changed = {name: replace(rates.figures[name], value=value) for name, value in figures.items()}
    made = training.AdvisedMachine(replace(rates, figures={**rates.figures, **changed}), "9.0", "abc")
    monkeypatch.setattr(training, "machine_here", lambda device, run: made)


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
    left = ["head", "layers.0.attention.proj", "layers.1.attention.proj"]
    assert list(advice["left_in_bf16"]) == left
    assert HEAD in advice["left_in_bf16"]["head"]
    assert all(advice["left_in_bf16"][fqn].startswith("0.82x predicted") for fqn in left[1:])
    assert facts["fp8_gemms"] == facts["fp8_gemms_expected"] == 3 * 6
    assert (advice["decision"], advice["ceilings_sha256"]) == ("only these layers", "abc")
    flops = json.loads(row(frame, "tensorwise_eager")["flops"])
    assert 0 < flops["e4m3"] < sum(flops.values())
    assert "advice" not in row(frame, "bf16_eager")["resolved"]
    if PEERS["torchao"].missing("cpu") is None:
        theirs = row(frame, "torchao_tensorwise_eager")["resolved"]
        assert theirs["advice"] == advice, "the same places"
        assert theirs["fp8_gemms"] == 3 * 6
    (found, *_) = advised_arms(frame)
    assert (found.converted, found.layers) == (6, 9)


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


def test_how_long_a_case_takes_at_the_least() -> None:
    """Oracle: the FLOPs that its workload declares, times four steps of two arms; a batch that is to be found says nothing."""
    arms = ("bf16_eager", "tensorwise_eager")
    flops = sum(train.build(case(model="nano"), arms[0], "cpu").flops.values())
    assert train.least_seconds(case(model="nano"), arms, 1e9) == pytest.approx(2 * 4 * flops / 1e9)
    assert train.least_seconds(case(model="nano", batch="max"), arms, 1e9) == 0.0
