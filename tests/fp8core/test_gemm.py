"""gemm: error of each recipe and format pair inside a narrow band, and backends that agree.

The band: docs/numerics-gemm.md, section 4. A right implementation stays within 0.1 dB of the cell, the negative
controls below fall out of 0.2 dB.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gaussian import operands

from fp8core import BACKENDS, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, Float8Tensor, quantize, scaled_mm
from fp8core.formats import Format
from fp8core.gemm.layout import Operand

Measure = Callable[[torch.Tensor, torch.Tensor], float]

BAND_DB = 0.2
SEEDS = (0, 1, 2)
PAIRS = {"e4m3 e4m3": (E4M3FN, E4M3FN), "e4m3 e5m2": (E4M3FN, E5M2), "e5m2 e5m2": (E5M2, E5M2)}
SCALINGS = {
    "tensorwise": ("tensorwise", False),
    "tensorwise pow2": ("tensorwise", True),
    "rowwise": ("rowwise", False),
    "rowwise pow2": ("rowwise", True),
}
# (scaling, pair) -> SQNR in dB at K = 256 and K = 4096; the reference is the float64 GEMM of the inputs
EXPECTED_DB = {
    ("tensorwise", "e4m3 e4m3"): (28.53, 28.53),
    ("tensorwise", "e4m3 e5m2"): (24.61, 24.56),
    ("tensorwise", "e5m2 e5m2"): (22.57, 22.54),
    ("tensorwise pow2", "e4m3 e4m3"): (28.48, 28.45),
    ("tensorwise pow2", "e4m3 e5m2"): (24.57, 24.55),
    ("tensorwise pow2", "e5m2 e5m2"): (22.53, 22.52),
    ("rowwise", "e4m3 e4m3"): (28.65, 28.52),
    ("rowwise", "e4m3 e5m2"): (24.70, 24.57),
    ("rowwise", "e5m2 e5m2"): (22.67, 22.55),
    ("rowwise pow2", "e4m3 e4m3"): (28.48, 28.45),
    ("rowwise pow2", "e4m3 e5m2"): (24.57, 24.55),
    ("rowwise pow2", "e5m2 e5m2"): (22.53, 22.52),
}


def cast_both(
    a: torch.Tensor, b: torch.Tensor, pair: tuple[Format, Format], scaling: str
) -> tuple[Float8Tensor, ...]:
    granularity, pow2 = SCALINGS[scaling]
    return (
        quantize(a, pair[0], granularity, dim=1, power_of_two=pow2),
        quantize(b, pair[1], granularity, dim=0, power_of_two=pow2),
    )


@pytest.mark.parametrize("index", [0, 1], ids=["K=256", "K=4096"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_sqnr_is_inside_the_band(
    scaling: str, pair: str, index: int, sqnr_db: Measure, sqnr_rows_db: Callable[..., torch.Tensor]
) -> None:
    """Oracle: the float64 GEMM of the inputs; the table above, whose theory is in docs/numerics-gemm.md.

    Per row, a sum of 256 outputs whose error and signal powers each scatter by 10/ln 10 * sqrt(2/256) =
    0.38 dB gives 0.54 dB; 5 standard deviations are 2.7 dB.
    """
    expected = EXPECTED_DB[scaling, pair][index]
    for seed in SEEDS:
        a, b = operands((256, 4096)[index], seed)
        got = scaled_mm(*cast_both(a, b, PAIRS[pair], scaling), torch.float64, backend="reference")
        want = a.double() @ b.double()
        assert sqnr_db(want, got) == pytest.approx(expected, abs=BAND_DB)
        assert sqnr_rows_db(want, got).min() > expected - 2.7


def test_rowwise_keeps_rows_of_very_different_size_and_tensorwise_does_not(
    sqnr_db: Measure, sqnr_rows_db: Callable[..., torch.Tensor]
) -> None:
    """Oracle: the float64 GEMM. Rows span ten decades; the whole-tensor figure cannot tell the two apart."""
    a, b = operands(256, 0)
    a = a * torch.logspace(0, -10, 256)[:, None]
    want = a.double() @ b.double()
    got = {
        s: scaled_mm(*cast_both(a, b, PAIRS["e4m3 e4m3"], s), torch.float64, backend="reference")
        for s in SCALINGS
    }
    for scaling in ("rowwise", "rowwise pow2"):
        assert sqnr_rows_db(want, got[scaling]).min() > EXPECTED_DB[scaling, "e4m3 e4m3"][0] - 2.7
    for scaling in ("tensorwise", "tensorwise pow2"):
        assert sqnr_db(want, got[scaling]) > 25
        assert sqnr_rows_db(want, got[scaling]).min() < 3
        assert (sqnr_rows_db(want, got[scaling]) < 20).float().mean() > 0.4


@pytest.mark.parametrize("scaling", SCALINGS)
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
    qa, qb = cast_both(a, b, pair, scaling)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(("M", "K", "N"), [(0, 32, 16), (16, 0, 16), (16, 32, 0)])
def test_empty_matrices(M: int, K: int, N: int, granularity: str, backend: str) -> None:
    """Oracle: the definition: no terms add up to 0."""
    qa = quantize(torch.zeros(M, K), E4M3FN, granularity, dim=1)
    qb = quantize(torch.zeros(N, K), E4M3FN, granularity, dim=1).t()
    got = scaled_mm(qa, qb, backend=backend)
    assert got.shape == (M, N)
    assert not got.any()


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


def test_operands_that_do_not_fit() -> None:
    a = quantize(torch.randn(32, 64), E4M3FN)
    b = quantize(torch.randn(48, 64), E4M3FN).t()
    with pytest.raises(
        ValueError,
        match="GEMM backend 'cutlass' is unknown; expected one of torch, triton, fastest, reference",
    ):
        scaled_mm(a, b, backend="cutlass")
    with pytest.raises(
        ValueError, match=r"a is \[32, 64\] and b is \[48, 64\]: a's columns must equal b's rows"
    ):
        scaled_mm(a, b.t())
    with pytest.raises(ValueError, match=r"a has shape \[2, 16, 64\]; expected a matrix"):
        scaled_mm(a.view(2, 16, 64), b)
    with pytest.raises(TypeError, match=r"b has dtype torch.float32; expected FP8 codes"):
        scaled_mm(a, Operand(torch.randn(64, 48), torch.ones(())))
    with pytest.raises(TypeError, match=r"a.scale_inv has dtype torch.float64"):
        scaled_mm(Operand(a.qdata, torch.ones((), dtype=torch.float64)), b)
    wrong = quantize(torch.randn(32, 64), E4M3FN, "rowwise", dim=0)
    with pytest.raises(
        ValueError, match=r"a.scale_inv has shape \[1, 64\]; expected \[\] or \[32, 1\]: scale a along"
    ):
        scaled_mm(wrong, b)
