"""What right looks like: references that share no code with what is measured, and the bounds they set.

A GEMM has two references. Against the *exact product of its own codes* only accumulation and the rounding of
the output remain, so the bound is tight and a wrong kernel cannot hide in quantisation noise. Against the
product of the *high-precision inputs* the quantisation noise itself is judged: random Gaussian operands have
one right value, and an FP8 arm that quietly ran in bf16 lies as far outside of it as one with a wrong scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fp8core.formats import as_element_format
from harness.store.errors import Cause
from harness.timing import metrics
from harness.timing.workload import Numerics

if TYPE_CHECKING:
    from fp8core.gemm.layout import Operand
    from fp8core.recipe import Cast, Gemm

AMAX_FLOOR = 1e-12  # the documented floor of fp8core.scaling

# SQNR in dB of a GEMM of independent Gaussian operands whose casts round to nearest, whatever K is; docs/numerics-gemm.md,
# section 4. Measured cells lie within 0.1 of these for tensorwise and rowwise, fp32 and power-of-two scales.
GAUSSIAN_SQNR_DB = {("e4m3", "e4m3"): 28.50, ("e4m3", "e5m2"): 24.57, ("e5m2", "e5m2"): 22.53}
GAUSSIAN_MARGIN_DB = 0.2
# With operands of e2m1 in blocks of 16 or 32 it lies between 14.9 (one rounded stochastically) and 16.8 dB (2026-11-29); FP8's least is 22.5
FOUR_BITS_DB = (13.0, 19.0)

Bound = tuple[float, str]  # the least SQNR of a right result in dB, and where that comes from
# Rounding to bf16 moves an element by at most 2^-8 of itself, so that any row or column of a right result has at
# least 48.2 dB (55.7 in the mean). The rest is for the sum: fp32 leaves 140 dB, promotion every 128 elements 78.
ROUNDED: Bound = (47.0, "against the exact product of the codes; rounding to bf16 leaves 48.2")
# cuBLAS may add the parts of a split sum in bf16 (torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
# which rounds twice; on a GPU of an FP8 GEMM, too.
BF16_MATMUL: Bound = (41.0, "against the exact product; rounding to bf16 twice leaves 42.1")
FOUR_BITS: Bound = (
    8.0,
    "against the operands in high precision; e2m1 leaves 15, the worst line of 128 more than 11",
)


def fast_accum_bound(K: int, positive: bool = False) -> Bound:
    """SQNR bound in dB of a GEMM whose accumulator may be short (Hopper's 14 bits), against the exact product of its codes.

    In the model of docs/numerics-gemm.md, section 5, zero-mean data keep 53 dB at K = 8192 and lose 5 to 8 a doubling;
    a sum of equal signs is biased by truncation and keeps 17, losing 6. Ten dB of room, since it is a model.
    """
    doublings = max(0.0, math.log2(K / 8192))
    source = (
        "against the exact product of the codes; short accumulator, docs/numerics-gemm.md, section 5: a model"
    )
    return (7.0 - 6 * doublings if positive else 43.0 - 8 * doublings), source


def fp8_bound(device: str, K: int, fast: bool, positive: bool = False) -> Bound:
    """SQNR bound in dB of an FP8 GEMM against the exact product of its codes."""
    if fast:
        return fast_accum_bound(K, positive)
    return ROUNDED if torch.device(device).type == "cpu" else BF16_MATMUL


def reference_cast(
    x: Tensor,
    dtype: torch.dtype,
    granularity: str,
    *,
    dim: int = -1,
    power_of_two: bool = False,
    mx_mode: str = "rceil",
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises as fp8core.cast documents it, by other means: numbers are looked up among the decoded codes.

    Args:
        x: [.., ..] of any floating dtype whose values float32 holds.
        dtype: float8_e4m3fn or float8_e5m2.
        granularity: "tensorwise", "rowwise" or one of `BLOCKS`.
        dim: the contracted dimension, along which the others than "tensorwise" share scales.
        power_of_two: round scales down to powers of two.
        mx_mode: of "1x32", see `mx_exponent`.
        amax: of `group_amax`, where x is only a part of what shares a scale.

    Returns:
        (codes of x's shape, scale_inv float32: 0-dimensional, x's shape with `dim` reduced to 1, or x's shape).
    """
    if amax is None:
        amax = group_amax(x, granularity, dim)
    decoded = torch.arange(128, dtype=torch.uint8, device=x.device).view(dtype).double()
    values = decoded[decoded.isfinite()]  # non-negative codes in order, hence values in order
    if granularity == "1x32":
        scale_inv = mx_scale_inv(amax, dtype, mx_mode)
        return _round_to(values, x.detach().float() / scale_inv, dtype), scale_inv  # exact: a power of two
    scale = (values[-1] / amax.double().clamp(min=AMAX_FLOOR)).float()
    if power_of_two:
        exponent = torch.frexp(scale.double()).exponent - 1
        scale = torch.where(
            scale.isfinite() & (scale > 0), torch.ldexp(torch.ones_like(scale), exponent), scale
        )
    scaled = x.detach().float() * scale
    return _round_to(values, scaled, dtype), 1 / scale


def mx_scale_inv(amax: Tensor, dtype: torch.dtype, mode: str) -> Tensor:
    """X = 2**e of an MX block with this amax, float32; NaN for Inf and NaN. In real numbers, as OCP MX 1.0 has it:

        floor   e = floor(log2(amax)) - emax
        ceil    e = ceil(log2(amax)) - emax
        rceil   e = ceil(log2(amax / max))
        even    e = floor(log2(amax rounded to the element's mantissa, ties up)) - emax

    emax is floor(log2(max)) of the element format; e is clamped to -127..127, E8M0's range. Logarithms are of float64
    values and compared with the powers next to them, so that none is off by one.

    Raises:
        ValueError: unknown mode.
    """
    largest, steps = torch.finfo(dtype).max, 1 / torch.finfo(dtype).eps  # 2**mantissa bits
    emax = math.floor(math.log2(largest))
    wide = amax.double()
    power = torch.pow(2.0, _floor_log2(wide))
    exponents = {
        "floor": _floor_log2(wide) - emax,
        "ceil": _ceil_log2(wide) - emax,
        "rceil": _ceil_log2(wide / largest),
        "even": _floor_log2(torch.floor(wide / power * steps + 0.5) / steps * power) - emax,
    }
    if mode not in exponents:
        known = ", ".join(exponents)
        raise ValueError(f"MX rounding {mode!r} has no reference in harness/suites/oracle.py; known: {known}")
    exponent = torch.where(wide == 0, -127.0, exponents[mode]).clamp(-127, 127)
    return torch.where(wide.isfinite(), torch.pow(2.0, exponent), torch.nan).float()


def _floor_log2(x: Tensor) -> Tensor:
    """Float64; the estimate is corrected by comparison with the powers next to it."""
    guess = torch.floor(torch.log2(x))
    guess = guess - (torch.pow(2.0, guess) > x).double()
    return guess + (torch.pow(2.0, guess + 1) <= x).double()


def _ceil_log2(x: Tensor) -> Tensor:
    below = _floor_log2(x)
    return below + (torch.pow(2.0, below) < x).double()


def _round_to(values: Tensor, scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest of `values` by magnitude, ties to the even code, beyond the last one the last one; NaN to NaN."""
    middles = (values[1:] + values[:-1]) / 2  # exact: one bit more than the values have
    codes = torch.empty(scaled.shape, dtype=torch.uint8, device=scaled.device)
    for part, out in zip(scaled.reshape(-1).split(_CHUNK), codes.view(-1).split(_CHUNK), strict=True):
        magnitude = part.double().abs()
        # How many middles are smaller: the code, a tie rounded down
        below = torch.searchsorted(middles, magnitude)
        tie = magnitude == middles[below.clamp(max=len(middles) - 1)]
        code = below + (tie & (below % 2 == 1))
        code = torch.where(part.isnan(), 0x7F, code) + 0x80 * part.signbit()
        out.copy_(code.to(torch.uint8))
    return codes.view(dtype)


_CHUNK = (
    2**22
)  # elements looked up at a time: 8-byte indices of a whole operand would take its memory tenfold


def group_amax(x: Tensor, granularity: str, dim: int) -> Tensor:
    """For each element the largest magnitude among those that share its scale; broadcastable to x.

    Raises:
        ValueError: a granularity without a reference, so that no arm is timed unchecked.
    """
    magnitude = x.detach().abs()
    if granularity == "tensorwise":
        return magnitude.max()
    if granularity == "rowwise":
        return magnitude.max(dim, keepdim=True).values
    if granularity not in BLOCKS:
        known = ", ".join(("tensorwise", "rowwise", *BLOCKS))
        raise ValueError(
            f"granularity {granularity!r} has no reference in harness/suites/oracle.py; known: {known}"
        )
    across, along = BLOCKS[granularity]
    if across > 1:
        magnitude = _block_max(magnitude, across, 1 - dim % 2)
    return _block_max(magnitude, along, dim)


def _block_max(x: Tensor, size: int, dim: int) -> Tensor:
    """Each element replaced by the largest of its block; the last block may be shorter."""
    return torch.cat([part.amax(dim, keepdim=True).expand_as(part) for part in x.split(size, dim)], dim)


# Elements that share a scale: across and along the contracted dimension.
BLOCK_SIZE = 128
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}


def reference_operand(whole: Tensor, cast: Cast, dim: int, lines: Tensor) -> tuple[Tensor, Tensor]:
    """`reference_cast` of some lines of a GEMM's operand, scaled as a part of the whole.

    Args:
        whole: the operand, a matrix.
        cast: the recipe's choice for it.
        dim: the contracted dimension.
        lines: indices along the other dimension.

    Returns:
        (codes, scale_inv) of the lines; scale_inv broadcasts to the codes.
    """
    part = whole.index_select(1 - dim, lines)
    shared = cast.granularity == "tensorwise" or BLOCKS.get(cast.granularity, (1, 1))[0] > 1
    amax = group_amax(whole if shared else part, cast.granularity, dim)
    if shared and amax.dim():
        amax = amax.index_select(1 - dim, lines)
    return reference_cast(
        part,
        cast.format.dtype,
        cast.granularity,
        dim=dim,
        power_of_two=cast.power_of_two,
        mx_mode=cast.mx_mode,
        amax=amax,
    )


def values(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """What codes and scales stand for, in float64, exact."""
    return codes.double() * scale_inv.double()


def sample_rows(rows: int, seed: int, most: int, device: str) -> Tensor:
    """Indices of at most `most` rows in ascending order: all of them, or a random choice with first and last."""
    if rows <= most:
        return torch.arange(rows, device=device)
    chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: max(most - 2, 0)]
    return torch.cat([chosen, torch.tensor([0, rows - 1])]).unique().to(device)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [R, K] @ b [K, N] in float64; b is widened a block of columns at a time."""
    wide = a.double()
    columns = max(1, 2**26 // max(b.shape[0], 1))
    return torch.cat([wide @ part.double() for part in b.split(columns, dim=1)], dim=1)


def product_of_codes(a: Operand, b: Operand, rows: Tensor) -> Tensor:
    """The chosen rows of A @ B in float64, from codes and scales: exact to the last bits of float64.

    Scales of lines and tensors leave the sum; those of blocks (128 along the contracted dimension) are repeated.
    """
    # float8 has no index on every device, its bytes have.
    codes = a.qdata.view(torch.uint8)[rows].view(a.qdata.dtype)
    of_lines = ([a.qdata.shape[0], 1], [1, b.qdata.shape[1]])
    if a.scale_inv.dim() == 0 or (list(a.scale_inv.shape), list(b.scale_inv.shape)) == of_lines:
        scale_a = a.scale_inv[rows] if a.scale_inv.dim() else a.scale_inv
        return product(codes, b.qdata) * scale_a.double() * b.scale_inv.double()
    scale_a = _each_element(a.scale_inv, a.qdata.shape, rows)
    return product(codes.double() * scale_a, b.qdata.double() * _each_element(b.scale_inv, b.qdata.shape))


def _each_element(scale_inv: Tensor, shape: torch.Size, rows: Tensor | None = None) -> Tensor:
    """Block scales by index, float64: the element (i, j) has that of (i // 128, j // 128), or of its own line."""
    index = []
    for dim, size in enumerate(shape):
        at = torch.arange(size, device=scale_inv.device) if rows is None or dim else rows
        index.append(at if scale_inv.shape[dim] == size else at // BLOCK_SIZE)
    return scale_inv.double()[index[0][:, None], index[1][None, :]]


def gaussian_margin_db(M: int, K: int, N: int) -> float:
    """How far a right GEMM of Gaussian operands may lie from `GAUSSIAN_SQNR_DB`.

    0.2 dB, or for a small GEMM five standard deviations of the sample: 12 / sqrt(n) dB, where n counts the
    elements of the smallest of the three matrices (measured over 40 to 60 seeds and 14 shapes).
    """
    return max(GAUSSIAN_MARGIN_DB, 5 * 12 / math.sqrt(min(M * K, K * N, M * N)))


@dataclass(slots=True)
class OracleCheck:
    """Collects figures and the reasons why a result may not be timed."""

    values: dict[str, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    bounds: dict[str, float] = field(default_factory=dict)  # metric -> dB that a right result has at least
    cause: Cause = Cause.NUMERICS  # of a result that is not right

    def at_least(self, what: str, figure: float, bound: Bound) -> None:
        """A figure below its bound, or NaN, is a reason."""
        least, source = bound
        if not figure >= least:
            self.reasons.append(f"{what} is {figure:.2f} dB, at least {least:g} dB expected ({source})")

    def rounded(self, what: str, actual: Tensor, exact: Tensor, bound: Bound) -> float:
        """Every row and column of a result must be the exact one but for rounding; returns the SQNR of the whole.

        Lines of fewer than 16 elements are not judged one by one: all of them may nearly cancel, and then the
        rounding of a sum is large beside the sum.
        """
        whole = metrics.sqnr_db(actual, exact)
        self.at_least(what, whole, bound)
        for line, x, reference in (("row", actual, exact), ("column", actual.t(), exact.t())):
            if x.shape[1] >= 16:
                self.at_least(f"{what}, worst {line}", metrics.sqnr_row_min_db(x, reference), bound)
        return whole

    def fp8(
        self, what: str, actual: Tensor, of_codes: Tensor, bound: Bound, gemm: Gemm, K: int, prefix: str = ""
    ) -> None:
        """A GEMM must be the exact product of its codes but for rounding; that of Gaussian operands has known noise.

        Args:
            what: its name.
            actual: the part [M, N] that is compared; its figures are in `values`.
            of_codes: the exact product of the codes.
            bound: of rounding.
            gemm: the casts, where the operands are Gaussian; otherwise one in high precision.
            K: contracted over.
            prefix: of the metric `sqnr_db`.
        """
        accumulation = self.rounded(what, actual, of_codes, bound)
        worst = np.min([self.values.get("accum_sqnr_db", accumulation), accumulation])  # NaN where one is
        self.values["accum_sqnr_db"] = float(worst)
        self.gaussian(f"{prefix}sqnr_db", gemm, (actual.shape[0], K, actual.shape[1]), accumulation)

    def gaussian(self, metric: str, gemm: Gemm, size: tuple[int, int, int], accumulation_db: float) -> None:
        """Judges the quantisation noise of a GEMM of Gaussian operands; one in high precision has none.

        Args:
            metric: key of `values`: the SQNR against the product of the high-precision inputs.
            gemm: the casts.
            size: M, K, N of the part that was compared.
            accumulation_db: SQNR against the product of the codes; that noise comes on top.
        """
        if gemm.a is None or gemm.b is None:
            return
        first, second = sorted((gemm.a.format.short, gemm.b.format.short))
        table = GAUSSIAN_SQNR_DB[first, second]
        expected = -10 * math.log10(10 ** (-table / 10) + 10 ** (-accumulation_db / 10))
        margin = gaussian_margin_db(*size)
        self.bounds[metric] = round(expected - margin, 2)
        if not abs(self.values[metric] - expected) <= margin:
            self.reasons.append(
                f"{metric} is {self.values[metric]:.2f} dB, {expected:.2f} +- {margin:.2f} dB expected "
                f"({first} x {second}, docs/numerics-gemm.md, section 4)"
            )

    def four_bits(self, what: str, metric: str) -> None:
        """Judges the noise of a GEMM of Gaussian operands; all that there is where rounding was stochastic, whose numbers are not known."""
        least, most = FOUR_BITS_DB
        self.bounds[metric] = least
        if not least <= self.values[metric] <= most:
            self.reasons.append(
                f"{what}: {metric} is {self.values[metric]:.2f} dB, {least:g} to {most:g} expected of four bits"
            )

    def verdict(self, resolved: dict[str, object]) -> Numerics:
        """All figures; ok where nothing was found. The bounds of casts go to `resolved`."""
        if self.bounds:
            resolved["sqnr_bound_db"] = self.bounds
        return Numerics(self.values, ok=not self.reasons, reason="; ".join(self.reasons), cause=self.cause)


def short(dtype: torch.dtype) -> str:
    """Short name of a float8 dtype: "e4m3"."""
    return as_element_format(dtype).short
