"""A step as it is traced. Oracles: `harness.training.models.flops`, hand counts of bytes, the sizes of published models."""

from __future__ import annotations

import pytest
import torch
from language_models import gpt
from models_to_advise import Chooses, Mlp, NoLoss, Peeks
from torch import nn

from harness.advise.trace import layers_alone, trace, trace_module
from harness.store.errors import UsageError
from harness.training.models import MODELS, build, resolve
from harness.training.models.flops import step_flops

SMALL = [name for name, spec in MODELS.items() if spec.width <= 800 and name != "llama_moe"]


@pytest.mark.parametrize("name", [*SMALL, "llama3_8b", "llama_moe"])
def test_flops_and_parameters_are_those_of_the_formula(name: str) -> None:
    """Linear layers, experts and causal attention, forward and backward: as `step_flops` counts them, exactly."""
    spec = resolve(name)
    batch, seq = 2, min(64, spec.max_seq)
    model = trace(spec, batch, seq)
    found = sum(layer.flops for layer in model.layers) + 3 * model.attention + 3 * model.other
    whole = build(name, device="meta")
    assert found == pytest.approx(sum(step_flops(whole, batch, seq, formula="causal").values()))
    assert model.parameters == sum(p.numel() for p in whole.parameters())
    names = [fqn for fqn, m in whole.named_modules() if isinstance(m, nn.Linear)]
    assert sorted(layer.fqn for layer in model.layers) == sorted(names)
    assert model.blocks == spec.layers
    assert model.experts == ("moe" in name)
    assert model.tokens == batch * seq


def on_meta(words: int, width: int, outputs: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(words, 768), nn.Linear(768, width), nn.Linear(width, outputs))


@pytest.mark.parametrize(
    ("module", "head"),
    [
        (build("gpt2", device="meta", layers=1), ["head"]),
        (build("llama_moe", device="meta", layers=1), ["head"]),
        (gpt(), ["lm_head"]),
        (on_meta(50257, 768, 50304), ["2"]),
        (on_meta(1024, 1024, 10), []),
        (nn.Linear(32, 64), []),
    ],
    ids=["tied", "experts", "own", "padded", "classes", "no embedding"],
)
def test_the_output_head_is_the_last_layer_if_its_outputs_are_a_vocabulary(
    module: nn.Module, head: list[str]
) -> None:
    """Oracle: a reader's eye. A layer as wide as a table of positions is none, and neither are outputs that are classes."""
    assert [layer.fqn for layer in layers_alone(module, 16, "").layers if layer.is_head] == head


def test_bytes_between_products_by_hand() -> None:
    """y = down(silu(gate(x)) * up(x)), loss = mean(float(y)); G, U, H are [2, 512, 8192] in bf16, Y [2, 512, 4096].

    Forward, fused: read G and U, write H; read Y for the mean. Backward: the mean's gradient of Y is written from
    a single number; silu and its product read G, U and H's gradient and write two gradients; the two gradients of x
    are added: 2 read, 1 written.
    """
    wide, narrow = 2 * 2 * 512 * 8192, 2 * 2 * 512 * 4096
    with torch.device("meta"):
        module = Mlp(4096).to(torch.bfloat16)
        x = torch.zeros(2, 512, 4096, dtype=torch.bfloat16)
    model = trace_module(module, (x,), "mlp")
    assert model.tokens == 2 * 512
    assert model.forward.fused_bytes == pytest.approx(3 * wide + narrow, rel=1e-3)
    assert model.backward.fused_bytes == pytest.approx(5 * wide + narrow, rel=1e-3)
    # eager: silu reads 1 and writes 1, the product reads 2 and writes 1; float() reads 2 B and writes 4, mean reads 4
    assert model.forward.eager_bytes == pytest.approx(5 * wide + narrow * (1 + 2 + 2), rel=1e-3)
    assert model.forward.eager_kernels == 3 + 2 + 2
    assert model.forward.fused_kernels == 3 + 1 + 1
    unused = next((layer for layer in model.layers if layer.fqn == "unused"), None)
    assert unused is None, "a layer that is not called takes no time"


def test_what_cannot_be_traced_names_the_layer() -> None:
    with torch.device("meta"):
        module, x = Peeks(), torch.zeros(2, 64, 16)
    with pytest.raises(UsageError, match=r"Peeks cannot be traced: blocks\.1 failed") as refused:
        trace_module(module, (x,), "Peeks")
    assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="Chooses failed"):
        trace_module(Chooses(), (x,), "itself")
    with pytest.raises(UsageError, match="returned no loss"):
        trace_module(NoLoss(), (x,), "no loss")
    with pytest.raises(UsageError, match="layer failed"):
        trace_module(NoLoss(), (x[..., :8],), "wrong width")
