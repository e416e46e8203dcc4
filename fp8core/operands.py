"""How a layer's tensors become operands: the one place where a cast is dispatched.

Everything here is plain PyTorch through `fp8core.tensor.quantize` and `fp8core.cast`. A fused kernel belongs
into `cast_one` and `cast_both`, behind a question about device and layout; nothing above knows how it is done.
`cast_both` exists because hardware wants a tensor along both of its axes, and one read can serve both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8core import cast as casts
from fp8core.scaling import amax
from fp8core.tensor import Float8Tensor, quantize

if TYPE_CHECKING:
    import torch

    from fp8core.history import AmaxMemory
    from fp8core.recipe import Cast


def cast_one(
    x: torch.Tensor, cast: Cast | None, dim: int, memory: AmaxMemory | None = None, role: str = "input"
) -> torch.Tensor:
    """One operand as its GEMM wants it.

    Args:
        x: a matrix in high precision, or a Float8Tensor, which is returned as it is.
        cast: None leaves x in high precision.
        dim: the dimension that the GEMM contracts.
        memory: the layer's amaxes, for delayed and static casts.
        role: which of `fp8core.history.ROLES` x is.

    Returns:
        Float8Tensor of x's shape and strides, or x.
    """
    if cast is None or isinstance(x, Float8Tensor):
        return x
    if cast.scaling == "dynamic" or memory is None:
        return quantize(
            x,
            cast.format,
            cast.granularity,
            dim=dim,
            power_of_two=cast.power_of_two,
            mx_mode=cast.mx_mode,
        )
    expected = memory.of(role)
    seen = None
    if expected is None:
        expected = seen = amax(x)
        codes, scale_inv = casts.scale_and_cast(x, cast.format, power_of_two=cast.power_of_two)
    else:
        codes, scale_inv, seen = casts.cast_with_amax(
            x, cast.format, expected, margin=memory.settings.margin, power_of_two=cast.power_of_two
        )
    memory.record(role, seen)
    return Float8Tensor(codes, scale_inv, x.dtype)


def cast_both(
    x: torch.Tensor,
    along_1: Cast | None,
    along_0: Cast | None,
    memory: AmaxMemory | None = None,
    role: str = "input",
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as operand of two GEMMs, of which one contracts dimension 1 and the other dimension 0.

    Returns:
        (for the first, for the second), each as `cast_one`; the same object where one cast serves both.
    """
    first = cast_one(x, along_1, 1, memory, role)
    if serves_both(along_1, along_0):
        return first, first
    return first, cast_one(x, along_0, 0, memory, role)


def serves_both(first: Cast | None, second: Cast | None) -> bool:
    """Whether one cast of a tensor can serve two GEMMs that contract it over different axes."""
    return first is not None and first == second and first.axis_free
