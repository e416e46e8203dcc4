"""Records what fp8core's launchers start, from the launchers themselves: on CPU tensors without memory, for a device
that is only claimed.

Every launcher goes through `fp8core.kernels.launch.launch`; a tuned one offers all its candidates, and each is recorded.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from harness.meter.launches import Launch

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
    """Every launch that `call` makes, in order, with `elements` and `bytes_moved` left at 0."""
    launches: list[Launch] = []
    with _claimed(capability, processors, launches.append):
        call()
    return launches


@contextmanager
def _claimed(capability: int, processors: int, take: Callable[[Launch], None]) -> Iterator[None]:
    from fp8core.kernels import launch, tuning

    def recorded(kernel: Any, grid: Any, *args: Any, device: torch.device, **keywords: Any) -> None:
        if 0 not in grid:
            take(launch_of(kernel, grid, args, keywords))

    def each(
        kernel: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device_name: str,
        candidates: Sequence[Any],
        run: Callable[[Any], None],
        **_: Any,
    ) -> Any:
        for candidate in candidates[1:]:
            run(candidate)
        return candidates[0]

    target = launch.Target(capability, processors, launch.native_cast(capability), f"sm_{capability}")
    kept = launch.launch, launch.target_of, tuning.choose
    try:
        launch.launch, launch.target_of, tuning.choose = recorded, lambda device: target, each  # type: ignore[assignment]
        yield
    finally:
        launch.launch, launch.target_of, tuning.choose = kept  # type: ignore[assignment]


def launch_of(kernel: Any, grid: Sequence[int], args: Sequence[Any], keywords: dict[str, Any]) -> Launch:
    """One launch as data, specialised as Triton's own launcher does: an integer 1 is a constant, multiples of 16 are
    known to be such.
    """
    from fp8core.kernels.launch import Walking  # imports triton

    options = {
        "num_warps": keywords.pop("num_warps", 8),
        "num_stages": keywords.pop("num_stages", 2),
        "enable_fp_fusion": keywords.pop("fp_fusion", False),
    }
    constants, values, aligned = dict(keywords), [], []
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
    module = kernel.fn.__module__
    return Launch(
        *(
            module,
            kernel.fn.__name__,
            signature,
            constants,
            tuple(aligned),
            tuple(values),
            options,
            (x, y, z),
            0,
        ),
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
