"""The table of models: published sizes, names, and training by each in every checkpointing mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8core import convert_to_float8_training
from harness.store.errors import UsageError
from harness.training.models import CHECKPOINTING, build

CPU_MODELS = ("nano", "nanogpt_char_cpu", "llama_tiny", "llama_moe_tiny")

# Model cards of openai-community/gpt2*, meta-llama/Llama-2-7b-hf, Meta-Llama-3-8B and -70B, Llama-3.2-1B and -3B on
# Hugging Face: "safetensors" parameters, with tied matrices once. (GPT-2's card adds attention masks; here the count
# of karpathy/nanoGPT, 124M / 354.82M / 774.03M / 1557.61M.)
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}


def batch(model: nn.Module, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, model.config.vocab_size, (4, 33), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CPU_MODELS)
@pytest.mark.parametrize("recipe", [None, "rowwise", "delayed"])
def test_checkpointing_changes_no_bit(name: str, recipe: str | None) -> None:
    """Oracle: no checkpointing; loss and every gradient bitwise."""
    results = []
    for mode in CHECKPOINTING:
        model = build(name, checkpointing=mode)
        if recipe is not None:
            convert_to_float8_training(model, config=recipe)
        loss = model(*batch(model))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize(
    ("name", "recipe", "mode"),
    [
        ("nano", None, "full"),
        ("llama_tiny", None, "selective"),
        pytest.param("llama_tiny", "rowwise", "selective", marks=pytest.mark.slow),
    ],
)
def test_one_graph_under_checkpointing_and_fp8(name: str, recipe: str | None, mode: str) -> None:
    """Oracle: eager, bitwise: aot_eager runs the traced graph without fusion."""
    model = build(name, checkpointing=mode, layers=1)
    if recipe is not None:
        convert_to_float8_training(model, config=recipe)
    torch._dynamo.reset()
    parameters = list(model.parameters())
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    losses = [run(*batch(model)) for run in (model, compiled)]
    grads = [torch.autograd.grad(loss, parameters) for loss in losses]
    assert torch.equal(*losses)
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "lama3_8b"}, r"unknown model 'lama3_8b' \(nearest: llama3_8b\)"),
        ({"model": "nano", "layers": 0}, "layers=0: nano has 2 blocks; expected 1 to 2"),
        ({"model": "nano", "layers": 3}, "layers=3: nano has 2 blocks; expected 1 to 2"),
        ({"model": "nano", "checkpointing": "half"}, "unknown activation checkpointing 'half'"),
        ({"model": '{"_target_": "a.b"'}, "is no JSON mapping"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(**arguments)


def test_a_model_too_large_for_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("Unable to allocate 1.96 GiB")

    monkeypatch.setattr("harness.training.models.common._normal", full)
    with pytest.raises(UsageError, match="80,112 weights do not fit on cpu: Unable to allocate"):
        build("nano")
