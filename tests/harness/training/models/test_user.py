"""Models of the user: what is accepted, and one clear line for everything else."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.store.errors import UsageError
from harness.training.models import UserModel, resolve
from harness.training.models.user import imported


class Net(nn.Module):
    """Loss of a linear fit."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layer(x)[:, 0] - y).square().mean()


def batch(step: int, seed: int, batch_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    x = torch.randn(batch_size, 8, generator=generator)
    return x.to(device), x.sum(1).to(device)


BATCHES: dict[str, Any] = {
    "batch": batch,
    "a_list": lambda *_: [torch.zeros(4, 8), torch.zeros(4)],
    "a_mapping": lambda *_: {"y": torch.zeros(4), "x": torch.zeros(4, 8)},
    "a_short_mapping": lambda *_: {"x": torch.zeros(4, 8), "y": torch.zeros(3)},
    "text": lambda *_: {"x": torch.zeros(4, 8), "y": "four"},
    "two_forms": lambda step, *_: {"x": torch.zeros(4, 8), "y" if step == 0 else "z": torch.zeros(4)},
    "nothing": lambda *_: (),
    "numbers": lambda *_: (torch.zeros(4, 8), 3),
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


def drawn(name: str) -> Any:
    return lambda: spec(batches=name).batch(0, 0, 4, "cpu")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resolve('{"batch": "a.b"}'), "model._target_=None: expected the dotted name"),
        (lambda: resolve('{"_target_": "a.b", "batch": 3}'), "model.batch=3"),
        (lambda: resolve('{"_target_": "build", "batch": "a.b"}'), "model._target_='build'"),
        (spec("bild").build, "model._target_='their_project.bild' cannot be imported: .*no attribute"),
        (spec("not_callable").build, "is a int; expected a callable"),
        (spec("no_module").build, "their_project.no_module made a int; expected an nn.Module"),
        (spec(depth=3).build, "their_project.build failed: TypeError: .*unexpected keyword argument 'depth'"),
        *((lambda key=key: spec().build(**{key: 2}), f"{key}=2 cannot be set .*model.{key}=")
          for key in ("layers", "vocab_size", "checkpointing")),
        (drawn("nothing"), r"returned \(\); expected a tensor, a tuple of tensors, or a mapping"),
        (drawn("numbers"), r"returned \(Tensor\[4, 8\], int\); expected a tensor, a tuple of tensors, or a mapping"),
        (drawn("text"), r"returned a dict of x: Tensor, y: str; expected a tensor"),
        (drawn("a_short_mapping"), r"returned shape \[3\] as y; expected \[4, ...\], the batch size first"),
        (drawn("no_dimension"), r"returned shape \[\] as tensor 0"),
        (drawn("elsewhere"), "returned tensor 0 on meta; expected cpu"),
        (drawn("three_arguments"),
         r"three_arguments\(step=0, seed=0, batch_size=4, device=cpu\) failed: TypeError: .*takes 3 positional"),
        (drawn("exits"), r"exits\(step=0, .* failed: SystemExit: 3"),
        (drawn("absent"), "model.batch='their_project.absent' cannot be imported"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


# Names of the command line


def test_batches_keep_their_keys() -> None:
    model = spec(batches="two_forms")
    model.batch(0, 0, 4, "cpu")
    with pytest.raises(UsageError, match="returned x, z, before that x, y; expected the same for every step"):
        model.batch(1, 0, 4, "cpu")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("no_such_package.models.build", "No module named 'no_such_package'"),
        ("needs_more.build", "No module named 'something_else'"),
    ],
)
def test_what_cannot_be_imported_is_said_in_one_line(
    target: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import something_else\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as raised:
        imported(target, "model._target_")
    assert str(raised.value).startswith(f"model._target_={target!r} cannot be imported: ")
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)
