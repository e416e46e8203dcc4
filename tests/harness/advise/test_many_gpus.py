"""Jobs of many GPUs, asked of the command. Oracle: published splits, and sums by hand."""

from __future__ import annotations

import pytest
from advice_asked import plain


@pytest.mark.parametrize("gpus", [8, 64, 512, 4096])
def test_the_split_of_the_gpus_is_printed_and_multiplies(
    gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plain(
        capsys, "model=llama3_70b", "gpu=h100", f"gpus={gpus}", "batch=1", "seq=8192", "recipe=tensorwise"
    )
    plan = found["plan"]
    assert plan["dp"] * plan["tp"] * plan["pp"] == gpus
    assert plan["tp"] == 8, "70B as torchtitan splits it"
    assert found["warnings"][0] == f"taken, since it was not named: tp=8, pp=1, dp={gpus // 8}"
    ratio = found["step_speedup"]
    assert ratio["low"] < ratio["value"] < ratio["high"]
    assert found["decision_by_time"] == "on"
    # 16 bytes of 70.6e9 parameters are 131 GiB on each of 8 GPUs of 79
    assert found["decision"] == ("does not fit" if gpus == 8 else "on")


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


def test_stages_together_are_the_model() -> None:
    """One microbatch on one stage: p stages have all blocks; the slowest has the head, and blocks fewer for it."""
    from harness.advise.model import slowest_stage
    from harness.advise.training import traced

    whole = traced("llama3_70b", 1, 4096, None, None)
    assert slowest_stage(whole, 1) == whole
    two = slowest_stage(whole, 2)
    assert two.blocks in (39, 40, 41)
    assert 2 * two.attention == pytest.approx(whole.attention, rel=0.05)
    flops = [sum(la.flops for la in m.layers) for m in (whole, two)]
    assert 0.5 <= flops[1] / flops[0] < 0.52, "balanced to a block"
    assert whole.outside is not None
    assert whole.outside.parameters == pytest.approx(2 * 128256 * 8192, rel=1e-3)
    assert 0 < whole.outside.forward.fused_bytes < whole.forward.fused_bytes
