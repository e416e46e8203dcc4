"""Models of published `config.json` files through transformers. Oracles: published numbers of parameters, DeepSeek-V3's paper."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install -e '.[clients]'")

from configs_for_tests import PUBLISHED, written

from harness.training.models.hugging_face import EXPERTS, ROUTER, read

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
CORRECTION = {"deepseek-ai/DeepSeek-V3": 58 * 256}  # published as weights, a buffer in transformers


@pytest.mark.parametrize("repository", PUBLISHED)
def test_parameters_are_those_that_are_published(repository: str, tmp_path: Path) -> None:
    """To the last one: a bias, a norm or a head too many would show."""
    fields, parameters = PUBLISHED[repository]
    found = read(str(written(tmp_path, fields)))
    assert found.parameters + CORRECTION.get(repository, 0) == parameters
    inside = sum(part.elements for part in found.parts)
    assert 0.7 * parameters < inside <= parameters * (1.3 if fields.get("tie_word_embeddings") else 1)


def test_deepseek_by_hand(tmp_path: Path) -> None:
    """arXiv:2412.19437, section 4.2: three dense blocks, then 1 shared and 256 routed experts of which 8; MLA by ranks."""
    found = read(str(written(tmp_path, PUBLISHED["deepseek-ai/DeepSeek-V3"][0])))
    by_name = {part.name.removeprefix("model.layers."): part for part in found.parts}
    sizes = {name: (part.K, part.N) for name, part in by_name.items()}
    assert sizes["0.self_attn.q_a_proj"] == (7168, 1536)
    assert sizes["0.self_attn.kv_b_proj"] == (512, 128 * (128 + 128))
    assert sizes["2.mlp.up_proj"] == (7168, 18432)
    assert sizes["3.mlp.shared_experts.up_proj"] == (7168, 2048)
    assert (sizes["3.mlp.gate"], by_name["3.mlp.gate"].kind) == ((7168, 256), ROUTER)
    experts = by_name["3.mlp.experts.gate_up_proj"]
    assert (experts.K, experts.N, experts.count, experts.kind) == (7168, 4096, 256, EXPERTS)
    assert (found.top_k, found.blocks) == (8, 61)
    active = sum(
        p.elements * found.top_k // p.count if p.kind == EXPERTS else p.elements for p in found.parts
    )
    assert active + 129280 * 7168 == pytest.approx(37e9, rel=0.02), "37B activated, says the model card"
