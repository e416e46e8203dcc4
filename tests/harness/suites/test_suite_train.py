"""Suite `train`. Oracles: the model's own batches and counts. Faults, memory and advice have files of their own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from train_cases import case, execute, row

from harness.machine.kernels_by_name import CLASSES
from harness.peers import PEERS
from harness.store.compare import paired_ratios
from harness.store.errors import UsageError
from harness.suites import train
from harness.training import steps, timed

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
