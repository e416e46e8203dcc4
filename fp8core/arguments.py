"""Arguments of callers, checked where they are handed over: one wording for all of fp8core."""

from __future__ import annotations

import difflib
import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch.distributed.tensor import DTensor

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # by exact type: no subclass of its own


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Return whether x is a DTensor: never, in a process that has not imported DTensor, which costs most of a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def check_known(what: str, value: object, known: Collection[str]) -> None:
    """Refuses a name that is not in a table.

    >>> check_known("GEMM backend", "tritan", ["torch", "triton"])
    Traceback (most recent call last):
    ValueError: GEMM backend 'tritan' is unknown (nearest: triton); expected one of torch, triton

    Raises:
        ValueError: names the value, the nearest name if one is near, and all of them.
    """
    if value in known:
        return
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f" (nearest: {near[0]})" if near else ""
    raise ValueError(f"{what} {value!r} is unknown{hint}; expected one of {', '.join(known)}")


def check_type(what: str, value: object, kind: type, hint: str = "") -> None:
    """Refuses a value of another type.

    >>> check_type("step", "3", int)
    Traceback (most recent call last):
    TypeError: step is a str; expected int

    Args:
        what: the argument, as its caller knows it.
        value: what was given.
        kind: the class that it must be an instance of.
        hint: the way out, after a semicolon.

    Raises:
        TypeError: names the argument, the type of the value, the expected one and the hint.
    """
    if not isinstance(value, kind):
        raise TypeError(
            f"{what} is a {type(value).__name__}; expected {kind.__name__}{'; ' if hint else ''}{hint}"
        )


# Whether autocast is on for some device; asked in eager mode only
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast_enabled(x: torch.Tensor) -> bool:
    """Return whether autocast is on for x's device; one call into torch where it is on for no device at all."""
    if not torch.compiler.is_compiling() and not any_autocast():
        return False
    device = x.device.type
    # Dynamo up to torch 2.11 can't trace is_autocast_available; of the devices that are compiled for only "meta" has none
    known = device != "meta" if torch.compiler.is_compiling() else torch.amp.is_autocast_available(device)
    return known and torch.is_autocast_enabled(device)
