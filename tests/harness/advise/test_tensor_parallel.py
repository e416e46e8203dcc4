"""One GPU's part of a model. Oracle: the parts of all GPUs together, and Megatron's count of collectives."""

from __future__ import annotations

import pytest
from advise_fixtures import model

from harness.advise.model import COLUMNS, ROWS, split
from harness.advise.trace import trace
from harness.store.errors import UsageError
from harness.training.models import MODELS, resolve


def test_parts_add_up_and_each_block_exchanges_four_times() -> None:
    """Llama: q, k, v and gate, up split by columns, o and down by rows (arXiv:1909.08053): per block two gathers and two
    scatters of tokens x width forward; the head gathers once more."""
    whole = trace(resolve("llama3_8b"), 1, 8192)
    part, exchanges = split(whole, 8)
    assert sum(layer.flops for layer in part.layers) * 8 == sum(layer.flops for layer in whole.layers)
    assert part.attention * 8 == whole.attention
    assert part.parameters * 8 == pytest.approx(whole.parameters, abs=8)
    sizes = {layer.fqn.rsplit(".", 1)[-1]: (layer.K, layer.N) for layer in part.layers}
    assert sizes["k"] == (4096, 128)
    assert sizes["o"] == (512, 4096)
    assert sizes["down"] == (1792, 4096)
    gathers, scatters = [e for e in exchanges if e.gathers], [e for e in exchanges if not e.gathers]
    assert (len(gathers), len(scatters)) == (2 * 32 + 1, 2 * 32)
    assert {e.sent for e in exchanges} == {2.0 * 8192 * 4096}
    assert gathers[0].layers == tuple(f"layers.0.attention.{n}" for n in "qkv")


def test_named_models_that_are_dense_can_all_be_split() -> None:
    """Every architecture once; its layers have one name each."""
    for name in ("nano", "llama_tiny"):
        whole = trace(MODELS[name], 1, 16)
        assert {layer.fqn.rsplit(".", 1)[-1] for layer in whole.layers} <= COLUMNS | ROWS, name


def test_what_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"a layer 'blocks\.0\.router', whose split is not known"):
        split(model(("blocks.0.router", 64, 8)), 2)
    with pytest.raises(UsageError, match="tp=3 does not divide q, whose 64 features"):
        split(model(("q", 64, 64)), 3)
    with pytest.raises(UsageError, match="whose 50257 features"):
        split(trace(resolve("gpt2"), 1, 64), 2)
