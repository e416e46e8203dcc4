"""Products of a layer against float64: of the operands in high precision, and of the operands as the recipe casts them.

    agreement   result against the product of the cast operands: rounding and order of addition alone
    SQNR        result against the product of the high-precision operands: what the recipe costs
    band        SQNR of the product of the cast operands, which the formats, the scales and these very operands
                imply; agreement within `AGREEMENT_DB` keeps the result's SQNR inside of it

All in tiles, so that no operand and no product is ever whole in float64. Three bounds, by what multiplies:

    float32 sums     |result - product| <= u |product| + eps ||a_i|| ||b_j||   of each element; u: roundings of the result;
                     eps: 2**-24 (8 sqrt(K) + 16)
    FP8 units        ||row - product|| <= ||rounding|| + 2 ||accumulation||    of each row. Rounding is what the dtypes do to
                     the product itself; accumulation what `fp8core.proof.adders` does to the row's codes (twice, since it
                     may carry an element over the middle between two numbers), in the worst register that the device may have
    high precision   decibels of the whole and of each row: not FP8, only known to be this product

Accumulation is modelled for some columns (`MODELLED`). In these the bound holds as it stands; of all columns it holds with
a margin. Where most products of a sum have one sign, a register that is never promoted loses 14 % of it at K = 8192, and
the bound is wide: such rows must then be what one register makes of them, the same for all rows. Rows that few have
apart are wrong; where most are, the device adds up in another way, and nothing is proved.

grad_weight is compared in a few random combinations of its columns, and in some columns themselves, see `Sketch`: its
input is then long gone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fp8core.proof.adders import ALIGNED_PRODUCTS, Register, accumulate
from fp8core.proof.verify.oracle import CHUNK, Digest, TiledOperand, tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

TILE = 1024
AGREEMENT_DB = 35.0  # of a product in high precision on a GPU
ROW_DB = 25.0  # of one row of it; two independent FP8 casts are about that far apart
SKETCH_DB = 9.0  # that a row of a few combinations may be further away
CONCLUSIVE_DB = 28.0  # below it a right product looks like one of other casts, which are about 25 dB apart
MODELLED = 32  # columns of a product in which accumulation is modelled; of a sketch 16
MARGIN = 2.0  # of accumulation in the columns that are not modelled
LEAST_LOSS = 2.0**-16  # of accumulation there, relative to the sizes of products that add up
ONE_SIDED_DB = 40.0  # below it a row whose accumulation goes one way must be what one register makes of it
ONE_REGISTER = 1 / 32  # of accumulation: how close to that
DIRECTIONS = 8  # of a sketch


@dataclass
class Difference:
    """Distance of a result from what it must be.

    Attributes:
        agreement_db: from the product of the cast operands.
        sqnr_db: from the product of the high-precision operands.
        expected_db: the SQNR that the casts imply.
        row_db: lowest SQNR of a row, of those that are not zero.
        beyond: elements of a float32 sum, or rows, that are further away than rounding and accumulation explain.
        count: how many were compared.
        exact: held to bounds of single elements.
        signal: energy of the finite part of the high-precision product; 0 where every element is 0 or NaN, or there is none.
        asked_db: agreement of the whole that is asked beside, of a product in high precision.
        unexplained: rows that no register makes so, where the bound alone would let other casts pass.
    """

    agreement_db: float
    sqnr_db: float
    expected_db: float
    row_db: float
    beyond: int
    count: int
    exact: bool
    signal: float
    asked_db: float = -math.inf
    unexplained: int = 0

    @property
    def inconclusive(self) -> str:
        """Why a result without a fault proves nothing; "" where it does."""
        if not self.unexplained:
            return ""
        return (
            f"{self.agreement_db:.1f} dB from the product of its operands, and no register that this device is known to have "
            f"sums {self.unexplained} of {self.count} rows so, which hides other casts; verify with fast_accum=False"
        )

    @property
    def fault(self) -> str:
        """What is wrong; "" if nothing is."""
        apart = f"{self.agreement_db:.1f} dB from the product of its operands"
        if self.beyond:
            what = "values" if self.exact else "rows"
            return f"{apart}, {self.beyond} of {self.count} {what} further than rounding explains"
        return (
            "" if self.exact or self.agreement_db >= self.asked_db else f"{apart}, {self.asked_db:g} expected"
        )


def decibels(signal: float, noise: float) -> float:
    """10 log10 of a ratio of energies; Inf where nothing differs, NaN where anything is not a number."""
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


@dataclass(frozen=True)
class Sketch(TiledOperand):
    """What is kept of an input until its grad_weight is there: a few random combinations of its columns.

        grad_weight = grad_output.T @ input     ->     grad_weight @ R = grad_output.T @ (input @ R)

    R [K, `DIRECTIONS`] holds random signs, each divided by the size of its column, so that a wrong column of little
    energy weighs as much as any other. An error e of a row shows as e @ R, whose mean square is that of e. Signs are
    independent of the errors, so that a sum of errors e_j R_j exceeds 8 sqrt(sum e_j^2 R_j^2) once in 10**13.

    Attributes:
        x: R.T @ input.T, float32 [DIRECTIONS, M], in high precision.
        as_cast: the same of the input as cast.
        directions: R.
        input_digest: of the input itself.
        columns, at: some columns of the input as they were cast, and which.
    """

    columns: TiledOperand = field(kw_only=True)
    at: torch.Tensor = field(kw_only=True)
    as_cast: torch.Tensor = field(kw_only=True)
    directions: torch.Tensor = field(kw_only=True)
    input_digest: Digest | None = field(kw_only=True)

    @classmethod
    def of_input(cls, operand: TiledOperand) -> Sketch:
        """Sketch an input.T [K, M], an operand of grad_weight."""
        K, M = operand.x.shape
        size = operand.squares(1).sqrt()
        size = torch.where((size > 0) & size.isfinite(), size, 1.0)
        directions = (signs(K, size.device) / size[:, None]).float()
        hp, as_cast = size.new_zeros(2, DIRECTIONS, M)
        for lines, along in tiles(K, M):
            part = directions[lines].double().t()
            hp[:, along] += part @ operand.hp(lines, along)
            as_cast[:, along] += part @ operand.values(lines, along)
        at = _spread(K, MODELLED // 2, operand.x.device)
        return cls(
            hp.float(),
            as_cast=as_cast.float(),
            directions=directions,
            input_digest=operand.digest,
            columns=operand.part(at),
            at=at,
        )

    @property
    def digest(self) -> Digest | None:
        """The digest of the input itself."""
        return self.input_digest

    def values(self, lines: slice, along: slice) -> torch.Tensor:
        """What `Operand.values` gives."""
        return self.as_cast[lines, along].double()


def _spread(count: int, most: int, device: torch.device) -> torch.Tensor:
    """Indices of at most so many lines, evenly spread; of few lines all."""
    return torch.arange(0, count, max(1, -(-count // most)), device=device)


def signs(size: int, device: torch.device) -> torch.Tensor:
    """float64 [size, DIRECTIONS] of +1 and -1, the same in each call; leaves the global generators alone."""
    generator = torch.Generator().manual_seed(0x5EED)
    bits = torch.randint(0, 2, (size, DIRECTIONS), generator=generator)
    return (2.0 * bits - 1).to(device, torch.float64)


def projected(matrix: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """(matrix @ R, (matrix**2 @ R**2) as what rounding errors of the matrix weigh), float64 [2, N, DIRECTIONS]."""
    N, K = matrix.shape
    result = torch.zeros(2, N, directions.shape[1], dtype=torch.float64, device=matrix.device)
    for rows, columns in tiles(N, K):
        part, along = matrix[rows, columns].double(), directions[columns].double()
        result[0, rows] += part @ along
        result[1, rows] += part.square() @ along.square()
    return result


def roundings(
    x: torch.Tensor, dtypes: Sequence[torch.dtype], bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, float64, rounded to one dtype after the other, and with a bias once more to the last; the sum of what each moved it
    by)."""
    moved, steps = torch.zeros_like(x), [(dtype, x.new_zeros(())) for dtype in dtypes]
    for dtype, more in steps if bias is None else [*steps, (dtypes[-1], bias)]:
        before = x + more
        x = before if dtype == torch.float64 else before.float().to(dtype).double()
        moved += (x - before).abs()
    return x, moved


