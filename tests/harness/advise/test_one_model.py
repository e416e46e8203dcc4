"""One model of a step: the command `advise`, a prediction at scale and a training case must say the same of the same job.

Oracle: each other. Every job goes through two entries whose words, defaults and callers have nothing in common.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from advice_asked import plain

from harness.advise import decide
from harness.advise.command import answer, parse
from harness.advise.scale.predict import predict
from harness.cli.config import load
from harness.engine.plan import make_plan
from harness.store.case import Case
from harness.suites import SUITES, scale

# (sweep or None, part, world): every kind of job of the two sweeps
SWEEPS = [
    ("reference_7b", {"world": 16, "batch": 8}),
    ("reference_7b", {"world": 16, "batch": 4}),
    ("scale", {"model": "llama_7b", "world": 4096, "proof": False}),
    ("scale", {"model": "llama3_8b", "world": 64, "replicas": 1, "proof": False}),
    ("scale", {"model": "llama3_8b", "world": 4096, "replicas": 64, "proof": False}),
    ("scale", {"model": "llama3_70b", "world": 64}),
    ("scale", {"model": "llama3_405b", "world": 1024}),
]


@functools.cache
def cases_of(sweep: str) -> list[Case]:
    """The cases of a sweep as it is shipped."""
    return [p.case for p in make_plan(load([f"sweep={sweep}"], lambda asked: "cpu").config, SUITES).cases]


def case_of(sweep: str, axes: dict[str, Any]) -> Case:
    return next(c for c in cases_of(sweep) if all(c[name] == value for name, value in axes.items()))


@pytest.mark.parametrize(("sweep", "axes"), SWEEPS)
@pytest.mark.parametrize("arm", ["tensorwise", "tensorwise_bf16_gather"])
def test_a_sweep_at_scale_and_the_command_say_the_same(sweep: str, axes: dict[str, Any], arm: str) -> None:
    case = case_of(sweep, axes)
    # The command asks for one reduction a step
    job, rates = replace(scale._job(case, arm), reduce_each=False), scale._rates(case)
    found = predict(job, rates)
    words = {
        "model": job.model,
        "gpu": job.gpu,
        "gpus": job.world,
        "tp": job.tp,
        "pp": 1,
        "fp8_all_gather": "true" if arm == "tensorwise" else "false",
        "recipe": "tensorwise",
        **{
            name: getattr(job, name)
            for name in (
                *("batch", "seq", "accumulation", "checkpointing", "replicas", "node", "weights", "reduce"),
            )
        },
    }
    said = answer(parse([f"{name}={value}" for name, value in words.items()]))
    assert said.chosen.everything == found.speedup
    assert said.parts[0] == predict(replace(job, recipe=""), rates).parts
    if said.chosen.converted == decide.able(said.model, said.chosen.recipe):
        assert said.parts[1] == found.parts


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
