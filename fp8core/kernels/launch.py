"""How a kernel meets a device: one function that every launcher of this package goes through.

Each launcher names its kernel, its grid and its compile-time constants once, here. Because nothing else
starts a kernel, the tests can record what would be launched on an sm_89, sm_90 or sm_100 device and compile
exactly that ahead of time, on a machine without one.

Contraction of `a * b + c` into one rounding is an explicit choice of each launch (`fp_fusion`): Triton 3.9
announces that its default changes in 3.10. It is off except in the matmul: the encoder's addition must not
swallow the product before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from fp8core.kernels.occupancy import programs_per_processor

PROGRAMS_PER_PROCESSOR = 4  # of persistent kernels where it must be known before they are compiled
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)  # read when triton decorates, so fixed at import


@dataclass(frozen=True, slots=True)
class Target:
    """What a launcher may know about the device.

    Attributes:
        capability: 10 * major + minor of the CUDA compute capability; 0 under the interpreter.
        processors: streaming multiprocessors; grids of persistent kernels are multiples of it.
        native_cast: there is an instruction that converts float32 to FP8.
        name: as the driver reports it; part of the key of a tuning result.
    """

    capability: int
    processors: int
    native_cast: bool
    name: str


INTERPRETER = Target(capability=0, processors=3, native_cast=False, name="interpreter")


def target_of(device: torch.device) -> Target:
    """The target that tensors on this device run on.

    Raises:
        ValueError: no Triton kernel can run there.
    """
    if INTERPRETED:
        return INTERPRETER
    if device.type != "cuda" or torch.version.hip is not None:
        raise ValueError(
            f"fp8core's Triton kernels run on NVIDIA GPUs, or under TRITON_INTERPRET=1, not on {device}; "
            "fp8core.kernels.reference has the same functions in plain PyTorch"
        )
    return _cuda_target(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    capability = 10 * properties.major + properties.minor
    return Target(capability, properties.multi_processor_count, native_cast(capability), properties.name)


def native_cast(capability: int) -> bool:
    """Whether this architecture converts float32 to FP8 by an instruction: sm_89 (Ada), sm_90 and newer."""
    return capability >= 89


class Walking(tuple[int]):
    """The grid of a persistent kernel: its blocks of work. Started are as many programs as run at once, or fewer."""


def walking(work: int) -> Walking:
    """The grid of a kernel whose programs walk over `work` blocks, each over many of them."""
    return Walking((work,))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    device: torch.device,
    num_warps: int = 8,
    num_stages: int = 2,
    fp_fusion: bool | int = False,
    **constants: Any,
) -> None:
    """Starts `kernel` on `device` with positional runtime arguments and keyword compile-time constants.

    Args:
        kernel: a function decorated with `triton.jit`.
        grid: programs in up to three dimensions, or `walking(blocks)`; a grid with a 0 starts nothing.
        *args: tensors and numbers, in the order of the kernel's parameters.
        device: of all tensors.
        num_warps: threads of a program / 32.
        num_stages: depth of the software pipeline of its loops.
        fp_fusion: let the compiler contract products and sums.
        **constants: values of the kernel's `tl.constexpr` parameters.
    """
    if 0 in grid:
        return
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fp_fusion}
    if INTERPRETED:
        programs = INTERPRETER.processors * PROGRAMS_PER_PROCESSOR
        kernel[(min(grid[0], programs),) if isinstance(grid, Walking) else grid](*args, **constants)
        return
    with torch.cuda.device(device):
        if isinstance(grid, Walking):
            grid = (min(grid[0], _at_once(kernel, args, constants | options, device)),)
        kernel[grid](*args, **constants, **options)


_AT_ONCE: dict[tuple[object, ...], int] = {}


def _at_once(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any], device: torch.device) -> int:
    """Programs of a kernel that run on the device at once, from its registers and shared memory.

    More would be a second, partly filled wave. Compiled and looked at once; a specialisation by other alignments may
    differ by a register or two, which is no reason to look again.
    """
    dtypes = tuple(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
    key = (kernel.fn, device.index, dtypes, *keywords.values())
    if key not in _AT_ONCE:
        compiled = kernel.warmup(*args, grid=(1,), **keywords)
        compiled._init_handles()  # loads it, as the first launch does: the driver knows the registers only then
        target = target_of(device)
        resident = programs_per_processor(
            compiled.n_regs, keywords["num_warps"], compiled.metadata.shared, target.capability
        )
        _AT_ONCE[key] = target.processors * max(1, resident)
    return _AT_ONCE[key]


def both_codes(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the codes of x [M, K], as they are and transposed."""
    M, K = x.shape
    codes = torch.empty((M, K), dtype=dtype, device=x.device)
    return codes, torch.empty((K, M), dtype=dtype, device=x.device)


def zero(device: torch.device) -> torch.Tensor:
    """A float32 number that programs raise by atomic maxima."""
    return torch.zeros((), dtype=torch.float32, device=device)


def persistent_grid(work: int, device: torch.device) -> tuple[int]:
    """The grid of a walking kernel whose number of programs sizes a buffer: a fixed number for each processor."""
    return (min(work, target_of(device).processors * PROGRAMS_PER_PROCESSOR),)


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n, at least 1."""
    return 1 << max(n - 1, 0).bit_length()
