"""audit and verify of real transformers models. Oracle: the configuration, by hand: 6 N + 12 L H Q T a token.

N counts the weights of matrix products that a token meets. The promise is 1 %.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from tiny_models import MODELS, VOCABULARY, made

from fp8core import (
    audit,
    convert_experts_to_float8,
    convert_to_float8_training,
    verify,
)

transformers = pytest.importorskip("transformers", reason="pip install -e '.[clients]'")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

WIDTH, HEADS, KV, LAYERS, FFN, BATCH, SEQ = 64, 4, 2, 2, 128, 2, 64  # of tiny_models
EXPERTS, TOP_K, EXPERT_FFN = 4, 2, 32


GQA = 2 * WIDTH**2 + 2 * WIDTH * WIDTH * KV // HEADS  # q, o; k, v
# model -> (weights in FP8, in high precision) that a token meets; the head is filtered where it is named lm_head
WEIGHTS: dict[str, tuple[int, int]] = {
    "gpt2": (LAYERS * 12 * WIDTH**2, VOCABULARY * WIDTH),
    "llama": (LAYERS * (GQA + 3 * WIDTH * FFN), VOCABULARY * WIDTH),
    "qwen3_moe": (
        LAYERS * (GQA + TOP_K * 3 * WIDTH * EXPERT_FFN),
        VOCABULARY * WIDTH + LAYERS * EXPERTS * WIDTH,
    ),
    "bert": (LAYERS * (4 * WIDTH**2 + 2 * WIDTH * FFN) + WIDTH**2 + VOCABULARY * WIDTH, 0),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_share_by_the_configuration(name: str, attention: str) -> None:
    """Oracle: see the module. Before and after conversion; verify proves the step and names the same share."""
    model = made(name, attention=attention)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ))

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()

    fp8, high = WEIGHTS[name]
    attended = 12 * LAYERS * WIDTH * SEQ
    total = BATCH * SEQ * (6 * (fp8 + high) + attended)
    before = audit(model, step=step)
    assert before.count is not None
    assert before.count.flops == pytest.approx(total, rel=0.01)
    assert before.fp8_flop_share == 0
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    loss = float(model(tokens, labels=tokens).loss.detach())
    convert_to_float8_training(model, config="rowwise", module_filter_fn=lambda module, fqn: fqn != "lm_head")
    convert_experts_to_float8(model, config="rowwise", allow_no_conversion=True)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    report = audit(model, step=step)
    assert report.count is not None
    assert not report.count.uncounted
    assert report.count.flops == pytest.approx(total, rel=0.01)
    want = Fraction(6 * fp8, 6 * (fp8 + high) + attended)
    assert report.fp8_flop_share == pytest.approx(float(want), rel=0.01)
    assert "100.0 %" not in str(report)
    assert "100.0 %" not in str(audit(model))
    assert float(model(tokens, labels=tokens).loss.detach()) == pytest.approx(loss, rel=0.01)
    proof = verify(step, model, announce=False)
    assert proof.ok, proof.line
    assert proof.matmuls.fp8_share == pytest.approx(float(want), rel=0.01)
    assert f"{100 * float(want):.1f} % of the counted matmul FLOPs in FP8" in proof.line
    print(f"\n{name}, {attention}: {proof.line}")  # for `pytest -s`


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_implementation_of_experts_is_seen(implementation: str) -> None:
    """Oracle: the configuration; transformers multiplies experts in a loop, in groups, or with gathered weights."""
    model: Any = made("qwen3_moe", attention="sdpa")
    model.set_experts_implementation(implementation)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ))
    report = audit(model, step=lambda: model(tokens, labels=tokens).loss.backward())
    assert report.count is not None
    experts = {row.owner for row in report.count.matmuls if "experts" in row.owner}
    assert experts == {
        f"model.layers.{i}.mlp.experts.{p}" for i in range(LAYERS) for p in ("gate_up_proj", "down_proj")
    }
    flops = sum(row.flops for row in report.count.of_model if "experts" in row.owner)
    assert flops == pytest.approx(BATCH * SEQ * 6 * LAYERS * TOP_K * 3 * WIDTH * EXPERT_FFN, rel=0.01)


def test_experts_of_other_families_convert() -> None:
    """Oracle: the loss of the original. GPT-OSS has biases, transposed weights and its own gate; Mixtral has none."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ))
    _, _, llama = MODELS["llama"]
    sizes = llama | {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    for model in (
        transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)),
        transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, head_dim=16)),
    ):
        want = float(model(tokens, labels=tokens).loss.detach())
        convert_experts_to_float8(model, config="rowwise")
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        assert float(loss.detach()) == pytest.approx(want, rel=0.01)
        assert len(audit(model).experts) == 2 * LAYERS
        assert all(row.converted for row in audit(model).experts)
