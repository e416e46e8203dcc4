"""gemm: error of each recipe and format pair inside a narrow band, and backends that agree.

The band: docs/numerics-gemm.md, section 4. A right implementation stays within 0.1 dB of the cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gaussian import operands

from fp8core import BACKENDS, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, Float8Tensor, quantize, scaled_mm
from fp8core.gemm.layout import Operand
from fp8core.gemm.reference import Reference

if TYPE_CHECKING:
    from fp8core.formats import Format

Measure = Callable[[torch.Tensor, torch.Tensor], float]

PAIRS = ((E4M3FN, E4M3FN), (E4M3FN, E5M2), (E5M2, E5M2))
# scaling -> how A is cast (B alike, unless a second one is there), SQNR in dB at K = 256 and K = 4096 of each pair
POW2_DB = ((28.48, 28.45), (24.57, 24.55), (22.53, 22.52))
POW2, ROWS, BLOCKS = (
    {"power_of_two": True},
    {"granularity": "rowwise"},
    ({"granularity": "1x128"}, {"granularity": "128x128"}),
)
SCALINGS: dict[str, tuple[Any, tuple[tuple[float, float], ...]]] = {
    "tensorwise": ([{}], ((28.53, 28.53), (24.61, 24.56), (22.57, 22.54))),
    "tensorwise pow2": ([POW2], POW2_DB),
    "rowwise": ([ROWS], ((28.65, 28.52), (24.70, 24.57), (22.67, 22.55))),
    "rowwise pow2": ([ROWS | POW2], POW2_DB),
    "block": (BLOCKS, ((28.66, 28.64), (24.65, 24.63), (22.68, 22.65))),
    "block pow2": ([block | POW2 for block in BLOCKS], POW2_DB),
    **{
        f"mx {mode}": ([{"granularity": "1x32", "mx_mode": mode}], expected)
        for mode, expected in {
            "floor": ((27.64, 27.59), (24.25, 24.23), (22.36, 22.34)),
            "ceil": POW2_DB,
            "rceil": POW2_DB,
            "even": ((28.11, 28.09), (24.50, 24.48), (22.53, 22.52)),
        }.items()
    },
}
ONE_OF_A_ROW = tuple(name for name in SCALINGS if name.startswith(("tensorwise", "rowwise")))


def cast_both(
    a: torch.Tensor, b: torch.Tensor, scaling: str, pair: tuple[Format, Format] = PAIRS[0]
) -> tuple[Float8Tensor, ...]:
    kinds = SCALINGS[scaling][0]
    return quantize(a, pair[0], dim=1, **kinds[0]), quantize(b, pair[1], dim=0, **kinds[-1])


@pytest.mark.parametrize("index", [0, 1], ids=["K=256", "K=4096"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["e4m3 e4m3", "e4m3 e5m2", "e5m2 e5m2"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_sqnr_is_inside_the_band(
    scaling: str, which: int, index: int, sqnr_db: Measure, sqnr_rows_db: Callable[..., torch.Tensor]
) -> None:
    """Oracle: the float64 GEMM of the inputs; the table above, whose theory is in docs/numerics-gemm.md.

    Per row, a sum of 256 outputs whose error and signal powers each scatter by 10/ln 10 * sqrt(2/256) =
    0.38 dB gives 0.54 dB; 5 standard deviations are 2.7 dB.
    """
    expected = SCALINGS[scaling][1][which][index]
    for seed in (0, 1, 2):
        a, b = operands((256, 4096)[index], seed)
        got = scaled_mm(*cast_both(a, b, scaling, PAIRS[which]), torch.float64, backend="reference")
        want = a.double() @ b.double()
        assert sqnr_db(want, got) == pytest.approx(expected, abs=0.2)
        if scaling in ONE_OF_A_ROW:
            assert sqnr_rows_db(want, got).min() > expected - 2.7


@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 300, 130), (128, 128, 128), (5, 257, 3)], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_reference_gemm(scaling: str, shape: tuple[int, int, int]) -> None:
    """Oracle: the float64 product of the dequantised operands; float32 within its own rounding."""
    M, K, N = shape
    qa, qb = cast_both(*operands(K, 0, M, N), scaling)
    a, b = qa.dequantize(torch.float64), qb.dequantize(torch.float64)
    exact = scaled_mm(qa, qb, torch.float64, backend="reference")
    torch.testing.assert_close(exact, a @ b, rtol=1e-12, atol=1e-12)
    slack = (K + 8) * 2.0**-24 * (a.abs() @ b.abs())
    assert ((scaled_mm(qa, qb, torch.float32, backend="reference").double() - a @ b).abs() <= slack).all()


@pytest.mark.parametrize("scaling", ONE_OF_A_ROW)
@pytest.mark.parametrize(
    "pair", [(E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FNUZ, E4M3FNUZ), (E5M2FNUZ, E4M3FNUZ)]
)
@pytest.mark.parametrize("shape", [(1, 16, 16), (17, 64, 48), (63, 256, 112)])
def test_torch_backend_agrees_with_the_reference(
    shape: tuple[int, int, int], pair: tuple[Format, Format], scaling: str
) -> None:
    """Oracle: the float64 reference; the bound is half an ulp of bfloat16 plus float32 accumulation."""
    M, K, N = shape
    a, b = operands(K, 3, M, N)
    qa, qb = cast_both(a, b, scaling, pair)
    want = scaled_mm(qa, qb, torch.float64, backend="reference")
    got = scaled_mm(qa, qb, torch.bfloat16, backend="torch").double()
    slack = K * 2**-24 * (qa.dequantize(torch.float64).abs() @ qb.dequantize(torch.float64).abs())
    assert ((got - want).abs() <= want.abs() * 2**-8 + slack).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("a_rowwise", [False, True])
def test_mixed_granularity_repeats_the_single_scale(a_rowwise: bool, backend: str) -> None:
    """Oracle: the same GEMM with the scale repeated by hand."""
    a, b = operands(64, 0, 32, 48)
    qa = quantize(a, E4M3FN, "rowwise" if a_rowwise else "tensorwise", dim=1)
    qb = quantize(b, E4M3FN, "tensorwise" if a_rowwise else "rowwise", dim=0)
    scale_a, scale_b = qa.scale_inv.expand(32, 1), qb.scale_inv.expand(1, 48)
    by_hand = scaled_mm(
        Operand(qa.qdata, scale_a.contiguous()), Operand(qb.qdata, scale_b.contiguous()), backend=backend
    )
    assert torch.equal(scaled_mm(qa, qb, backend=backend), by_hand)


def test_a_backends_own_rules_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what the rules say. The product itself would take the operands; what was refused is refused again."""

    class Picky(Reference):
        def shape_reason(self, M: int, *args: Any) -> str | None:
            return "M is 48" if M == 48 else None

        def granularity_reason(self, device: Any, granularity: str, nearest: str = "") -> str | None:
            return "rows" if granularity == "rowwise" else None

    monkeypatch.setitem(BACKENDS, "picky", Picky("picky"))
    for M, scaling, said in ((32, "rowwise", "rows"), (48, "tensorwise", "M is 48")) * 2:
        with pytest.raises(ValueError, match=said):
            scaled_mm(*cast_both(*operands(64, 1, M, 32), scaling), backend="picky")
    a, b = cast_both(*operands(64, 1, 32, 32), "tensorwise")
    assert torch.equal(scaled_mm(a, b, backend="picky"), scaled_mm(a, b, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_finite_rows_stay_non_finite(backend: str) -> None:
    """Oracle: the rule of scaling: a row with Inf is NaN throughout, and others do not see it."""
    a, b = operands(64, 0, 32, 48)
    a[5, 7] = torch.inf
    got = scaled_mm(
        quantize(a, E4M3FN, "rowwise", dim=1), quantize(b, E4M3FN, "rowwise", dim=0), backend=backend
    )
    assert got[5].isnan().all()
    assert got[torch.arange(32) != 5].isfinite().all()
