"""A second implementation of casting, which shares no code with `fp8core.cast`, `fp8core.scaling` and the kernels.

    amax       largest magnitude of each block
    scale      float32(max / amax), or its lower power of two, or the E8M0 power of two of MX; by float64 and frexp
    code       sign * round_half_even(|y| / step) * step,   y = float32(x * scale) in [-max, max],
               step = 2**(max(exponent of y, emin) - mantissa bits)                          (OCP OFP8; docs/numerics.md)

Everything is float64, in which the product of two float32 numbers is exact. A cast is never made whole: `Operand.values`
gives a tile of it, so that a check of a large tensor needs little memory. Operands are compared by `Digest`, of the bytes
of their codes, where the conversion of an exactly representable value to its FP8 dtype is all that is left to PyTorch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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
# granularity -> (lines, elements along the contraction) that share a scale; 0 means all of them
BLOCKS = {"tensorwise": (0, 0), "rowwise": (1, 0), "1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each block of a matrix, float64 [blocks of lines, blocks along]; NaN where one is NaN."""
    sizes = [size or max(whole, 1) for size, whole in zip(block, x.shape, strict=True)]
    missing = [-whole % size for size, whole in zip(sizes, x.shape, strict=True)]
    if any(missing):
        x = torch.nn.functional.pad(x, (0, missing[1], 0, missing[0]))
    split = [(whole // size, size) for size, whole in zip(sizes, x.shape, strict=True)]
    parts = x.unflatten(1, split[1]).unflatten(0, split[0])
    return torch.maximum(parts.amax((1, 3)), -parts.amin((1, 3))).double()


def scales_of(amax: torch.Tensor, cast: Cast) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, scale_inv) of each block as float64 that float32 holds exactly; special values by IEEE arithmetic."""
    mantissa, _, largest = _FORMATS[cast.format.dtype]
    if cast.granularity == "1x32":  # E8M0: the decoding scale is 2**e, NaN for a block that is not finite
        top, emax = math.frexp(largest)
        # Above which significand, in [0.5, 1), the next power of two is taken; "even": the amax rounded half up to the
        # element's mantissa
        limit = {"floor": 1.0, "ceil": 0.5, "rceil": top}.get(
            cast.mx_mode, math.nextafter(1 - 2.0 ** -(mantissa + 2), 0)
        )
        significand, exponent = torch.frexp(amax)
        e = torch.where(amax > 0, exponent - emax + (significand > limit).int(), -127).clamp(-127, 127)
        scale_inv = torch.where(amax.isfinite(), torch.ldexp(torch.ones_like(amax), e), torch.nan)
        return 1.0 / scale_inv, scale_inv
    scale = (largest / amax.clamp(min=_FLOOR)).float().double()
    if cast.power_of_two:
        lower = torch.ldexp(torch.ones_like(scale), torch.frexp(scale)[1] - 1)
        scale = torch.where((scale > 0) & scale.isfinite(), lower, scale)
    return scale, (1.0 / scale).float().double()


def rounded(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y, float64, saturated and rounded half to even to the values of an FP8 dtype; NaN stays."""
    mantissa, emin, largest = _FORMATS[dtype]
    y = y.clamp(-largest, largest)
    step = torch.ldexp(torch.ones_like(y), (torch.frexp(y)[1] - 1).clamp(min=emin) - mantissa)
    return torch.round(y / step) * step


@dataclass(frozen=True)
class TiledOperand:
    """A matrix [lines, along] that a GEMM contracts along its last dimension, made or read tile by tile.

    Attributes:
        x: high precision; codes, where these are what is given.
        cast: that x must go through; None of codes, and of what stays in high precision.
        scale, scale_inv: of each block, None where there is none.
    """

    x: torch.Tensor
    cast: Cast | None = None
    scale: torch.Tensor | None = None
    scale_inv: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        cast: Cast | None,
        amax: torch.Tensor | None = None,
        held: torch.Tensor | None = None,
    ) -> TiledOperand:
        """x cast as a GEMM must receive it.

        Args:
            x: [lines, along].
            cast: how, or None.
            amax: float64 of each block where it is not x's own but that of a larger tensor.
            held: float64 [1, 1], of earlier steps, that the scale goes by.
        """
        if cast is None:
            return cls(x)
        own = block_amax(x, BLOCKS[cast.granularity]) if amax is None else amax
        scale, scale_inv = scales_of(own if held is None else held.expand(own.shape), cast)
        if held is not None:  # a stale scale is finite whatever x holds, its decoding then is not
            scale_inv = torch.where(own.isfinite(), scale_inv, torch.nan)
        return cls(x, cast, scale, scale_inv)

    @property
    def dtype(self) -> torch.dtype:
        """The codes' own."""
        return self.cast.format.dtype if self.cast is not None else self.x.dtype

    @classmethod
    def given(cls, codes: torch.Tensor, scale_inv: torch.Tensor) -> TiledOperand:
        """Codes and their decoding scales."""
        return cls(codes, scale_inv=scale_inv if scale_inv.dim() == 2 else scale_inv.reshape(1, 1))

    @property
    def digest(self) -> Digest | None:
        """What a cast's codes and scales must be."""
        return None if self.cast is None else Digest.of(self)

    def t(self) -> TiledOperand:
        """What contracts the other dimension; of codes."""
        assert self.scale_inv is not None
        return TiledOperand(self.x.t(), scale_inv=self.scale_inv.t())

    def part(self, lines: slice | torch.Tensor) -> TiledOperand:
        """Some lines, by index too."""
        scales = (s if s is None else self._along(s, 0, lines) for s in (self.scale, self.scale_inv))
        return TiledOperand(self.x[lines], self.cast, *scales)

    def block_along(self, K: int, other: TiledOperand) -> int:
        """Elements along the contraction for which both operands have one scale each."""
        scales = [side.scale_inv for side in (self, other) if side.scale_inv is not None]
        if all(scale.shape[1] == 1 for scale in scales):
            return max(K, 1)
        mx = any(scale.dtype == torch.float8_e8m0fnu for scale in scales)
        return 32 if mx or max(scale.shape[1] for scale in scales) > -(-K // 128) else 128

    def blocks(self, scale: torch.Tensor, dim: int, part: slice | torch.Tensor) -> torch.Tensor:
        """int64: which of the scales along a dimension is that of each element."""
        size, count = self.x.shape[dim], scale.shape[dim]
        index = torch.arange(size, device=scale.device)[part]
        mx = scale.dtype == torch.float8_e8m0fnu or (self.cast and self.cast.granularity == "1x32")
        return index * 0 if count == 1 else index if count == size else index // (32 if mx else 128)

    def _along(self, scale: torch.Tensor, dim: int, part: slice | torch.Tensor) -> torch.Tensor:
        if scale.shape[dim] == 1 or not scale.numel():  # of a batch without tokens
            return scale
        return scale.index_select(dim, self.blocks(scale, dim, part))

    def spread(self, scale: torch.Tensor | None, lines: slice, along: slice) -> torch.Tensor:
        """Scales that broadcast to a tile, float64."""
        assert scale is not None
        return self._along(self._along(scale, 0, lines), 1, along).float().double()

    def hp(self, lines: slice, along: slice) -> torch.Tensor:
        """A tile in high precision, float64; of codes the value that they stand for."""
        given = self.cast is None and self.scale_inv is not None
        return self.values(lines, along) if given else self.x[lines, along].double()

    def codes(self, lines: slice, along: slice) -> torch.Tensor:
        """A tile of the codes' values, float64."""
        if self.cast is None:
            return self.x[lines, along].float().double()
        return rounded(
            (self.hp(lines, along) * self.spread(self.scale, lines, along)).float().double(), self.dtype
        )

    def values(self, lines: slice, along: slice) -> torch.Tensor:
        """A tile as the GEMM reads it: codes times decoding scales, float64, exact."""
        if self.scale_inv is None:
            return self.hp(lines, along)
        return self.codes(lines, along) * self.spread(self.scale_inv, lines, along)

    def squares(self, dim: int) -> torch.Tensor:
        """Sums of the squares of `values` over one dimension, float64."""
        total = torch.zeros(self.x.shape[1 - dim], dtype=torch.float64, device=self.x.device)
        for part in tiles(*self.x.shape):
            total[part[1 - dim]] += self.values(*part).square().sum(dim)
        return total

    def losses(self) -> tuple[float, float]:
        """(share of elements that saturate, share that becomes zero although it is not), of a cast."""
        saturated = lost = 0
        for part in tiles(*self.x.shape):
            product = (self.hp(*part) * self.spread(self.scale, *part)).abs()
            saturated += int((product > _FORMATS[self.dtype][2] * (1 + 2**-20)).sum())
            lost += int(((rounded(product, self.dtype) == 0) & (product > 0)).sum())
        return saturated / self.x.numel(), lost / self.x.numel()


class Digest(NamedTuple):
    """What is kept of an operand to compare it with another: of each line sums of codes and of scales, each times a
    random weight, int64 modulo 2**64. One wrong bit moves the sum."""

    dtype: torch.dtype
    shape: torch.Size
    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, operand: TiledOperand, shape: torch.Size | None = None) -> Digest:
        """Digest what lies within `shape`; what is beyond is padding."""
        (M, K), dtype = operand.x.shape if shape is None else shape, operand.dtype
        codes = torch.zeros(M, dtype=torch.int64, device=operand.x.device)
        weights = mixers(K, codes.device)
        for lines, along in tiles(M, K):
            raw = operand.codes(lines, along).float() if operand.cast else operand.x[lines, along]
            value = raw.to(dtype)
            raw, wide = value.view(torch.uint8), value.float()
            # One byte for all NaN and one for both zeros
            raw = torch.where(wide == 0, 0, torch.where(wide.isnan(), 255, raw))
            codes[lines] += (raw.long() * weights[along]).sum(1)
        assert operand.scale_inv is not None
        if not operand.scale_inv.numel():  # of an operand without elements, such as a batch without tokens
            return cls(dtype, torch.Size((M, K)), codes, torch.zeros_like(codes))
        of_lines = operand.scale_inv.index_select(0, operand.blocks(operand.scale_inv, 0, slice(M))).float()
        bits = torch.where(of_lines.isnan(), torch.nan, of_lines).view(torch.int32).long()
        columns = operand.blocks(operand.scale_inv, 1, slice(K))
        scales = (bits * weights.new_zeros(bits.shape[1]).index_add(0, columns, weights)).sum(1)
        return cls(dtype, torch.Size((M, K)), codes, scales)

    def fault(self, got: TiledOperand) -> str:
        """How codes and scales that arrived differ from these; "" if they don't. Padding is ignored."""
        if got.dtype != self.dtype:
            names = [str(dtype).removeprefix("torch.float8_") for dtype in (got.dtype, self.dtype)]
            return f"codes are {names[0]}, the recipe promises {names[1]}"
        if any(have < want for have, want in zip(got.x.shape, self.shape, strict=True)):
            return f"codes have shape {list(got.x.shape)}, expected {list(self.shape)}"
        found = Digest.of(got, self.shape)
        faults = []
        for what in ("codes", "scales"):
            wrong = int((getattr(found, what) != getattr(self, what)).sum())
            if wrong:
                faults.append(f"{what} of {wrong} of {self.shape[0]} lines differ from an independent cast")
        return "; ".join(faults)


def mixers(count: int, device: torch.device) -> torch.Tensor:
    """Random int64 [count] that the terms of a checksum are multiplied with: the same in each call and on each rank."""
    return torch.randint(1, 1 << 62, (count,), generator=torch.Generator().manual_seed(0xF8)).to(device)


def tiles(M: int, K: int, limit: int = CHUNK) -> list[tuple[slice, slice]]:
    """Rows of a matrix in parts of at most `limit` elements, a row that is longer in several."""
    width = min(max(K, 1), limit)
    height = max(1, limit // width)
    return [
        (slice(i, min(i + height, M)), slice(j, min(j + width, K)))
        for i in range(0, M, height)
        for j in range(0, K, width)
    ]
