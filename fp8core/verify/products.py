"""Products of a layer against float64: of the operands in high precision, and of the operands as the recipe casts them.

    agreement   result against the product of the cast operands: rounding and order of addition alone
    SQNR        result against the product of the high-precision operands: what the recipe costs
    band        SQNR of the product of the cast operands, which the formats, the scales and these very operands
                imply; agreement within `AGREEMENT_DB` keeps the result's SQNR inside of it

All in tiles, so that no operand and no product is ever whole in float64. On a CPU, which adds up in float32, each
element is held to a bound of its own:

    |result - product| <= u |product| + eps ||a_i|| ||b_j||     u: roundings of the result; eps: 2**-24 (8 sqrt(K) + 16)

and on a GPU, whose FP8 units add with about 14 bits, the whole product and each of its rows are held to decibels. Where
most products of a sum have one sign, those units lose more: in the model 21 dB at K = 4096 where all have. A
result that is further away than usual is therefore held to what `fp8core.gemm.accumulate` leaves of a sample of the same
operands, and where that is no closer than two independent casts, it is not judged.

grad_weight is compared in a few random combinations of its columns, see `Sketch`: its input is then long gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from fp8core.gemm.accumulate import accumulate
from fp8core.verify.oracle import Digest, TiledOperand, tiles

TILE = 1024
AGREEMENT_DB = (
    35.0  # two right results differ by rounding to bf16 (55 dB) and by accumulation (over 50 dB on a GPU)
)
ROW_DB = 25.0  # of one row on a GPU; two independent FP8 casts are about that far apart
SKETCH_DB = 9.0  # that a row of a few combinations may be further away
ACCUMULATOR_DB = 3.0  # that the units may lose more of the whole than the model does of a sample
CONCLUSIVE_DB = 28.0  # below it a right product looks like one of other casts, which are about 25 dB apart
SAMPLED_LINES = 64  # of each operand
BAND_DB = 1.0  # of the SQNR, on top of what agreement allows
DIRECTIONS = 8  # of a sketch


@dataclass
class Difference:
    """Distance of a result from what it must be.

    Attributes:
        agreement_db: from the product of the cast operands.
        sqnr_db: from the product of the high-precision operands.
        expected_db: the SQNR that the casts imply.
        row_db: lowest SQNR of a row, of those that are not zero.
        beyond: elements, or rows on a GPU, that are further away than rounding explains.
        count: how many were compared.
        exact: held to bounds of single elements.
        signal: energy of the finite part of the high-precision product; 0 where every element is 0 or NaN, or there is none.
        allowed_db: agreement that a right result has at least, on a GPU.
    """

    agreement_db: float
    sqnr_db: float
    expected_db: float
    row_db: float
    beyond: int
    count: int
    exact: bool
    signal: float
    allowed_db: float = AGREEMENT_DB

    @property
    def inconclusive(self) -> str:
        """Why a result without a fault proves nothing; "" where it does."""
        if self.exact or self.allowed_db >= CONCLUSIVE_DB or self.agreement_db >= AGREEMENT_DB:
            return ""
        return (
            f"{self.agreement_db:.1f} dB from the product of its operands, as far as short accumulation moves it, which hides "
            "other casts; verify with fast_accum=False, or at a step with a smaller loss"
        )

    @property
    def fault(self) -> str:
        """What is wrong; "" if nothing is."""
        apart = f"{self.agreement_db:.1f} dB from the product of its operands"
        if self.beyond:
            what = "values" if self.exact else "rows"
            return f"{apart}, {self.beyond} of {self.count} {what} further than rounding explains"
        if self.exact:
            return ""
        if not self.agreement_db >= self.allowed_db:
            return f"{apart}, {self.allowed_db:.3g} expected"
        floor = -10 * math.log10(10 ** (-self.expected_db / 10) + 10 ** (-self.allowed_db / 10)) - BAND_DB
        if not self.sqnr_db >= floor:
            return f"SQNR {self.sqnr_db:.1f} dB, at least {floor:.1f} expected of these operands"
        return ""


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
    """

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
        return cls(hp.float(), as_cast=as_cast.float(), directions=directions, input_digest=operand.digest)

    @property
    def digest(self) -> Digest | None:
        """The digest of the input itself."""
        return self.input_digest

    def values(self, lines: slice, along: slice) -> torch.Tensor:
        """What `Operand.values` gives."""
        return self.as_cast[lines, along].double()


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


