"""Products of a layer against float64: of the operands in high precision, and of the operands as the recipe casts them.

    agreement   result against the product of `oracle.Quantized` operands: rounding and order of addition alone
    SQNR        result against the product of the high-precision operands: what the recipe costs
    band        SQNR of the product of the quantised operands, which the formats, the scales and these very operands
                imply; agreement within `AGREEMENT_DB` keeps the result's SQNR inside of it

All in tiles, so that no operand and no product is ever whole in float64. On a CPU, which adds up in float32, each
element is held to a bound of its own:

    |result - product| <= u |product| + eps ||a_i|| ||b_j||     u: roundings of the result; eps: 2**-24 (8 sqrt(K) + 16)

and on a GPU, whose FP8 units add with about 14 bits, the whole product and each of its rows are held to decibels. Where
most products of a sum have one sign, those units lose more: in the model 21 dB at K = 4096 where all have. A
result that is further away than usual is therefore held to what `fp8core.gemm.accumulate` leaves of a sample of the same
operands, and where that is no closer than two independent casts, it is not judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8core.gemm.accumulate import accumulate
from fp8core.verify.oracle import Quantized, tiles

TILE = 1024
AGREEMENT_DB = (
    35.0  # two right results differ by rounding to bf16 (55 dB) and by accumulation (over 50 dB on a GPU)
)
ROW_DB = 25.0  # of one row on a GPU; two independent FP8 casts are about that far apart
ACCUMULATOR_DB = 3.0  # that the units may lose more of the whole than the model does of a sample
TOLD_DB = 28.0  # below it a right product is not told from one of other casts, which are about 25 dB apart
SAMPLED_LINES = 64  # of each operand
BAND_DB = 1.0  # of the SQNR, on top of what agreement allows
DIRECTIONS = 8  # of a sketch


class Side(NamedTuple):
    """An operand of a product, and which of its two dimensions is contracted."""

    q: Quantized
    contracted: int

    @property
    def lines(self) -> int:
        """Rows, or columns, that are not contracted."""
        return self.q.x.shape[1 - self.contracted]

    @property
    def length(self) -> int:
        """Length of the contraction."""
        return self.q.x.shape[self.contracted]

    def tile(self, lines: slice, along: slice, quantized: bool) -> torch.Tensor:
        """[lines, along], float64."""
        index = (lines, along) if self.contracted == 1 else (along, lines)
        values = self.q.values(*index) if quantized else self.q.hp(*index)
        return values if self.contracted == 1 else values.t()


@dataclass
class Difference:
    """Distance of a result from what it must be.

    Attributes:
        agreement_db: from the product of the quantised operands.
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
    def untold(self) -> str:
        """Why a result without a fault proves nothing; "" where it does."""
        if self.exact or self.allowed_db >= TOLD_DB or self.agreement_db >= AGREEMENT_DB:
            return ""
        return (
            f"{self.agreement_db:.1f} dB from the product of its operands, as far as short accumulation moves it, which hides "
            "other casts; verify with fast_accum=False, or at a step with a smaller loss"
        )

    @property
    def fault(self) -> str:
        """What is wrong; "" if nothing is."""
        if self.beyond:
            what = "values" if self.exact else "rows"
            return (
                f"{self.agreement_db:.1f} dB from the product of its operands, {self.beyond} of {self.count} {what} further "
                "than rounding explains"
            )
        if self.exact:
            return ""
        if not self.agreement_db >= self.allowed_db:
            return (
                f"{self.agreement_db:.1f} dB from the product of its operands, {self.allowed_db:.3g} expected"
            )
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


def unit_roundoff(*dtypes: torch.dtype) -> float:
    """Largest relative error of a rounding to each of these, one after another."""
    return sum(torch.finfo(dtype).eps / 2 for dtype in dtypes)


