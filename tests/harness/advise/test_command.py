"""What the command answers. Oracles: what it prints must agree with what it writes as JSON; stored rows that are made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from advice_asked import plain, refused, said
from report_cases import gpu_run
from report_fixtures import H200, write_run
from stored import row

from fp8core import audit
from harness.advise.decide import HEAD
from harness.store.case import Case
from harness.training.models import resolve

if TYPE_CHECKING:
    from harness.store.measurement import Measurement


def test_the_filter_that_is_printed_converts_the_layers_that_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("gpu=h100", "tp=8", "dp=8", "tokens=65536", "recipe=tensorwise", "fp8_all_gather=false")
    found = plain(capsys, "model=llama3_8b", *words)
    assert found["decision"] == "only these layers"
    module = resolve("llama3_8b").build(device="meta", dtype=torch.bfloat16)
    exec(found["filter"]["code"], {"model": module})
    chosen = {layer["fqn"] for layer in found["layers"] if layer["converted"]}
    assert {layer.fqn for layer in audit(module).converted} == chosen
    assert "layers.0.attention.o" not in chosen
    odd = plain(capsys, "model=gpt2", "gpu=rtx_4090", "recipe=tensorwise", "mode=eager")
    reasons = {layer["fqn"]: layer["reason"] for layer in odd["layers"]}
    assert "not a multiple of 16" in reasons["head"]
    assert odd["step_speedup_with_head"] is None
    assert odd["filter"]["code"] is None, "1.1x that may be 0.96x: nobody can tell"


def test_the_output_head_stays_in_high_precision_until_it_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the audit of a model that the printed code converted; the same question with head=fp8."""
    words = ("model=llama3_8b", "gpu=h200", "gpus=8", "recipe=tensorwise")
    found, asked = plain(capsys, *words), plain(capsys, *words, "head=fp8")
    left, none = (
        {layer["fqn"]: layer["reason"] for layer in one["layers"] if not layer["converted"]}
        for one in (found, asked)
    )
    assert (left, none) == ({"head": HEAD}, {})
    assert found["decision"] == asked["decision"] == "on"
    assert found["step_speedup_with_head"] == asked["step_speedup"]
    assert found["step_speedup"]["value"] < asked["step_speedup"]["value"]
    assert found["recipes"][0]["step_speedup_all_layers"] == asked["recipes"][0]["step_speedup_all_layers"]
    assert asked["step_speedup_with_head"] is None, "it is in already"
    assert sum(found["memory"]["fp8"].values()) > sum(asked["memory"]["fp8"].values())
    module = resolve("llama3_8b").build(device="meta", dtype=torch.bfloat16)
    exec(found["filter"]["code"], {"model": module})
    assert [layer.fqn for layer in audit(module).not_converted] == ["head"]