def difference(
    a: TiledOperand,
    b: TiledOperand,
    result: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    bias: torch.Tensor | None = None,
    *,
    registers: Sequence[Register] | None = (),
) -> Difference:
    """Compare a result [M, N] with a @ b.T + bias; of a `Sketch`, the result's combinations with those of the product.

    Args:
        a: operand of M lines.
        b: operand of N lines.
        result: any floating dtype.
        dtypes: that the product is rounded to, in this order.
        bias: [N], added after the product.
        registers: of the FP8 units that may have added it up; none: it adds in float32. None: high precision.
    """
    (M, K), N, limits = a.x.shape, b.x.shape[0], torch.finfo(result.dtype)
    u = sum(torch.finfo(dtype).eps / 2 for dtype in dtypes)
    modelled = Modelled.of(a, b, result, dtypes, bias, registers) if registers else None
    largest, columns, weight, sketched = limits.max, result.shape[1], result, isinstance(b, Sketch)
    if isinstance(b, Sketch):
        (result, weight), largest = projected(result, b.directions), torch.finfo(torch.float64).max
    norms_a, norms_b = (side.squares(1).sqrt() for side in (a, b))
    # By row: |hp|^2, |hp - cast|^2, |result - hp|^2, |result - cast|^2, |cast|^2, bounds^2; on FP8 units |roundings|^2; elements
    # without a number; on FP8 units sum of |a||b| ^2
    rows = norms_a.new_zeros(9, M)
    eps = 2.0**-24 * (8 * math.sqrt(K) + 16)
    beyond = 0
    for i, j in itertools.product(range(0, M, TILE), range(0, N, TILE)):
        of_i, of_j = slice(i, i + TILE), slice(j, j + TILE)
        got = result[of_i, of_j].double()
        want, hp, size_of_sum = norms_a.new_zeros(3, *got.shape)
        for c in range(0, K, TILE):
            along = slice(c, c + TILE)
            left, right = a.values(of_i, along), b.values(of_j, along).t()
            want.addmm_(left, right)
            hp.addmm_(a.hp(of_i, along), b.hp(of_j, along).t())
            if modelled is not None and not sketched and not modelled.is_whole:
                size_of_sum.addmm_(left.abs(), right.abs())
        sizes = norms_a[of_i, None] * norms_b[None, of_j]
        added = None if bias is None else bias[of_j].double()
        moved = roundings(want, dtypes, added)[1] if modelled is not None and not sketched else sizes
        if sketched:  # errors of addition: eps ||a_i|| ||x_j|| of each element, R_j ||x_j|| = 1
            spread = u * u * weight[of_i, of_j] + (eps * norms_a[of_i, None]).square() * columns
            margin = 8 * (spread.sqrt() + 2.0**-22 * sizes)
        else:
            margin = u * want.abs() + eps * sizes
        if added is not None:
            want, hp = want + added, hp + added
            margin = margin + u * want.abs()
        size, near = want.abs(), (got - want).abs() <= margin + limits.smallest_normal
        # Where the dtype ends, a sum may overflow or not
        right = torch.where(got.isfinite(), near & (size <= 1.01 * largest), ~(size <= largest))
        beyond += int((~right).sum())
        lost = ~got.isfinite() & hp.isfinite() & (size <= 0.99 * largest)
        clean = (size <= largest) & got.isfinite() & hp.isfinite()
        parts = torch.stack((hp, hp - want, hp - got, got - want, want, margin, moved))
        rows[:7, of_i] += torch.where(clean, parts, 0.0).square().sum(2)
        rows[7, of_i] += lost.sum(1)
        rows[8, of_i] += size_of_sum.square().sum(1)
    signal, implied, off, apart, energy, room, *_ = rows.sum(1).tolist()
    agreement_db, asked_db, unexplained = decibels(energy, apart) if apart else math.inf, -math.inf, 0
    if sketched and not beyond and M * N >= 512 and 16 * apart > room:
        beyond = 1  # each combination is inside of its bound, which is 8 times what is usual, and all are not
    far, size, is_lost = rows[3].sqrt(), rows[4].sqrt(), rows[7] > 0
    if modelled is not None:
        if sketched:  # each of the combinations has the energy of all columns' errors; R_j ||x_j|| = 1
            rounding = u * u * weight.sum(1) * (10 ** (SKETCH_DB / 10) / 3)
            loss = 10 ** (SKETCH_DB / 20) * norms_a.nan_to_num() * math.sqrt(columns * N)
            allowed = torch.hypot(rounding.sqrt(), MARGIN * 2 * modelled.loss_of_norms() * loss)
        else:
            allowed = rows[6].sqrt() + 2 * MARGIN * modelled.loss_of_sizes() * rows[8].sqrt()
        wrong = is_lost | modelled.beyond() | modelled.odd()
        if sketched or not modelled.is_whole:
            wrong |= far > allowed + 2.0**-21 * size + limits.smallest_normal
        beyond, unexplained = int(wrong.sum()), modelled.unexplained()
    elif registers is None:
        near_row = 10 ** (-(ROW_DB - SKETCH_DB * sketched) / 20) * size
        slack = 2.0**-11 * norms_a.nan_to_num()
        if sketched:
            allowed = torch.hypot(near_row, slack * math.sqrt(columns * N))
        else:
            allowed = near_row + slack * norms_b.square().sum().nan_to_num().sqrt()
        beyond, asked_db = int(((far > allowed) | is_lost).sum()), AGREEMENT_DB
    some = rows[0] > 0
    by_row = 10 * torch.log10(rows[0][some] / rows[2][some])
    exact = registers is not None and modelled is None
    return Difference(
        agreement_db=agreement_db,
        sqnr_db=decibels(signal, off),
        expected_db=decibels(signal, implied),
        row_db=float(by_row.min()) if by_row.numel() else math.inf,
        beyond=beyond,
        count=M * N if exact else M,
        exact=exact,
        signal=signal,
        asked_db=asked_db,
        unexplained=unexplained,
    )