def difference(
    a: Side,
    b: Side,
    result: torch.Tensor,
    u: float,
    bias: torch.Tensor | None = None,
    *,
    exact: bool = True,
    fast: bool = False,
) -> Difference:
    """Compare a result [M, N] with a @ b.T + bias.

    Args:
        a: operand of M lines.
        b: operand of N lines.
        result: any floating dtype.
        u: `unit_roundoff` of what the product is rounded to.
        bias: [N], added after the product.
        exact: addition in float32, else that of FP8 matrix units.
        fast: which then stay there for all of K.
    """
    M, N, K = a.lines, b.lines, a.length
    device = result.device
    rows = torch.zeros(
        4, M, dtype=torch.float64, device=device
    )  # |hp|^2, |hp - quantised|^2, |result - ...|^2
    bound = torch.zeros(M, dtype=torch.float64, device=device)
    norms_a, norms_b = norms(a), norms(b)
    eps = 2.0**-24 * (8 * math.sqrt(K) + 16)
    largest = torch.finfo(result.dtype).max
    smallest = torch.finfo(result.dtype).smallest_normal
    beyond = 0
    for i in range(0, M, TILE):
        of_i = slice(i, min(i + TILE, M))
        for j in range(0, N, TILE):
            of_j = slice(j, min(j + TILE, N))
            products = []
            for quantized in (True, False):
                total = torch.zeros(of_i.stop - i, of_j.stop - j, dtype=torch.float64, device=device)
                for c in range(0, K, TILE):
                    along = slice(c, min(c + TILE, K))
                    total.addmm_(a.tile(of_i, along, quantized), b.tile(of_j, along, quantized).t())
                products.append(total)
            want, hp = products
            got = result[of_i, of_j].double()
            margin = u * want.abs()
            if bias is not None:
                added = bias[of_j].double()
                want, hp = want + added, hp + added
                margin = margin + u * want.abs()
            margin = margin + eps * norms_a[of_i, None] * norms_b[None, of_j] + smallest
            finite = want.abs() <= largest
            wrong = torch.where(
                finite, (got - want).abs() > margin, got.isfinite() & (want.abs() > 1.01 * largest)
            )
            wrong |= finite & ~got.isfinite() & (want.abs() < 0.99 * largest)
            wrong |= want.isnan() & got.isfinite()
            beyond += int(wrong.sum()) if exact else 0
            clean = finite & got.isfinite() & hp.isfinite()
            want, hp, got = (torch.where(clean, t, 0.0) for t in (want, hp, got))
            parts = (want, hp, hp - want, hp - got, got - want)
            for row, part in zip(rows, parts[1:], strict=True):
                row[of_i] += part.square().sum(1)
            bound[of_i] += want.square().sum(1)
    size_b = float(norms_b.square().sum().nan_to_num()) ** 0.5
    signal, implied, off, apart = (float(t.sum()) for t in rows)
    agreement_db, allowed_db = decibels(float(bound.sum()), apart) if apart else math.inf, AGREEMENT_DB
    if not exact:
        if agreement_db < AGREEMENT_DB:
            allowed_db = min(AGREEMENT_DB, accumulator_db(a, b, fast) - ACCUMULATOR_DB)
        row_db = ROW_DB - (AGREEMENT_DB - allowed_db)
        allowed = 10 ** (-row_db / 20) * bound.sqrt() + 2.0**-11 * norms_a.nan_to_num() * size_b
        beyond = int((rows[3].sqrt() > allowed).sum())
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


