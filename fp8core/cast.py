"""The reference cast to FP8 and back, in plain PyTorch.

    codes = RNE(clamp(float32(x) * scale, -fp8_max, +fp8_max))      round to nearest, ties to even
    x'    = float32(codes) * scale_inv

The clamp comes first; in eager mode it is left out where a group's own amax gave the scale and it could move no code. Without
it, PyTorch has a different overflow rule for each dtype and version: e4m3fn gives NaN up to torch 2.11 and saturates from
2.12 on CPU, e5m2 gives Inf, both fnuz formats give NaN.
With it, eager and compiled PyTorch, ml_dtypes and gfloat agree bit for bit (docs/numerics.md, section 2).

Product and clamp are float32 whatever the input: in bfloat16 the product alone moves 0.9 % of the codes.
Infinity saturates to fp8_max like any overflow (OCP OFP8 "SAT"); NaN stays NaN, its sign and payload are
unspecified. -0 keeps its sign where the format has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fp8core.formats import Format, as_element_format
from fp8core.scaling import (
    BLOCK,
    MX_BLOCK,
    amax,
    broadcast_block_scales,
    check_hp,
    compute_scale,
    mx_scale,
    mx_scale_code,
    without_grad,
)

if TYPE_CHECKING:
    from fp8core.scaling import Granularity, MxMode


def cast_saturating(
    x: torch.Tensor, fmt: Format | torch.dtype | str, *, overwrite: bool = False, fits: bool = False
) -> torch.Tensor:
    """Rounds x to the format, without scaling it.

    Args:
        x: float32, bfloat16 or float16, any shape and layout.
        fmt: the target format.
        overwrite: x is a float32 temporary whose memory may be taken. In eager mode each temporary of this size costs
            as much as the arithmetic on it.
        fits: x is such a temporary, and was scaled by its own amax: at most an ulp above fp8_max, or NaN. In eager mode the
            clamp, which would move no code, is left out.

    Returns:
        Codes: the format's dtype, x's shape and strides. |x| > fp8_max and Inf give fp8_max with x's sign,
        NaN gives NaN.

    Raises:
        TypeError: x of another dtype; float64 in particular, see `fp8core.scaling.check_hp`.
        ValueError: fmt is no element format.
    """
    fmt = as_element_format(fmt)
    if fits and not torch.compiler.is_compiling():
        return x.to(fmt.dtype)
    largest = fmt.max
    if not overwrite:
        check_hp(x)
        overwrite = x.dtype != torch.float32
        x = without_grad(x).float()
    x = x.clamp_(-largest, largest) if overwrite else x.clamp(-largest, largest)
    return x.to(fmt.dtype)


def scaled_f32(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x * scale in float32, a temporary of its own; scale float32, broadcastable to x."""
    x = without_grad(x)
    return x * scale if x.dtype == torch.float32 else x.float().mul_(scale)


