"""amax and scale: from the largest magnitude of a group to the factor that fits it into an FP8 format.

    amax      = max |x|                                  over the scaling group, in float32
    scale     = fp8_max / max(amax, AMAX_FLOOR)          high precision -> FP8: multiply by it
    scale_inv = 1 / scale                                FP8 -> high precision: what every GEMM takes

The quotient is formed in float64 and rounded once to float32. Eager PyTorch turns `number / float32 tensor`
into a reciprocal and a multiplication, which is one ulp off the true quotient for about a quarter of all
values, and a compiled kernel may not do the same; in float64 the second rounding hides both. `scale_inv` is
the reciprocal of the *rounded* scale and never a second division from amax, or backends would disagree by
one ulp.

With `power_of_two` the scale is rounded down to a power of two by clearing its mantissa bits. This is exact.
`exp2(floor(log2(scale)))`, as in torchao 0.18, rounds *up* when the scale lies 1 to 5 ulp below a power of
two, because the float32 logarithm rounds to an integer there; elsewhere both are equal.

One rule for each special group (docs/numerics.md, section 3):

    amax 0, or an empty group    the floor 1e-12 acts: scale is finite, zeros stay zeros
    amax Inf                     scale 0, scale_inv Inf: every element of the group comes back as NaN
    amax NaN                     scale and scale_inv NaN: every element of the group comes back as NaN

so that a non-finite input can never turn into plausible finite output.
"""

from __future__ import annotations

import torch

from fp8core.formats import Format, as_element_format
from fp8core.recipe import GRANULARITIES, Granularity

AMAX_FLOOR = 1e-12  # as torchao `float8_utils.EPS`: keeps the scale of an all-zero group finite
HP_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)

_SIGN_AND_EXPONENT = -0x0080_0000  # 0xFF80_0000 as int32: all but the 23 mantissa bits of a float32


def check_hp(x: torch.Tensor, what: str = "x") -> None:
    """Refuses dtypes that no FP8 cast takes.

    Raises:
        TypeError: not float32, bfloat16 or float16. float64 is refused rather than rounded twice: through
            float32 about a quarter of the values near a midpoint of two codes go to the wrong one.
    """
    if x.dtype not in HP_DTYPES:
        hint = "; call .float() first if double rounding is acceptable" if x.dtype == torch.float64 else ""
        raise TypeError(f"{what} has dtype {x.dtype}; expected float32, bfloat16 or float16{hint}")


def amax(x: torch.Tensor, granularity: Granularity = "tensorwise", dim: int = -1) -> torch.Tensor:
    """The largest magnitude of each scaling group.

    Args:
        x: float32, bfloat16 or float16, any layout.
        granularity: "tensorwise" = one group; "rowwise" = one group for each line along `dim`.
        dim: the contracted dimension, over which "rowwise" reduces; ignored by "tensorwise".

    Returns:
        float32: 0-dimensional, or of x's shape with `dim` reduced to 1. NaN where a group holds a NaN, Inf
        where it holds an Inf and no NaN, 0 for an empty group.

    Raises:
        TypeError: dtype, see `check_hp`.
        ValueError: unknown granularity, or `dim` outside of x.
    """
    check_hp(x)
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"granularity {granularity!r} is unknown; expected one of {', '.join(GRANULARITIES)}"
        )
    magnitude = x.detach().abs()
    if granularity == "tensorwise":
        return (magnitude.amax() if x.numel() else magnitude.new_zeros(())).float()
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"dim {dim} is outside of a tensor of shape {tuple(x.shape)}; rowwise scaling needs one"
        )
    if x.shape[dim] == 0:
        shape = list(x.shape)
        shape[dim] = 1
        return x.new_zeros(shape, dtype=torch.float32)
    return magnitude.amax(dim, keepdim=True).float()


def compute_scale(
    amax: torch.Tensor, fmt: Format | torch.dtype | str, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scale = fp8_max / amax` and its reciprocal `scale_inv`.

    >>> import torch
    >>> from fp8core.formats import E4M3FN
    >>> scale, scale_inv = compute_scale(torch.tensor(2.0), E4M3FN)
    >>> scale.item(), scale_inv.item()  # 448 / 2 takes amax to the largest E4M3 value
    (224.0, 0.004464285913854837)
    >>> compute_scale(torch.tensor(2.0), E4M3FN, power_of_two=True)[0].item()
    128.0

    `amax * scale` may exceed fp8_max by one ulp of float32 (8.7 % of all amax), which the cast rounds away.

    Args:
        amax: non-negative, any shape, float32; see `amax`.
        fmt: the target format.
        power_of_two: round scale down to a power of two.

    Returns:
        (scale, scale_inv), both float32 of amax's shape; special values as in the module docstring.

    Raises:
        ValueError: fmt is no element format.
    """
    fp8_max = as_element_format(fmt).max
    scale = (fp8_max / amax.detach().double().clamp(min=AMAX_FLOOR)).float()
    if power_of_two:
        masked = (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, masked)  # the mask alone would turn NaN into Inf
    # Through float64 again: a compiler may turn a float32 reciprocal into an approximate division.
    return scale, scale.double().reciprocal().float()
