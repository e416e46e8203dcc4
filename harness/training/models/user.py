"""Models of the user: built by a callable that the command line names, trained on batches of another one.

    model._target_=my.module.build model.batch=my.module.batch model.width=512

`build(**other keys)` returns an nn.Module; `batch(step, seed, batch_size, device)` returns a tuple of tensors, each
with `batch_size` as first size; `module(*batch)` is the loss, float32 and 0-dimensional.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.store.errors import UsageError, one_line, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from harness.training.models.common import Weights

TARGET, BATCH = "_target_", "batch"


@dataclass(frozen=True, slots=True)
class UserModel:
    """A model given by name.

    Attributes:
        name: the canonical JSON of the mapping, as it stands on the case axis `model`.
        target: dotted name of what builds the module.
        batch_target: dotted name of what makes batches.
        arguments: canonical JSON of the keyword arguments of `target`.
    """

    name: str
    target: str
    batch_target: str
    arguments: str

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        layers: int | None = None,
        vocab_size: int | None = None,
        checkpointing: str = "none",
        weights: Weights = "host",
    ) -> nn.Module:
        """The module, made on the CPU (on "meta" if `device` is) after torch.manual_seed(seed), then moved.

        `weights` is not read: the module draws its own.

        Raises:
            UsageError: the callable cannot be imported, fails, or makes no nn.Module; or layers, vocab_size or
                checkpointing are asked for, which only the user's own arguments can set.
        """
        for key, value, unset in (
            ("layers", layers, None),
            ("vocab_size", vocab_size, None),
            ("checkpointing", checkpointing, "none"),
        ):
            if value != unset:
                raise UsageError(
                    f"{key}={value} cannot be set on a model of your own; give it to {self.target} as model.{key}=... "
                    "if it takes such an argument"
                )
        make = imported(self.target, f"model.{TARGET}")
        where = "meta" if torch.device(device).type == "meta" else "cpu"
        keywords = json.loads(self.arguments)
        with torch.random.fork_rng(devices=[]), torch.device(where):
            torch.manual_seed(seed)
            built = _called(make, self.target, **keywords)
        if not isinstance(built, nn.Module):
            raise UsageError(f"{self.target} made a {type(built).__name__}; expected an nn.Module")
        return built.to(device=device, dtype=dtype)

    def batch(self, step: int, seed: int, batch_size: int, device: torch.device | str) -> tuple[Tensor, ...]:
        """What the user's batch function makes for one step.

        Raises:
            UsageError: it cannot be imported, fails, or returns anything but a tuple of tensors on `device` whose
                first size is `batch_size`.
        """
        make = imported(self.batch_target, f"model.{BATCH}")
        called = f"{self.batch_target}(step={step}, seed={seed}, batch_size={batch_size}, device={device})"
        made = _called(make, called, step, seed, batch_size, device)
        if not isinstance(made, tuple) or not made or not all(isinstance(part, Tensor) for part in made):
            raise UsageError(f"{self.batch_target} returned {_kind(made)}; expected a tuple of tensors")
        for index, part in enumerate(made):
            if part.dim() == 0 or part.shape[0] != batch_size:
                raise UsageError(
                    f"{self.batch_target} returned shape {list(part.shape)} as tensor {index}; expected "
                    f"[{batch_size}, ...], the batch size first"
                )
            if part.device.type != torch.device(device).type:
                raise UsageError(
                    f"{self.batch_target} returned tensor {index} on {part.device}; expected {device}, its fourth "
                    "argument"
                )
        return made

    def check(self, module: nn.Module, batch_size: int, device: torch.device | str) -> None:
        """One forward pass before anything long: is `module(*batch)` a loss?

        Raises:
            UsageError: it fails on its batch, or returns anything but one float32 number that depends on a weight.
        """
        batch = self.batch(0, 0, batch_size, device)
        shapes = ", ".join(str(list(part.shape)) for part in batch)
        loss = _called(module, f"{self.target} on a batch of shapes {shapes}", *batch)
        if not isinstance(loss, Tensor) or loss.dim() or loss.dtype != torch.float32:
            raise UsageError(
                f"{self.target} returned {_kind(loss)} for a batch; expected the loss: one float32 number, a "
                "0-dimensional tensor"
            )
        if not loss.requires_grad:
            raise UsageError(f"the loss of {self.target} depends on no parameter that requires a gradient")


def user_model(spec: Mapping[str, Any]) -> UserModel:
    """The model of a mapping from the command line.

    Raises:
        UsageError: `_target_` or `batch` is missing or no dotted name.
    """
    for key, what in ((TARGET, "what builds the model"), (BATCH, "batch(step, seed, batch_size, device)")):
        if not isinstance(spec.get(key), str) or "." not in spec[key]:
            raise UsageError(
                f"model.{key}={spec.get(key)!r}: expected the dotted name of {what}, my.module.{key}"
            )
    arguments = {key: value for key, value in spec.items() if key not in (TARGET, BATCH)}
    return UserModel(canonical(spec), spec[TARGET], spec[BATCH], canonical(arguments))


def canonical(spec: Mapping[str, Any]) -> str:
    """JSON with sorted keys and no blanks, the same for equal mappings."""
    return json.dumps(spec, sort_keys=True, separators=(",", ":"))


def imported(target: str, key: str) -> Callable[..., Any]:
    """The callable of a dotted name.

    Raises:
        UsageError: no such module or attribute, or it is not callable; `key` says where the name stood.
    """
    module, _, name = target.rpartition(".")
    if not all(part.isidentifier() for part in target.split(".")):
        raise UsageError(f"{key}={target!r}: expected a dotted name, my.module.{name.strip('/') or 'build'}")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module of the user may raise anything while it is imported
        raise UsageError(f"{key}={target!r} cannot be imported: {one_line(error)}") from error
    if not callable(found):
        raise UsageError(f"{key}={target!r} is a {type(found).__name__}; expected a callable")
    return found


def _called(function: Callable[..., Any], name: str, *args: Any, **keywords: Any) -> Any:
    """Run the user's code; an exception becomes one clear line."""
    try:
        return function(*args, **keywords)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        first = text_of(error).strip().splitlines()
        raise UsageError(f"{name} failed: {type(error).__name__}: {first[0] if first else ''}") from error


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"