def scale_and_cast(
    x: torch.Tensor,
    fmt: Format | torch.dtype | str,
    granularity: Granularity = "tensorwise",
    *,
    dim: int = -1,
    power_of_two: bool = False,
    mx_mode: MxMode = "rceil",
    known_amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic quantisation: scales each group so that its largest magnitude meets fp8_max, then casts.

    Args:
        x: float32, bfloat16 or float16, any shape and layout; a matrix for "128x128".
        fmt: the target format.
        granularity: see `fp8core.recipe`.
        dim: the contracted dimension, along which "rowwise", "1x128" and "1x32" share a scale.
        power_of_two: round scales down to powers of two.
        mx_mode: how "1x32" rounds them instead, see `fp8core.scaling.mx_scale_code`.
        known_amax: of the groups, shaped as `amax` returns it, where it is there already or x is only a part of what
            shares the scales; None: x's own.

    Returns:
        (codes, scale_inv): codes with x's shape and strides; scale_inv 0-dimensional or of x's rank, as
        `amax`: float32, for "1x32" float8_e8m0fnu. A group that holds Inf or NaN comes back as NaN throughout.

    Raises:
        TypeError, ValueError: as `amax` and `compute_scale`.
    """
    group_amax = amax(x, granularity, dim) if known_amax is None else known_amax
    if granularity == "1x32":
        scale_inv = mx_scale_code(group_amax, fmt, mx_mode)
        scale = mx_scale(scale_inv)
    else:
        scale, scale_inv = compute_scale(group_amax, fmt, power_of_two)
    if scale.dim():
        scale = broadcast_block_scales(scale, x.shape, MX_BLOCK if granularity == "1x32" else BLOCK)
    fits = known_amax is None and granularity != "1x32"
    return cast_saturating(scaled_f32(x, scale), fmt, overwrite=True, fits=fits), scale_inv


def cast_rowwise(
    x: torch.Tensor, fmt: Format | torch.dtype | str, dims: tuple[int, ...], *, power_of_two: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`scale_and_cast` of a matrix, "rowwise", along one dimension or both, as lines; the same bits in fewer operators.

    All scales are computed together, since in eager mode an operator on a hundred numbers costs what its dispatch costs.

    Args:
        x: float32, bfloat16 or float16 [M, K], any layout.
        fmt: the target format.
        dims: contracted ones: 1, 0 or both.
        power_of_two: round scales down to powers of two.

    Returns:
        Of each: codes [M, K] and scale_inv [M, 1] for 1, codes [K, M] and scale_inv [K, 1] for 0; codes in memory as x is.

    Raises:
        TypeError, ValueError: as `scale_and_cast`.
    """
    check_hp(x)
    x = without_grad(x).float()
    # Not `linalg.vector_norm`, one operator for two, nor codes converted into their final layout, which spares a copy: on a CPU
    # (torch 2.13) they take ten and four times as long at 1024 x 1024, and no less at 16 x 16
    magnitude, amaxes, lines = x.abs(), [], []
    for dim in dims:
        side = magnitude if dim else magnitude.t()
        amaxes.append(side.amax(1, keepdim=True) if side.numel() else side.new_zeros((side.shape[0], 1)))
    both, sizes = len(dims) > 1, [of_lines.shape[0] for of_lines in amaxes]
    scale, scale_inv = compute_scale(torch.cat(amaxes) if both else amaxes[0], fmt, power_of_two)
    inverses = scale_inv.split_with_sizes(sizes) if both else (scale_inv,)
    # A division by the inverse of a power of two is exact, and spares views of scales
    factors = inverses if power_of_two else scale.split_with_sizes(sizes) if both else (scale,)
    for dim, factor, scale_inv in zip(dims, factors, inverses, strict=True):
        side = x if dim else x.t()
        scaled = side / factor if power_of_two else side * factor
        lines.append((cast_saturating(scaled, fmt, fits=True), scale_inv))
    return lines


def cast_with_amax(
    x: torch.Tensor,
    fmt: Format | torch.dtype | str,
    expected_amax: torch.Tensor,
    *,
    margin: int = 0,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantisation by an amax that is already known: delayed and static scaling, one pass over x.

        scale = fp8_max / (expected_amax * 2**margin)

    Args:
        x: float32, bfloat16 or float16, any shape and layout.
        fmt: the target format.
        expected_amax: float32, 0-dimensional; larger magnitudes than it (times 2**margin) saturate.
        margin: binades left free.
        power_of_two: round scales down to powers of two.

    Returns:
        (codes, scale_inv, amax of x). Where x holds Inf or NaN, scale_inv is NaN and all of x comes back as
        NaN: saturation must not hide it.

    Raises:
        TypeError, ValueError: as `amax` and `compute_scale`.
    """
    scale, scale_inv = compute_scale(expected_amax * 2.0**margin, fmt, power_of_two)
    seen = amax(x)
    codes = cast_saturating(scaled_f32(x, scale), fmt, overwrite=True)
    return codes, torch.where(seen.isfinite(), scale_inv, torch.nan), seen


def dequantize(
    codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """`codes * scale_inv`, formed in float32 (float64 where `dtype` is float64, and then exact).

    Args:
        codes: an FP8 dtype, any shape.
        scale_inv: float32, broadcastable to codes or one for each block of 128; float8_e8m0fnu for blocks of 32.
        dtype: of the result.

    Returns:
        Tensor of codes' shape and the given dtype.

    Raises:
        ValueError: codes have no FP8 element dtype.
    """
    as_element_format(codes.dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes.to(compute) * broadcast_block_scales(scale_inv, codes.shape).to(compute)).to(dtype)
