"""Jobs of many GPUs, asked of the command. Oracle: published splits, and sums by hand."""

from __future__ import annotations

import pytest
from advice_asked import plain


def test_a_pipeline_is_taken_for_405b_and_its_bubble_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """torchtitan trains 405B on 512 H100 with TP8 and PP8; 7 of 32 microbatches are lost to 1F1B, 3.5 interleaved."""
    words = (
        "model=llama3_405b",
        "gpu=h100",
        "batch=1",
        "seq=8192",
        "recipe=tensorwise",
        "checkpointing=full",
    )
    one, two = (
        plain(capsys, *words, "gpus=512", f"schedule={schedule}") for schedule in ("1f1b", "interleaved")
    )
    assert [one["plan"][name] for name in ("dp", "tp", "pp", "virtual", "accumulation")] == [8, 8, 8, 1, 32]
    bubbles = [found["step_ms"]["bf16"]["pipeline"] for found in (one, two)]
    bf16 = one["step_ms"]["bf16"]
    busy = bf16["linear"] + bf16["attention"] + bf16["between"]
    assert 7 / 32 < bubbles[0] / busy < 1.25 * 7 / 32, "and tensor parallelism's exchanges"
    assert bubbles[1] == pytest.approx(bubbles[0] / 2, rel=0.02)
    assert two["step_ms"]["bf16"]["total"] < bf16["total"]
