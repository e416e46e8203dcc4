"""Models by name: training in every checkpointing mode, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8core import convert_to_float8_training
from harness.store.errors import UsageError
from harness.training.models import CHECKPOINTING, build

CPU_MODELS = ("nano", "nanogpt_char_cpu", "llama_tiny", "llama_moe_tiny")


def batch(model: nn.Module, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, model.config.vocab_size, (4, 33), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


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
