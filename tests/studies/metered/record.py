"""Records what fp8core's launchers start, from the launchers themselves: on CPU tensors without memory, for a device
that is only claimed.

Every launcher goes through `fp8core.kernels.launch.launch`; a tuned one offers all its candidates, and each is recorded.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from harness.advise.meter.launches import Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


def record(call: Callable[[], Any], capability: int = 90, processors: int = 132) -> list[Launch]:
    """Every launch that `call` makes, in order; of a tuned operator the default last.

    Args:
        call: calls launchers of fp8core; tensors of any device will do, none is read.
        capability: 10 * major + minor of the compute capability of the device that is claimed.
        processors: its SMs.
    """
    launches: list[Launch] = []
    with _claimed(capability, processors, launches.append):
        call()
    return launches


@contextmanager
def _claimed(capability: int, processors: int, take: Callable[[Launch], None]) -> Iterator[None]:
    from fp8core.kernels import launch, tuning

    is_default = True

    def recorded(kernel: Any, grid: Any, *args: Any, device: torch.device, **keywords: Any) -> None:
        if 0 not in grid:
            take(replace(launch_of(kernel, grid, args, keywords), default=is_default))

    def each(
        kernel: str,
        shape: object,
        dtype: object,
        device: object,
        candidates: Sequence[Any],
        run: Any,
        **_: Any,
    ) -> Any:
        nonlocal is_default
        is_default = False
        for candidate in candidates[1:]:
            run(candidate)
        is_default = True
        return candidates[0]

    target = launch.Target(capability, processors, launch.native_cast(capability), f"sm_{capability}")
    with (
        patch.multiple(launch, launch=recorded, target_of=lambda device: target),
        patch.object(tuning, "choose", each),
    ):
        yield


def launch_of(kernel: Any, grid: Sequence[int], args: Sequence[Any], keywords: dict[str, Any]) -> Launch:
    """One launch as data, specialised as Triton's own launcher does: an integer 1 is a constant, multiples of 16 are
    known to be such.

    Every tensor is taken to be read or written once.
    """
    from fp8core.kernels.launch import Walking  # imports triton

    options = {
        "num_warps": keywords.pop("num_warps", 8),
        "num_stages": keywords.pop("num_stages", 2),
        "enable_fp_fusion": keywords.pop("fp_fusion", False),
    }
    constants: dict[str, Any] = dict(keywords)
    values: list[Any] = []
    aligned: list[int] = []
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    for index, (name, argument) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if type(argument) is int and argument == 1:
            constants[name] = 1
            continue
        signature[name] = _type(argument)
        values.append(_value(argument))
        if _is_aligned(argument):
            aligned.append(index)
    x, y, z = (*grid, 1, 1)[:3]
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    bases = tensors + [a.base for a in args if hasattr(a, "block_shape")]
    moved = {t.untyped_storage()._cdata: t.numel() * t.element_size() for t in bases}
    return Launch(
        kernel.fn.__module__,
        kernel.fn.__name__,
        signature,
        constants,
        tuple(aligned),
        tuple(values),
        options,
        (x, y, z),
        elements=tensors[0].numel(),
        bytes_moved=float(sum(moved.values())),
        walks=isinstance(grid, Walking),
    )


def _type(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return "*" + TYPES[argument.dtype]
    if hasattr(argument, "block_shape"):
        return f"tensordesc<{TYPES[argument.base.dtype]}{list(argument.block_shape)}>"
    if isinstance(argument, float):
        return "fp32"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def _value(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return "pointer"
    if hasattr(argument, "block_shape"):
        return {"shape": list(argument.shape), "strides": list(argument.strides)}
    return argument


def _is_aligned(argument: Any) -> bool:
    if isinstance(argument, torch.Tensor):
        return True  # PyTorch allocates at multiples of 512 bytes
    return type(argument) is int and argument % 16 == 0
