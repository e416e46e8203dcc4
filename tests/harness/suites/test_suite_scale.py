"""Suite `scale`. Oracle: the prediction itself, and FSDP2 on fake tensors for the proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_cases import gpu_run

from harness.advise.scale import counts
from harness.store.case import Case
from harness.store.errors import UsageError
from harness.suites import scale

SMALL = {"model": "llama_tiny", "gpu": "h100", "world": 8, "batch": 2, "seq": 64}


def case(**axes: Any) -> Case:
    given = {**SMALL, **axes}
    [fixed] = scale.points([], {name: [value] for name, value in given.items()}, None)
    return Case.of("scale", {**fixed, **given})


def trial(arm: str = "bf16", **axes: Any) -> Any:
    return scale.trial(case(**axes), arm, "cpu", Path("unused"), lambda done, total: None)


def values(found: Any, metric: str) -> dict[str, float]:
    return {s.part: s.samples[0] for s in found.series if s.metric == metric}


@pytest.mark.parametrize("arm", scale.ARMS)
def test_parts_add_up(arm: str) -> None:
    found = trial(arm, accumulation=2, replicas=2)
    assert not found.failure
    for metric in ("sent_bytes", "predicted_memory_bytes", "predicted_step_ms", "collectives"):
        parts = values(found, metric)
        assert parts.pop("") == pytest.approx(sum(parts.values()))
    assert found.resolved["timed"] == "nothing: a prediction"
    assert found.resolved["tokens_per_step"] == 2 * 2 * 64
    assert found.resolved["fits"] is True
    assert ("scales" in values(found, "sent_bytes")) == (arm == "tensorwise")


def test_a_byte_an_element_goes_around() -> None:
    """All weights of blocks are Linear but the norms: of 8 GPUs each sends 7 parts in 8."""
    fp8, bf16 = (values(trial(arm), "sent_bytes")["weights_backward"] for arm in ("tensorwise", "bf16"))
    norms = 2 * 2 * 64 * 2 * 7 / 8
    assert fp8 - norms == (bf16 - norms) / 2


def test_a_count_that_is_wrong_fails_and_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = counts.reduced_bytes
    monkeypatch.setattr(counts, "reduced_bytes", lambda weights, job: honest(weights, job) + 4)
    found = trial(proof=True)
    assert not found.series
    assert "FSDP2 called and sent" in found.failure
    assert "counted were" in found.failure


def test_named_runs_replace_published_rates(tmp_path: Path) -> None:
    """Products and bandwidths of a stored run of that GPU; runs of another GPU are refused."""
    run = gpu_run(tmp_path / "results" / "gemm" / "a-run")
    published, measured = trial(gpu="h200"), trial(gpu="h200", runs=str(run))
    assert published.resolved["rates"]["bf16"]["kind"] != "measured"
    assert {measured.resolved["rates"][name]["kind"] for name in ("bf16", "bandwidth")} == {"measured"}
    assert values(measured, "sent_bytes") == values(published, "sent_bytes")
    with pytest.raises(UsageError, match="no row is of the H100 SXM"):
        case(runs=str(run))
