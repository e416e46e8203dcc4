"""Models of the user: built by a callable that the command line names, trained on batches of another one.

    model._target_=my.module.build model.batch=my.module.batch model.width=512

`build(**other keys)` returns an nn.Module; an argument with a `_target_` of its own is built first (Hydra's way).
`batch(step, seed, batch_size, device)` returns a tensor, a tuple or a mapping of tensors, each with `batch_size` as first
size; without it a language model reads random tokens. What the module returns for a batch has the loss
(`harness.training.models.calls`).
"""

from __future__ import annotations

import functools
import importlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.store.errors import UsageError, one_line, text_of
from harness.training.models import calls
from harness.training.models.random_tokens import TokenInput, token_input

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from harness.training.models.common import WeightsFrom

TARGET, BATCH = "_target_", "batch"


@dataclass(frozen=True, slots=True)
class UserModel:
    """A model given by name.

    Attributes:
        name: the canonical JSON of the mapping, as it stands on the case axis `model`.
        target: dotted name of what builds the module.
        batch_target: dotted name of what makes batches; "": none is named.
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
        weights: WeightsFrom = "host",
        **of_named_models: Any,
    ) -> nn.Module:
        """The module, made on the CPU (on "meta" if `device` is) after torch.manual_seed(seed), then moved.

        `weights` is not read: the module draws its own.

        Raises:
            UsageError: the callable cannot be imported, fails, or makes no nn.Module; or layers, vocab_size or
                checkpointing are asked for, which only the user's own arguments can set.
        """
        for key, value in of_named_models.items():
            if value not in (None, "none"):
                raise UsageError(
                    f"{key}={value} cannot be set on a model of your own; give it to {self.target} as model.{key}=... "
                    "if it takes such an argument"
                )
        where = "meta" if torch.device(device).type == "meta" else "cpu"
        with torch.random.fork_rng(devices=[]), torch.device(where):
            torch.manual_seed(seed)
            built = made({TARGET: self.target, **json.loads(self.arguments)}, "model")
        if not isinstance(built, nn.Module):
            raise UsageError(f"{self.target} made a {type(built).__name__}; expected an nn.Module")
        return calls.adapt(built.to(device=device, dtype=dtype), self.name, self.target)

    @property
    def tokens(self) -> TokenInput:
        """The random tokens that it reads where no batch function is named.

        Raises:
            UsageError: it is no language model that is known by its signature.
        """
        return _token_input(self)

    def batch(self, step: int, seed: int, batch_size: int, device: torch.device | str) -> tuple[Tensor, ...]:
        """What the user's batch function makes for one step, the values of a mapping in their order.

        Raises:
            UsageError: it cannot be imported, fails, or returns anything but tensors on `device` whose first size is
                `batch_size`; or none is named and the model is no known language model.
        """
        if not self.batch_target:
            return calls.parts_of(self.tokens.batch(step, seed, batch_size, device), self.name, self.target)
        given = {"step": step, "seed": seed, "batch_size": batch_size, "device": device}
        called = f"{self.batch_target}({', '.join(f'{key}={value}' for key, value in given.items())})"
        drawn = _called(imported(self.batch_target, f"model.{BATCH}"), called, *given.values())
        parts = calls.parts_of(drawn, self.name, self.batch_target)
        names = calls.form_of(self.name).keys or tuple(f"tensor {index}" for index in range(len(parts)))
        for name, part in zip(names, parts, strict=True):
            if part.dim() == 0 or part.shape[0] != batch_size:
                raise UsageError(
                    f"{self.batch_target} returned shape {list(part.shape)} as {name}; expected "
                    f"[{batch_size}, ...], the batch size first"
                )
            if part.device.type != torch.device(device).type:
                raise UsageError(
                    f"{self.batch_target} returned {name} on {part.device}; expected {device}, its fourth argument"
                )
        return parts


def user_model(spec: Mapping[str, Any]) -> UserModel:
    """The model of a mapping from the command line.

    Raises:
        UsageError: `_target_` is missing, or one of `_target_` and `batch` is no dotted name.
    """
    for key, what in ((TARGET, "what builds the model"), (BATCH, "batch(step, seed, batch_size, device)")):
        name = spec.get(key)
        if (key == TARGET or key in spec) and not (isinstance(name, str) and "." in name):
            raise UsageError(
                f"model.{key}={name!r}: expected the dotted name of {what}, my.module.{key.strip('_')}"
            )
    arguments = {key: value for key, value in spec.items() if key not in (TARGET, BATCH)}
    return UserModel(canonical(spec), spec[TARGET], spec.get(BATCH, ""), canonical(arguments))


@functools.lru_cache(maxsize=16)
def _token_input(model: UserModel) -> TokenInput:
    return token_input(model.build(device="meta"), model.target)


def made(spec: Any, key: str) -> Any:
    """A value of the command line, built: a mapping with a `_target_` is what that makes of the other keys.

    Args:
        spec: plain values; mappings and lists in them are built as well.
        key: where it stood ("model", "model.config"), for errors.

    Raises:
        UsageError: a name that cannot be imported, or a callable that fails.
    """
    if isinstance(spec, list):
        return [made(value, f"{key}[{index}]") for index, value in enumerate(spec)]
    if not isinstance(spec, dict):
        return spec
    values = {name: made(value, f"{key}.{name}") for name, value in spec.items() if name != TARGET}
    if TARGET not in spec:
        return values
    target = str(spec[TARGET])
    return _called(imported(target, f"{key}.{TARGET}"), target, **values)


def canonical(spec: Mapping[str, Any]) -> str:
    """JSON with sorted keys and no blanks, the same for equal mappings."""
    return json.dumps(spec, sort_keys=True, separators=(",", ":"))


def imported(target: str, key: str) -> Callable[..., Any]:
    """The callable of a dotted name: of a module, or of a class in one (`package.Class.method`).

    Raises:
        UsageError: no such module or attribute, or it is not callable; `key` says where the name stood.
    """
    names = target.split(".")
    if not all(part.isidentifier() for part in names) or len(names) < 2:
        raise UsageError(
            f"{key}={target!r}: expected a dotted name, my.module.{names[-1].strip('/') or 'build'}"
        )
    try:
        module, rest = _module_of(names)
        found = functools.reduce(getattr, rest, module)
    except Exception as error:  # a module of the user may raise anything while it is imported
        raise UsageError(f"{key}={target!r} cannot be imported: {one_line(error)}") from error
    if not callable(found):
        raise UsageError(f"{key}={target!r} is a {type(found).__name__}; expected a callable")
    return found


def _module_of(names: list[str]) -> tuple[Any, list[str]]:
    """The longest module that a dotted name begins with, and the attributes after it."""
    for end in range(len(names) - 1, 0, -1):
        module = ".".join(names[:end])
        try:
            return importlib.import_module(module), names[end:]
        except ModuleNotFoundError as error:
            # One that another module lacks is that module's fault; and without the first there is nothing to shorten.
            if end == 1 or error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
    raise AssertionError("a dotted name has a first part")


def _called(function: Callable[..., Any], name: str, *args: Any, **keywords: Any) -> Any:
    """Run the user's code; an exception becomes one clear line."""
    try:
        return function(*args, **keywords)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        first = text_of(error).strip().splitlines()
        raise UsageError(f"{name} failed: {type(error).__name__}: {first[0] if first else ''}") from error
