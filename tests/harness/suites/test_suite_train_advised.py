"""Suite `train`: arms that convert the layers that pay and no others. Oracle: figures of a machine made up for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train_cases import case, execute, row

from harness.advise import training
from harness.advise.advised_arms import advised_arms
from harness.advise.rates import rates_of
from harness.machine.hardware import named
from harness.peers import PEERS
from harness.suites import train

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
    monkeypatch.setattr(train.cuda_graph, "refused", lambda device, experts: "")
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
