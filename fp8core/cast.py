"""The reference cast to FP8 and back, in plain PyTorch.

    codes = RNE(clamp(float32(x) * scale, -fp8_max, +fp8_max))      round to nearest, ties to even
    x'    = float32(codes) * scale_inv

The clamp always comes first. Without it, PyTorch has a different overflow rule for each dtype and version:
e4m3fn gives NaN up to torch 2.11 and saturates from 2.12 on CPU, e5m2 gives Inf, both fnuz formats give NaN.
With it, eager and compiled PyTorch, ml_dtypes and gfloat agree bit for bit (docs/numerics.md, section 2).

Product and clamp are float32 whatever the input: in bfloat16 the product alone moves 0.9 % of the codes.
Infinity saturates to fp8_max like any overflow (OCP OFP8 "SAT"); NaN stays NaN, its sign and payload are
unspecified. -0 keeps its sign where the format has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fp8core.formats import Format, as_element_format
from fp8core.scaling import amax, check_hp, compute_scale

if TYPE_CHECKING:
    from fp8core.recipe import Granularity


def cast_saturating(x: torch.Tensor, fmt: Format | torch.dtype | str) -> torch.Tensor:
    """Rounds x to the format, without scaling it.

    Args:
        x: float32, bfloat16 or float16, any shape and layout.
        fmt: the target format.

    Returns:
        Codes: the format's dtype, x's shape and strides. |x| > fp8_max and Inf give fp8_max with x's sign,
        NaN gives NaN.

    Raises:
        TypeError: x of another dtype; float64 in particular, see `fp8core.scaling.check_hp`.
        ValueError: fmt is no element format.
    """
    fmt = as_element_format(fmt)
    check_hp(x)
    return x.detach().float().clamp(-fmt.max, fmt.max).to(fmt.dtype)


def scale_and_cast(
    x: torch.Tensor,
    fmt: Format | torch.dtype | str,
    granularity: Granularity = "tensorwise",
    *,
    dim: int = -1,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic quantisation: scales each group so that its largest magnitude meets fp8_max, then casts.

    Args:
        x: float32, bfloat16 or float16, any shape and layout.
        fmt: the target format.
        granularity: "tensorwise" or "rowwise".
        dim: for "rowwise", the contracted dimension, over which a scale is shared.
        power_of_two: round scales down to powers of two.

    Returns:
        (codes, scale_inv): codes with x's shape and strides; scale_inv float32, 0-dimensional or x's shape
        with `dim` reduced to 1. A group that holds Inf or NaN comes back as NaN throughout.

    Raises:
        TypeError, ValueError: as `amax` and `compute_scale`.
    """
    fmt = as_element_format(fmt)
    scale, scale_inv = compute_scale(amax(x, granularity, dim), fmt, power_of_two)
    return cast_saturating(x.float() * scale, fmt), scale_inv


def dequantize(
    codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """`codes * scale_inv`, formed in float32 (float64 where `dtype` is float64, and then exact).

    Args:
        codes: an FP8 dtype, any shape.
        scale_inv: float32, broadcastable to codes.
        dtype: of the result.

    Returns:
        Tensor of codes' shape and the given dtype.

    Raises:
        ValueError: codes have no FP8 element dtype.
    """
    as_element_format(codes.dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes.to(compute) * scale_inv.to(compute)).to(dtype)