def difference(
    a: TiledOperand,
    b: TiledOperand,
    result: torch.Tensor,
    u: float,
    bias: torch.Tensor | None = None,
    *,
    exact: bool = True,
    fast: bool = False,
) -> Difference:
    """Compare a result [M, N] with a @ b.T + bias; of a `Sketch`, the result's combinations with those of the product.

    Args:
        a: operand of M lines.
        b: operand of N lines.
        result: any floating dtype.
        u: relative error of the roundings that the product goes through.
        bias: [N], added after the product.
        exact: addition in float32, else that of FP8 matrix units.
        fast: which then stay there for all of K.
    """
    (M, K), N, limits = a.x.shape, b.x.shape[0], torch.finfo(result.dtype)
    largest, columns, weight = limits.max, result.shape[1], result
    sketched = isinstance(b, Sketch)
    if isinstance(b, Sketch):
        result, weight = projected(result, b.directions)
        largest = torch.finfo(torch.float64).max
    norms_a, norms_b = (side.squares(1).sqrt() for side in (a, b))
    # By row: |hp|^2, |hp - cast|^2, |result - hp|^2, |result - cast|^2, |cast|^2, bounds^2, elements without a number
    rows = norms_a.new_zeros(7, M)
    eps = 2.0**-24 * (8 * math.sqrt(K) + 16)
    beyond = 0
    for of_i, of_j in (
        (slice(i, i + TILE), slice(j, j + TILE)) for i in range(0, M, TILE) for j in range(0, N, TILE)
    ):
        got = result[of_i, of_j].double()
        want, hp = norms_a.new_zeros(2, *got.shape)
        for c in range(0, K, TILE):
            along = slice(c, c + TILE)
            want.addmm_(a.values(of_i, along), b.values(of_j, along).t())
            hp.addmm_(a.hp(of_i, along), b.hp(of_j, along).t())
        sizes = norms_a[of_i, None] * norms_b[None, of_j]
        if sketched:  # errors of addition: eps ||a_i|| ||x_j|| of each element, R_j ||x_j|| = 1
            spread = u * u * weight[of_i, of_j] + (eps * norms_a[of_i, None]).square() * columns
            margin = 8 * (spread.sqrt() + 2.0**-22 * sizes)
        else:
            margin = u * want.abs() + eps * sizes
        if bias is not None:
            added = bias[of_j].double()
            want, hp = want + added, hp + added
            margin = margin + u * want.abs()
        size, near = want.abs(), (got - want).abs() <= margin + limits.smallest_normal
        # Where the dtype ends, a sum may overflow or not
        right = torch.where(got.isfinite(), near & (size <= 1.01 * largest), ~(size <= largest))
        beyond += int((~right).sum())
        lost = ~got.isfinite() & hp.isfinite() & (size <= 0.99 * largest)
        clean = (size <= largest) & got.isfinite() & hp.isfinite()
        want, hp, got, margin = (torch.where(clean, t, 0.0) for t in (want, hp, got, margin))
        for row, part in zip(
            rows, (hp, hp - want, hp - got, got - want, want, margin, lost.double()), strict=True
        ):
            row[of_i] += part.square().sum(1)
    signal, implied, off, apart, energy, room, _ = rows.sum(1).tolist()
    agreement_db, allowed_db = decibels(energy, apart) if apart else math.inf, AGREEMENT_DB
    if sketched and not beyond and M * N >= 512 and 16 * apart > room:
        beyond = 1  # each combination is inside of its bound, which is 8 times what is usual, and all are not
    if not exact:
        if not sketched and agreement_db < AGREEMENT_DB:
            allowed_db = min(AGREEMENT_DB, accumulator_db(a, b, fast) - ACCUMULATOR_DB)
        row_db = ROW_DB - (SKETCH_DB if sketched else AGREEMENT_DB - allowed_db)
        near_row = 10 ** (-row_db / 20) * rows[4].sqrt()
        slack = 2.0**-11 * norms_a.nan_to_num()
        if sketched:  # R_j ||x_j|| = 1
            allowed = torch.hypot(near_row, slack * math.sqrt(columns * N))
        else:
            allowed = near_row + slack * norms_b.square().sum().nan_to_num().sqrt()
        beyond = int(((rows[3].sqrt() > allowed) | (rows[6] > 0)).sum())
    some = rows[0] > 0
    by_row = 10 * torch.log10(rows[0][some] / rows[2][some])
    return Difference(
        agreement_db=agreement_db,
        sqnr_db=decibels(signal, off),
        expected_db=decibels(signal, implied),
        row_db=float(by_row.min()) if by_row.numel() else math.inf,
        beyond=beyond,
        count=M * N if exact else M,
        exact=exact,
        signal=signal,
        allowed_db=allowed_db,
    )


def accumulator_db(a: TiledOperand, b: TiledOperand, fast: bool) -> float:
    """Agreement that the model of a GPU's accumulator leaves of evenly spaced lines of both operands."""
    left, right = (
        side.values(slice(0, None, -(-len(side.x) // SAMPLED_LINES)), slice(None)) for side in (a, b)
    )
    want = left @ right.t()
    apart = accumulate(left, right.t(), "fp22" if fast else "fp22_promote128") - want
    finite = apart.isfinite()
    return decibels(float(want[finite].square().sum()), float(apart[finite].square().sum()))