@dataclass
class Modelled:
    """Some columns of a product, in which what FP8 units do to its codes is modelled; norms of rows, each [M].

    Attributes:
        is_whole: these columns are all.
        want, apart, moved: of the product, of what the result is from it, of roundings.
        sizes, norms: of sums of |a||b|, and of ||a_i|| ||b_j||.
        lost: of accumulation, by register.
        from_register: of what the result is from what each register makes of it.
        same_sign: by register, the cosine of accumulation and product.
    """

    is_whole: bool
    want: torch.Tensor
    apart: torch.Tensor
    moved: torch.Tensor
    sizes: torch.Tensor
    norms: torch.Tensor
    lost: torch.Tensor
    from_register: torch.Tensor
    same_sign: torch.Tensor

    @classmethod
    def of(
        cls,
        a: TiledOperand,
        b: TiledOperand,
        result: torch.Tensor,
        dtypes: Sequence[torch.dtype],
        bias: torch.Tensor | None,
        registers: Sequence[Register],
    ) -> Modelled | None:
        """None of a product without codes."""
        if isinstance(b, Sketch):
            at, picked = b.at, b.columns
        else:
            at = _spread(len(b.x), MODELLED, b.x.device)
            picked = b.part(at)
        (M, K), every, parts = a.x.shape, slice(None), []
        if a.scale_inv is None or picked.scale_inv is None or not (K and result.numel()):
            return None
        norms, added = picked.squares(1).sqrt(), None if bias is None else bias[at].double()
        width = max(len(at) * ALIGNED_PRODUCTS, K // 16)  # of a row in `accumulate`, and of its codes
        for lines, _ in tiles(M, min(width, CHUNK // 4), CHUNK // 4):
            got = result[lines].index_select(1, at).double()
            left, right = a.values(lines, every), picked.values(every, every).t()
            product = left @ right
            want = product if added is None else product + added
            summed = [as_summed(a, picked, register, lines) for register in registers]
            kinds = [
                *(product, want, got - want, roundings(product, dtypes, added)[1]),
                *(left.abs() @ right.abs(), left.norm(dim=1)[:, None] * norms),
                *(total - product for total in summed),
                *(got - roundings(total, dtypes, added)[0] for total in summed),
            ]
            clean = got.isfinite() & (want.abs() <= torch.finfo(result.dtype).max)
            kept = torch.where(clean, torch.stack(kinds), 0.0)
            along = (kept[6 : 6 + len(registers)] * kept[0]).sum(2).abs()
            parts.append(torch.cat((kept.norm(dim=2), along)))
        product, want, apart, moved, sizes, lengths, *of_registers = torch.cat(parts, 1)
        lost, from_register, along = torch.stack(of_registers).unflatten(0, (3, -1))
        same_sign = along / (lost * product).clamp(min=1e-300)
        whole = len(at) == result.shape[1]
        return cls(whole, want, apart, moved, sizes, lengths, lost, from_register, same_sign)

    @property
    def _room(self) -> torch.Tensor:
        tiny = 2.0**-21 * self.want + torch.finfo(torch.float32).smallest_normal
        return self.moved + 2 * self.lost.amax(0) + tiny

    def beyond(self) -> torch.Tensor:
        """Rows that are further away than their bound, bool [M]."""
        return self.apart > self._room

    def loss_of_sizes(self) -> torch.Tensor:
        """Accumulation, relative to the sums of sizes."""
        return (self.lost.amax(0) / self.sizes.clamp(min=1e-300)).clamp(min=LEAST_LOSS)

    def loss_of_norms(self) -> torch.Tensor:
        """Accumulation, relative to products of norms."""
        return (self.lost.amax(0) / self.norms.clamp(min=1e-300)).clamp(min=LEAST_LOSS)

    def _by_register(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows whose accumulation is one-sided and makes their bound wide; of these, what the best register does not
        explain), bool [M]."""
        wide = self._room > 10 ** (-ONE_SIDED_DB / 20) * self.want
        wide &= (self.same_sign > 0.7).any(0)
        near = self.moved + ONE_REGISTER * self.lost + 2.0**-12 * self.want
        misses = (self.from_register > near) & wide
        best = misses.sum(1).argmin()
        return wide, misses[best]

    def odd(self) -> torch.Tensor:
        """Rows that no register makes so, where one makes the others, bool [M]."""
        wide, missed = self._by_register()
        return missed & (2 * missed.sum() <= wide.sum())

    def unexplained(self) -> int:
        """Rows that no register makes so, where that is most of them; or whose bound is wide for another reason."""
        wide, missed = self._by_register()
        if 2 * missed.sum() > wide.sum():
            return int(missed.sum())
        rest = self._room.square()[~wide].sum() > 10 ** (-CONCLUSIVE_DB / 10) * self.want.square().sum()
        return int((~wide).sum()) if bool(rest) else 0


def as_summed(a: TiledOperand, b: TiledOperand, register: Register, lines: slice) -> torch.Tensor:
    """Lines of a @ b.T as codes add up in a register and are scaled, float64."""
    K, every = a.x.shape[1], slice(None)
    total = torch.zeros((), dtype=torch.float64, device=a.x.device)
    size = a.block_along(K, b)
    for start in range(0, max(K, 1), size):
        along, at = slice(start, start + size), slice(start, start + 1)
        part = accumulate(a.codes(lines, along), b.codes(every, along).t(), register)
        total = total + part * a.spread(a.scale_inv, lines, at) * b.spread(b.scale_inv, every, at).t()
    return total
