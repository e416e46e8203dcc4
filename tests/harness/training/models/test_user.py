"""Models of the user: what is accepted, and one clear line for everything else."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from harness.store.errors import UsageError
from harness.training.models import MODELS, UserModel, resolve


class Net(nn.Module):
    """Loss of a linear fit; `kind` makes it wrong in some way."""

    def __init__(self, width: int = 8, kind: str = "right") -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(width, 1), kind

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = (self.layer(x)[:, 0] - y).square()
        results = {
            "right": lambda: loss.mean(),
            "vector": lambda: loss,
            "half": lambda: loss.mean().bfloat16(),
            "constant": lambda: loss.mean().detach(),
            "number": lambda: loss.mean().item(),
            "broken": lambda: self.layer(x[:, :3]),
        }
        return results[self.kind]()


def batch(step: int, seed: int, batch_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    x = torch.randn(batch_size, 8, generator=generator)
    return x.to(device), x.sum(1).to(device)


BATCHES: dict[str, Any] = {
    "batch": batch,
    "a_list": lambda *_: [torch.zeros(4, 8)],
    "one_tensor": lambda *_: torch.zeros(4, 8),
    "nothing": lambda *_: (),
    "numbers": lambda *_: (torch.zeros(4, 8), 3),
    "too_small": lambda *_: (torch.zeros(4, 8), torch.zeros(3)),
    "no_dimension": lambda *_: (torch.zeros(()),),
    "elsewhere": lambda *_: (torch.zeros(4, 8, device="meta"),),
    "three_arguments": lambda step, seed, size: (torch.zeros(size, 8),),
    "exits": lambda *_: sys.exit(3),
    "not_callable": 7,
}


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("their_project")
    module.__dict__.update(BATCHES, build=Net, no_module=lambda: 3)
    monkeypatch.setitem(sys.modules, "their_project", module)


def spec(target: str = "build", batches: str = "batch", **arguments: Any) -> UserModel:
    mapping = {"_target_": f"their_project.{target}", "batch": f"their_project.{batches}", **arguments}
    found = resolve(json.dumps(mapping))
    assert isinstance(found, UserModel)
    return found


def test_a_model_of_ones_own_trains() -> None:
    """Oracle: its own class; the seed fixes its weights, and no one else's random numbers move."""
    model = spec(width=8)
    before = torch.random.get_rng_state()
    first, again, other = (model.build(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.layer.weight, again.layer.weight)
    assert not torch.equal(first.layer.weight, other.layer.weight)
    assert model.build(dtype=torch.bfloat16).layer.weight.dtype == torch.bfloat16
    assert model.build(device="meta").layer.weight.is_meta
    model.check(first, 4, "cpu")
    x, y = model.batch(3, 1, 5, "cpu")
    assert x.shape == (5, 8)
    first(x, y).backward()


def test_name_is_canonical() -> None:
    """Oracle: equal mappings in any order are one name, which resolves to the same again."""
    one = resolve('{"_target_": "their_project.build", "batch": "their_project.batch", "width": 8}')
    two = resolve('{"width":8,"batch":"their_project.batch","_target_":"their_project.build"}')
    assert one == two
    assert resolve(one.name) == one
    assert one.name not in MODELS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"batch": "a.b"}', "model._target_=None: expected the dotted name of what builds the model"),
        ('{"_target_": "a.b"}', r"model.batch=None: expected the dotted name of batch\(step, seed"),
        ('{"_target_": "a.b", "batch": 3}', "model.batch=3"),
        ('{"_target_": "build", "batch": "a.b"}', "model._target_='build'"),
    ],
)
def test_incomplete_mappings(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(text)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: spec("bild"), "model._target_='their_project.bild' cannot be imported: .*no attribute"),
        (lambda: spec("not_callable"), "is a int; expected a callable"),
        (lambda: spec("no_module"), "their_project.no_module made a int; expected an nn.Module"),
        (
            lambda: spec(depth=3),
            "their_project.build failed: TypeError: .*unexpected keyword argument 'depth'",
        ),
    ],
)
def test_builders(model: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model().build()


@pytest.mark.parametrize(
    "asked",
    [{"layers": 2}, {"vocab_size": 9}, {"checkpointing": "full"}],
    ids=lambda asked: next(iter(asked)),
)
def test_what_only_their_own_arguments_can_set(asked: dict[str, Any]) -> None:
    key = next(iter(asked))
    with pytest.raises(UsageError, match=f"{key}=.* cannot be set .*model.{key}="):
        spec().build(**asked)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_list", "returned a list; expected a tuple of tensors"),
        ("one_tensor", r"returned a float32 tensor of shape \[4, 8\]; expected a tuple of tensors"),
        ("nothing", r"returned \(\); expected a tuple of tensors"),
        ("numbers", r"returned \(Tensor, int\); expected a tuple of tensors"),
        ("too_small", r"returned shape \[3\] as tensor 1; expected \[4, ...\], the batch size first"),
        ("no_dimension", r"returned shape \[\] as tensor 0"),
        ("elsewhere", "returned tensor 0 on meta; expected cpu"),
        (
            "three_arguments",
            r"three_arguments\(step=0, seed=0, batch_size=4, device=cpu\) failed: TypeError: .*takes 3 positional arguments",
        ),
        ("exits", r"exits\(step=0, .* failed: SystemExit: 3"),
        ("absent", "model.batch='their_project.absent' cannot be imported"),
    ],
)
def test_batches(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec(batches=name).batch(0, 0, 4, "cpu")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("vector", r"returned a float32 tensor of shape \[4\] for a batch; expected the loss"),
        ("half", "returned a bfloat16 tensor"),
        ("number", "returned a float for a batch"),
        ("constant", "depends on no parameter"),
        ("broken", r"on a batch of shapes \[4, 8\], \[4\] failed: RuntimeError: mat1 and mat2"),
    ],
)
def test_losses(kind: str, message: str) -> None:
    model = spec(kind=kind)
    with pytest.raises(UsageError, match=message):
        model.check(model.build(), 4, "cpu")
