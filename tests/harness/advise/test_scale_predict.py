"""Predictions of whole jobs. Oracles: `harness.advise` on one GPU, parameters counted one by one, and sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.advise.rates import rates_of
from harness.advise.scale.job import ClusterJob
from harness.advise.scale.predict import MEMORY, memory, predict, step_parts
from harness.advise.scale.weights import weights_of
from harness.advise.step import CHECKPOINTING, Plan, step_cost
from harness.advise.trace import trace
from harness.machine.hardware import named
from harness.store.errors import UsageError
from harness.training import meta_estimate
from harness.training.models import MODELS
from harness.training.models.flops import step_flops
from harness.training.setup import Setup

RATES = rates_of(named("h200"))


def job(world: int = 8, **changes: Any) -> ClusterJob:
    return replace(ClusterJob("llama_tiny", "h200", world, 4, 64), **changes)


def test_one_gpu_is_what_advise_says() -> None:
    one = job(1, checkpointing="none", weights="bf16")
    model = trace(MODELS["llama_tiny"], 4, 64)
    plan = Plan(again=CHECKPOINTING["none"], update_bytes=20.0, gradient_bytes=4.0)
    assert step_parts(one, RATES) == step_cost(model, RATES, plan, None)
    assert step_parts(one, RATES).communication == 0
    assert predict(one, RATES).collectives == ()


def test_flops_and_tokens_are_a_gpus_share() -> None:
    found = predict(job(8, tp=2, accumulation=3), RATES)
    whole = step_flops(MODELS["llama_tiny"].build(device="meta"), 4, 64)
    assert sum(found.flops.values()) == pytest.approx(3 * sum(whole.values()) / 2)
    assert found.use.tokens_per_s == pytest.approx(3 * 256 / 2 / found.parts.total)
    assert found.use.hfu is not None
    assert found.use.mfu_mixed is not None
    assert found.use.hfu > found.use.mfu_mixed, "blocks run twice"


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_states_are_a_gpus_shard(world: int) -> None:
    """Every size of the model is a multiple of 8: nothing is padded."""
    parameters = sum(p.numel() for p in MODELS["llama_tiny"].build(device="meta").parameters())
    found = memory(job(world))
    assert tuple(found) == MEMORY
    assert [found[part] * world for part in MEMORY[:3]] == [4 * parameters, 4 * parameters, 8 * parameters]
    copies = memory(job(world * 2, replicas=2))
    assert copies == found, "copies are no help"


def test_activations_of_all_blocks_from_those_of_two() -> None:
    """Eager, against the prediction for the whole model, of a model of four blocks."""
    one = ClusterJob("nanogpt_char_cpu", "h200", 1, 4, 64, checkpointing="none", compiled=False)
    found = memory(one)
    whole = meta_estimate.memory(Setup("nanogpt_char_cpu", 4, 64, compute="bf16"), "cpu")
    assert found["activations"] == whole["activations"]
    assert found["logits"] == whole["logits"]
    assert found["workspace"] == whole["workspace"]


def test_compiled_fp8_takes_no_more_than_bf16_under_full_checkpointing() -> None:
    """The 7B reference recipe: +10.9e9 bytes by the model of eager code; a block's codes live while it runs, not longer."""
    reference = ClusterJob("llama_7b", "h100", 16, 8, 4096, accumulation=2, node=4, weights="bf16")
    bf16, kept, sent = (
        sum(memory(one).values())
        for one in (
            reference,
            replace(reference, recipe="tensorwise", gather_fp8=False),
            replace(reference, recipe="tensorwise"),
        )
    )
    assert abs(kept - bf16) < 0.2e9
    blocks = 3 * sum(w.padded(1) for w in weights_of("llama_7b", "tensorwise", 1).block if w.fp8)
    head = 2 * 4096 * MODELS["llama_7b"].vocab_size
    assert bf16 - sent == pytest.approx(blocks + head, rel=0.02), (
        "one byte less of each weight that is gathered"
    )


def test_gradients_that_wait_are_held_whole() -> None:
    """Two float32 copies of the gradients for bf16 masters, but for the shard; reduced each time, two blocks' worth."""
    parameters = sum(p.numel() for p in MODELS["llama_7b"].build(device="meta").parameters())
    one = ClusterJob("llama_7b", "h100", 16, 1, 128, accumulation=2, weights="bf16")
    waits, each = memory(one), memory(replace(one, reduce_each=True))
    assert waits["reduced"] == pytest.approx(4 * parameters - 2 * parameters / 16)
    assert each["reduced"] < waits["reduced"] / 5
    assert memory(replace(one, accumulation=1)) == each


def test_tensor_parallelism_splits_what_is_kept() -> None:
    alone, split = memory(job(1)), memory(job(2, tp=2))
    for part in ("weights", "activations", "logits"):
        assert alone[part] / 2 <= split[part] <= 0.55 * alone[part], part  # norms' weights are not split


def test_bf16_gathers_cost_more_and_more_gpus_hide_less() -> None:
    reference = ClusterJob(
        "llama_7b", "h100", 16, 8, 4096, accumulation=2, node=4, weights="bf16", recipe="tensorwise"
    )
    rates = rates_of(named("h100"))
    sent = step_parts(reference, rates)
    kept = step_parts(replace(reference, gather_fp8=False), rates)
    bf16 = step_parts(replace(reference, recipe=""), rates)
    assert sent.total < kept.total < bf16.total
    few, many = (step_parts(replace(reference, world=w, batch=1), rates).communication for w in (16, 4096))
    assert many > 2 * few, "4,096 GPUs make long rings"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama9"}, "unknown model 'llama9'"),
        ({"gpu": "h900"}, "unknown gpu 'h900'"),
        ({"seq": 512}, "llama_tiny reads at most 256 tokens"),
        ({"recipe": "fast"}, "unknown recipe 'fast'"),
        ({"tp": 8}, "tp=8 does not divide the 4 heads of llama_tiny"),
        ({"model": "llama_moe_tiny"}, "llama_moe_tiny has experts, whose exchanges are not modelled"),
    ],
)
def test_what_cannot_be_predicted_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        predict(job(**changes), RATES)
