"""A second implementation of casting, which shares no code with `fp8core.cast`, `fp8core.scaling` and the kernels.

    amax       largest magnitude of each block, by chunks of rows
    scale      float32(max / amax), or its lower power of two, or the E8M0 power of two of MX; by float64 and frexp
    code       sign * round_half_even(|y| / step) * step,   y = float32(x * scale) in [-max, max],
               step = 2**(max(exponent of y, emin) - mantissa bits)                          (OCP OFP8; docs/numerics.md)

Everything is float64, in which the product of two float32 numbers is exact. A cast is never made whole: `values` gives
a tile of it, so that a check of a large tensor needs little memory. Codes are compared as bytes, where the conversion
of an exactly representable value to its FP8 dtype is all that is left to PyTorch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fp8core.recipe import Cast

CHUNK = 1 << 22  # elements of a temporary: 32 MiB of float64
_FLOOR = 1e-12  # of an amax: torchao `float8_utils.EPS`

# FP8 dtype -> (mantissa bits, lowest exponent of a normal number, largest value); OCP OFP8 1.0, and "8-bit numerical
# formats for deep neural networks" (arXiv 2206.02915) for fnuz
_FORMATS: dict[torch.dtype, tuple[int, int, float]] = {
    torch.float8_e4m3fn: (3, -6, 448.0),
    torch.float8_e5m2: (2, -14, 57344.0),
    torch.float8_e4m3fnuz: (3, -7, 240.0),
    torch.float8_e5m2fnuz: (2, -15, 57344.0),
}


def block_of(cast: Cast, dim: int) -> tuple[int, int]:
    """(rows, columns) that share a scale where `dim` is contracted; 0 means all of them."""
    along = {"tensorwise": 0, "rowwise": 0, "1x128": 128, "128x128": 128, "1x32": 32}[cast.granularity]
    across = {"tensorwise": 0, "rowwise": 1, "1x128": 1, "128x128": 128, "1x32": 1}[cast.granularity]
    return (across, along) if dim == 1 else (along, across)


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each block of a matrix, float64 [blocks of rows, blocks of columns]; NaN where one is NaN.

    Args:
        x: [M, K], any floating dtype.
        block: as `block_of`.
    """
    (M, K), device = x.shape, x.device
    rows, columns = block[0] or max(M, 1), block[1] or max(K, 1)
    result = torch.zeros(-(-M // rows), -(-K // columns), dtype=torch.float64, device=device)
    step = max(1, CHUNK // max(K, 1))
    if block[0] > 1:  # chunks hold whole blocks; a block of all rows is met in several chunks
        step = max(block[0], step // block[0] * block[0])
    for first in range(0, M if K else 0, step):
        part = x[first : first + step].double().abs()
        missing = -K % columns
        if missing:
            part = torch.nn.functional.pad(part, (0, missing))
        part = part.view(part.shape[0], -1, columns).amax(2)
        if not block[0]:
            result[0] = torch.maximum(result[0], part.amax(0))
            continue
        missing = -part.shape[0] % rows
        if missing:
            part = torch.nn.functional.pad(part, (0, 0, 0, missing))
        part = part.view(-1, rows, part.shape[1]).amax(1)
        result[first // rows : first // rows + part.shape[0]] = part
    return result


def scales_of(amax: torch.Tensor, cast: Cast) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, scale_inv) of each block as float64 that float32 holds exactly; special values by IEEE arithmetic."""
    mantissa, _, largest = _FORMATS[cast.format.dtype]
    if cast.granularity == "1x32":
        return _mx_scales(amax, cast.mx_mode, mantissa, largest)
    scale = (largest / amax.clamp(min=_FLOOR)).float().double()
    if cast.power_of_two:
        _, exponent = torch.frexp(scale)
        lower = torch.ldexp(torch.ones_like(scale), exponent - 1)
        scale = torch.where((scale > 0) & scale.isfinite(), lower, scale)
    return scale, (1.0 / scale).float().double()


def _mx_scales(
    amax: torch.Tensor, mode: str, mantissa: int, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """E8M0: the decoding scale is 2**e, e from -127 to 127; NaN for a block that is not finite."""
    significand, exponent = torch.frexp(amax)  # amax = significand * 2**exponent, significand in [0.5, 1)
    emax = math.frexp(largest)[1] - 1
    if mode == "floor":
        e = exponent - 1
    elif mode == "ceil":
        e = torch.where(significand == 0.5, exponent - 1, exponent)
    elif mode == "rceil":
        top = math.frexp(largest)[0]
        e = torch.where(significand > top, exponent, exponent - 1)
    else:  # "even": amax rounded half up to the element's mantissa
        steps = 2.0 ** (mantissa + 1)
        e = torch.where(torch.floor(significand * steps + 0.5) >= steps, exponent, exponent - 1)
    e = torch.where(amax > 0, e - emax, torch.full_like(e, -127)).clamp(-127, 127)
    scale_inv = torch.ldexp(torch.ones_like(amax), e)
    scale_inv = torch.where(amax.isfinite(), scale_inv, torch.nan)
    return 1.0 / scale_inv, scale_inv


def rounded(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y, float64, saturated and rounded half to even to the values of an FP8 dtype; NaN stays."""
    mantissa, emin, largest = _FORMATS[dtype]
    y = y.clamp(-largest, largest)
    _, exponent = torch.frexp(y)
    step = torch.ldexp(torch.ones_like(y), (exponent - 1).clamp(min=emin) - mantissa)
    return torch.round(y / step) * step


def code_bytes(values: torch.Tensor) -> torch.Tensor:
    """Codes as uint8, one byte for all NaN and one for both zeros, so that they can be compared."""
    raw = values.view(torch.uint8)
    wide = values.float()
    raw = torch.where(wide == 0, torch.zeros_like(raw), raw)
    return torch.where(wide.isnan(), torch.full_like(raw, 255), raw)


@dataclass(frozen=True)
class Quantized:
    """A matrix as a GEMM must receive it, made tile by tile.

    Attributes:
        x: [M, K] in high precision.
        cast: None leaves it in high precision.
        scale, scale_inv: float64, of each block; empty without a cast.
        block: rows and columns of a block, 0 for all.
        first_row: of x in the matrix whose blocks the scales are.
    """

    x: torch.Tensor
    cast: Cast | None
    scale: torch.Tensor
    scale_inv: torch.Tensor
    block: tuple[int, int]
    first_row: int = 0

    @classmethod
    def of(cls, x: torch.Tensor, cast: Cast | None, dim: int, amax: torch.Tensor | None = None) -> Quantized:
        """x cast for a contraction of `dim`.

        Args:
            x: [M, K].
            cast: how, or None.
            dim: 0 or 1.
            amax: float64 of each block where it is not x's own: of larger tensors that x is a part of, or of earlier steps.
        """
        if cast is None:
            empty = torch.zeros(0, dtype=torch.float64, device=x.device)
            return cls(x, None, empty, empty, (0, 0))
        block = block_of(cast, dim)
        own = block_amax(x, block) if amax is None or cast.scaling != "dynamic" else amax
        scale, scale_inv = scales_of(own if amax is None else amax.expand(own.shape), cast)
        if cast.scaling != "dynamic":  # a stale scale is finite whatever x holds, its decoding then is not
            scale_inv = torch.where(own.isfinite(), scale_inv, torch.nan)
        return cls(x, cast, scale, scale_inv, block)

    def _spread(self, scale: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        result = scale
        for dim, (along, size) in enumerate(zip((rows, columns), self.x.shape, strict=True)):
            index = torch.arange(*along.indices(size), device=scale.device)
            block = self.block[dim]
            index = (index + (0 if dim else self.first_row)) // block if block else index * 0
            result = result.index_select(dim, index)
        return result

    def hp(self, rows: slice, columns: slice) -> torch.Tensor:
        """A tile in high precision, float64."""
        return self.x[rows, columns].double()

    def codes(self, rows: slice, columns: slice) -> torch.Tensor:
        """A tile of the codes' values, float64; only of a cast matrix."""
        assert self.cast is not None
        product = (self.hp(rows, columns) * self._spread(self.scale, rows, columns)).float().double()
        return rounded(product, self.cast.format.dtype)

    def values(self, rows: slice, columns: slice) -> torch.Tensor:
        """A tile as the GEMM reads it: codes times decoding scales, float64, exact."""
        if self.cast is None:
            return self.hp(rows, columns)
        return self.codes(rows, columns) * self._spread(self.scale_inv, rows, columns)

    def decoding(self, rows: slice, columns: slice) -> torch.Tensor:
        """A tile of decoding scales, one an element."""
        return self._spread(self.scale_inv, rows, columns)

    def losses(self) -> tuple[float, float]:
        """(share of elements that saturate, share that becomes zero although it is not)."""
        if self.cast is None or not self.x.numel():
            return 0.0, 0.0
        largest = _FORMATS[self.cast.format.dtype][2]
        saturated = lost = 0
        for rows, columns in tiles(*self.x.shape):
            product = (self.hp(rows, columns) * self._spread(self.scale, rows, columns)).abs()
            saturated += int((product > largest * (1 + 2**-20)).sum())
            lost += int(((rounded(product, self.cast.format.dtype) == 0) & (product > 0)).sum())
        return saturated / self.x.numel(), lost / self.x.numel()


def tiles(M: int, K: int, limit: int = CHUNK) -> list[tuple[slice, slice]]:
    """Rows of a matrix in parts of at most `limit` elements, a row that is longer in several."""
    width = min(max(K, 1), limit)
    height = max(1, limit // width)
    return [
        (slice(i, min(i + height, M)), slice(j, min(j + width, K)))
        for i in range(0, M, height)
        for j in range(0, K, width)
    ]
