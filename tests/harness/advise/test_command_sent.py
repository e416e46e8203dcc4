"""The command and what goes between GPUs. Oracles: a published gain of 405B; the contract of exit codes; the JSON beside the code."""

from __future__ import annotations

from typing import Any

import pytest
from advice_asked import plain, said

BIG = ("model=llama3_405b", "gpu=h100", "tp=4", "dp=128", "seq=8192", "batch=1", "recipe=tensorwise")


def reasons(found: dict[str, Any]) -> dict[str, Any]:
    return {reason["question"]: reason for reason in found["reasons"]}


def test_405b_whose_weights_go_around_in_fp8_is_on(capsys: pytest.CaptureFixture[str]) -> None:
    """IBM and Meta, 2024-11: 405B with TP4 on 512 H100, tensorwise and FP8 all-gather, +43 % (their batch is not published)."""
    found = plain(capsys, *BIG)
    assert found["decision_by_time"] == "on"
    assert found["decision"] == "does not fit", "with nothing recomputed: 156 GiB of 79"
    assert plain(capsys, *BIG, "checkpointing=full")["decision"] == "on"
    assert found["fp8_all_gather"] is True
    assert found["tp_fp8_all_gather"] is True
    assert 1.2 < found["step_speedup"]["low"] < found["step_speedup"]["value"] < 1.43
    assert reasons(found)["communication"]["speaks_for"] == "on"
    assert "half the bytes" in reasons(found)["communication"]["finding"]
    assert "with_fp8_all_gather()" in found["filter"]["code"]
    assert {layer["fqn"]: layer["converted"] for layer in found["layers"]}["layers.0.attention.k"], (
        "a layer that loses alone gains by the bytes that are not sent"
    )


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