def test_a_measured_throughput_dilutes_the_gain(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=llama3_8b", "gpu=h200", "recipe=tensorwise")
    free = plain(capsys, *words)
    per_s = 16384 / (2 * free["step_ms"]["bf16"]["total"] * 1e-3)
    anchored = plain(capsys, *words, f"bf16_tokens_per_s={per_s:.3f}")
    assert anchored["step_ms"]["bf16"]["unexplained"] == pytest.approx(
        free["step_ms"]["bf16"]["total"], rel=1e-3
    )
    assert 1 < anchored["step_speedup"]["value"] < free["step_speedup"]["value"]


def test_stored_runs_replace_what_is_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of an H200: its rates stand in the table as measured, and its layers beside their predictions."""
    run = gpu_run(tmp_path / "results" / "gemm" / "a-run")
    found = plain(capsys, "model=llama3_8b", f"runs={run}", "recipe=tensorwise")
    assert found["gpu"] == "H200 SXM"
    assert found["rates"]["bf16"]["kind"] == found["rates"]["bandwidth"]["kind"] == "measured"
    assert {check["what"] for check in found["checks"]} >= {"product", "layer"}
    assert all(check["measured"] > 0 for check in found["checks"])
    text = said(capsys, "model=llama3_8b", f"runs={run}", "recipe=tensorwise", "--full")
    assert "predicted and measured, worst first" in text
    other = refused(capsys, "model=llama3_8b", f"runs={run}", "gpu=h100")
    assert "no row is of the H100 SXM (found: NVIDIA H200)" in other, "they say nothing about this one"


def reasons(found: dict[str, Any]) -> dict[str, Any]:
    return {reason["question"]: reason for reason in found["reasons"]}


def test_one_gpu_and_rows_scales_gather_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    alone = plain(capsys, "model=llama3_1b", "gpu=h100", "recipe=tensorwise")
    assert not alone["fp8_all_gather"]
    assert reasons(alone)["communication"] == {
        "question": "communication",
        "finding": "nothing is sent (one GPU)",
        "speaks_for": "",
    }
    rows = plain(capsys, "model=llama3_1b", "gpu=h100", "recipe=rowwise", "dp=8")
    assert not rows["fp8_all_gather"]
    assert "as rowwise casts each along both axes" in reasons(rows)["communication"]["finding"]
    assert "half the bytes" in said(capsys, "model=llama3_1b", "gpu=h100", "recipe=tensorwise", "dp=8")


def test_the_same_as_plain_values_and_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plain(capsys, "model=llama3_1b", "gpu=h200")
    bf16, fp8 = found["step_ms"]["bf16"], found["step_ms"]["fp8"]
    assert bf16["total"] / fp8["total"] == pytest.approx(found["step_speedup"]["value"])
    assert sum(v for k, v in bf16.items() if k != "total") == pytest.approx(bf16["total"])
    target = tmp_path / "advice.json"
    said(capsys, "model=llama3_1b", "gpu=h200", f"json={target}")
    assert json.loads(target.read_text()) == found


def test_a_gain_that_the_rates_leave_in_doubt_is_neither_on_nor_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama_125m, 4096 tokens, on an H200 by published rates, 1.03x (0.93-1.14): nobody can tell, until its rates are measured."""
    words = ("model=llama_125m", "gpu=h200", "recipe=tensorwise", "tokens=4096")
    text = said(capsys, *words)
    assert "can't tell" in text
    assert "sweep=ceilings" in text
    assert "code:" not in text
    found = plain(capsys, *words)
    assert (found["decision"], found["filter"]["code"]) == ("can't tell", None)
    assert found["step_speedup"]["low"] < 1 < found["step_speedup"]["value"]
    run = gpu_run(tmp_path / "results" / "gemm" / "a-run")
    assert plain(capsys, *words, f"runs={run}")["decision"] == "off"


def test_stored_training_steps_stand_beside_their_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut to two blocks and another vocabulary, as the row says; a model that is gone, or of the user, is left out."""

    def case(model: str) -> list[Measurement]:
        made = Case.of(
            "train", {"model": model, "batch": 4, "seq": 1024, "layers": 2, "checkpointing": "none"}
        )

        def step(arm: str, ms: float, baseline: str, dtype: str) -> Measurement:
            samples = [ms * (1 + 0.001 * i) for i in range(6)]
            about = {"flops": {dtype: 1e12}, "resolved": {"vocab_size": 512}}
            return row(made, arm, samples, baseline=baseline, **about)

        return [
            step("bf16_compile", 12.0, "", "bf16"),
            step("tensorwise_compile", 10.0, "bf16_compile", "e4m3"),
        ]

    cases = [case(name) for name in ("llama3_8b", "llama9", '{"_target_": "a.b", "batch": "a.c"}')]
    run = write_run(tmp_path / "run", cases, env=H200)
    found = plain(capsys, "model=gpt2", f"runs={run}", "recipe=tensorwise")
    (check,) = found["checks"]
    assert (check["what"], check["case"], check["arm"]) == ("step", "llama3_8b", "tensorwise_compile")
    assert check["measured"] == pytest.approx(1.2)
    assert 1.2 < check["predicted"] < 1.6