def accumulator_db(a: Side, b: Side, fast: bool) -> float:
    """Agreement that the model of a GPU's accumulator leaves of evenly spaced lines of both operands."""
    left, right = (
        side.tile(slice(0, None, -(-side.lines // SAMPLED_LINES)), slice(0, side.length), True)
        for side in (a, b)
    )
    want = left @ right.t()
    apart = accumulate(left, right.t(), "fp22" if fast else "fp22_promote128") - want
    finite = apart.isfinite()
    return decibels(float(want[finite].square().sum()), float(apart[finite].square().sum()))


def norms(side: Side) -> torch.Tensor:
    """Euclidean norm of each line of the quantised operand, float64."""
    total = torch.zeros(side.lines, dtype=torch.float64, device=side.q.x.device)
    for rows, columns in tiles(*side.q.x.shape):
        squares = side.q.values(rows, columns).square().sum(side.contracted)
        total[rows if side.contracted == 1 else columns] += squares
    return total.sqrt()


@dataclass(frozen=True)
class Sketch:
    """What is kept of an input until its grad_weight is there: a few random combinations of its columns.

        grad_weight = grad_output.T @ input     ->     grad_weight @ R = grad_output.T @ (input @ R)

    R [K, `DIRECTIONS`] holds random signs, each divided by the size of its column, so that a wrong column of little
    energy weighs as much as any other. An error e of a row shows as e @ R, whose mean square is that of e.

    Attributes:
        directions: R.
        quantized, hp: input @ R, float32 [M, DIRECTIONS], as cast and in high precision.
    """

    directions: torch.Tensor
    quantized: torch.Tensor
    hp: torch.Tensor

    @classmethod
    def of(cls, side: Side) -> Sketch:
        """Sketch an input [M, K], an operand of grad_weight."""
        x = side.q.x
        M, K = x.shape
        squares = torch.zeros(K, dtype=torch.float64, device=x.device)
        parts = tiles(M, K)
        for rows, columns in parts:
            squares[columns] += side.q.values(rows, columns).square().sum(0)
        size = squares.sqrt()
        size = torch.where((size > 0) & size.isfinite(), size, 1.0)
        directions = (signs(K, x.device) / size[:, None]).float()
        found = torch.zeros(2, M, DIRECTIONS, dtype=torch.float64, device=x.device)
        for rows, columns in parts:
            found[0, rows] += side.q.values(rows, columns) @ directions[columns].double()
            found[1, rows] += side.q.hp(rows, columns) @ directions[columns].double()
        return cls(directions, found[0].float(), found[1].float())


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


def sketch_difference(
    grad: Side, sketch: Sketch, result: torch.Tensor, u: float, *, exact: bool = True
) -> Difference:
    """Compare a grad_weight [N, K] by the sketch that was kept of the input, see `difference`.

    Signs are independent of the errors, so that a sum of errors e_j R_j exceeds 8 sqrt(sum e_j^2 R_j^2) once in 10**13.
    """
    N, M = grad.lines, grad.length
    device = result.device
    want, hp = (torch.zeros(N, DIRECTIONS, dtype=torch.float64, device=device) for _ in range(2))
    norm = torch.zeros(N, dtype=torch.float64, device=device)
    for lines, along in tiles(N, M, TILE * TILE):
        tile = grad.tile(lines, along, True)
        want[lines] += tile @ sketch.quantized[along].double()
        norm[lines] += tile.square().sum(1)
        hp[lines] += grad.tile(lines, along, False) @ sketch.hp[along].double()
    got, weight = projected(result, sketch.directions)
    eps = 2.0**-24 * (8 * math.sqrt(M) + 16)
    # Errors of addition: eps ||g_i|| ||x_j|| of each element, R_j ||x_j|| = 1
    spread = (u * u * weight + eps * eps * norm[:, None] * sketch.directions.shape[0]).sqrt()
    spread = spread + 2.0**-22 * (norm.sqrt()[:, None] * sketch.quantized.double().norm(dim=0)[None])
    apart = (got - want).abs()
    finite = want.isfinite() & hp.isfinite()
    wrong = torch.where(finite, ~(apart <= 8 * spread + torch.finfo(result.dtype).smallest_normal), False)
    energy = float(torch.where(finite, apart, 0.0).square().sum())
    allowed = float(torch.where(finite, spread, 0.0).square().sum())
    beyond = int(wrong.sum()) if exact else 0
    if exact and not beyond and N * DIRECTIONS >= 512 and energy > 4 * allowed:
        beyond = 1
    some = finite.all(1) & (hp.square().sum(1) > 0)
    signal, off = hp[some].square().sum(1), (hp[some] - got[some]).square().sum(1)
    by_row = 10 * torch.log10(signal / off)
    if not exact:
        rows = want[some].square().sum(1)
        slack = (2.0**-11 * norm[some].sqrt() * math.sqrt(sketch.directions.shape[0] * DIRECTIONS)).square()
        beyond = int((apart[some].square().sum(1) > 10 ** (-(ROW_DB - 9) / 10) * rows + slack).sum())
    return Difference(
        agreement_db=decibels(float(want[some].square().sum()), float(apart[some].square().sum())),
        sqnr_db=decibels(float(signal.sum()), float(off.sum())),
        expected_db=decibels(float(signal.sum()), float((hp[some] - want[some]).square().sum())),
        row_db=float(by_row.min()) if by_row.numel() else math.inf,
        beyond=beyond,
        count=N * DIRECTIONS if exact else N,
        exact=exact,
        signal=float(signal.sum()),
    )
