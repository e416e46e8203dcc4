"""cast: bit-equal to two independent libraries over every 16-bit input and every hard float32 input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hard_inputs import hard_inputs, mismatches, values

from fp8core import cast, quantize, scaling
from fp8core.formats import E4M3FN, E5M2, ELEMENT_FORMATS, Format

ml_dtypes = pytest.importorskip("ml_dtypes")
gfloat = pytest.importorskip("gfloat")
gfloat_formats = pytest.importorskip("gfloat.formats")

FINITE = (gfloat.Signedness.Signed, gfloat.Domain.Finite)
GFLOAT = {
    "e4m3fn": gfloat_formats.format_info_ocp_e4m3,
    "e5m2": gfloat_formats.format_info_ocp_e5m2,
    "e4m3fnuz": gfloat_formats.format_info_p3109(8, 4, *FINITE),
    "e5m2fnuz": gfloat_formats.format_info_p3109(8, 3, *FINITE),
}


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    return hard_inputs()


def ml_dtypes_codes(x: np.ndarray, fmt: Format) -> np.ndarray:
    return np.clip(x, -fmt.max, fmt.max).astype(getattr(ml_dtypes, f"float8_{fmt.name}")).view(np.uint8)


def gfloat_codes(x: np.ndarray, fmt: Format) -> np.ndarray:
    info = GFLOAT[fmt.name]
    rounded = gfloat.round_ndarray(info, x.astype(np.float64), gfloat.RoundMode.TiesToEven, sat=True)
    return gfloat.encode_ndarray(info, rounded).astype(np.uint8)


@pytest.mark.parametrize("oracle", [ml_dtypes_codes, gfloat_codes], ids=["ml_dtypes", "gfloat"])
@pytest.mark.parametrize("source", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda f: f.name)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy on NaN input
def test_eager_cast_is_bit_equal(
    inputs: dict[str, torch.Tensor],
    fmt: Format,
    source: str,
    oracle: Callable[[np.ndarray, Format], np.ndarray],
) -> None:
    """Oracles: ml_dtypes of the clipped input; gfloat with sat=True. Both take Inf to the largest value."""
    x = inputs[source]
    want = torch.from_numpy(oracle(x.float().numpy(), fmt))  # float32 holds each bf16 and fp16 value exactly
    assert mismatches(cast.cast_saturating(x, fmt), want, fmt) == 0


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # torch's own
@pytest.mark.parametrize(
    "formats", [(E4M3FN, E5M2), pytest.param(ELEMENT_FORMATS, marks=pytest.mark.slow)], ids=len
)
def test_compiled_casts_are_bit_equal_to_eager(
    inputs: dict[str, torch.Tensor], formats: Sequence[Format]
) -> None:
    """Oracle: the eager cast, itself checked above; one graph for all sources and formats and the scaled casts."""

    def everything(bf16: torch.Tensor, fp16: torch.Tensor, fp32: torch.Tensor) -> list[torch.Tensor]:
        plain = [cast.cast_saturating(x, fmt) for x in (bf16, fp16, fp32) for fmt in formats]
        matrix = bf16.reshape(256, -1).nan_to_num(0, 1e4, -1e4)
        scaled = [
            part
            for fmt in formats[1::2]
            for granularity, pow2 in (("tensorwise", False), ("rowwise", True))
            for part in cast.scale_and_cast(matrix, fmt, granularity, dim=1, power_of_two=pow2)
        ]
        return plain + scaled

    torch._dynamo.reset()
    eager = everything(*inputs.values())
    compiled = torch.compile(everything, fullgraph=True, dynamic=False)(*inputs.values())
    for want, got in zip(eager, compiled, strict=True):
        if want.dtype.itemsize == 1:
            fmt = next(f for f in ELEMENT_FORMATS if f.dtype == want.dtype)
            assert mismatches(got, want, fmt) == 0
        else:
            assert torch.equal(got, want)


@pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda f: f.name)
def test_dequantize_is_exact_in_float64_and_rounds_once_in_float32(fmt: Format) -> None:
    """Oracle: numpy in float64 on the format's own value table."""
    codes = torch.arange(256, dtype=torch.uint8)
    scale_inv = torch.rand(256) + 0.1
    want = values(fmt).numpy() * scale_inv.double().numpy()
    got = cast.dequantize(codes.view(fmt.dtype), scale_inv, torch.float64).numpy()
    np.testing.assert_array_equal(got, want)
    got32 = cast.dequantize(codes.view(fmt.dtype), scale_inv).numpy()
    np.testing.assert_array_equal(got32, want.astype(np.float32))


GROUPS = {
    "tensorwise": (256, 256),
    "rowwise": (1, 256),
    "1x128": (1, 128),
    "128x128": (128, 128),
    "1x32": (1, 32),
}


@pytest.mark.parametrize("granularity", GROUPS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("pow2", [False, True])
def test_non_finite_input_never_comes_back_finite(granularity: str, bad: float, pow2: bool) -> None:
    """Oracle: the written rule: the whole scaling group comes back as NaN, other groups untouched."""
    rows, columns = GROUPS[granularity]
    x = torch.randn(256, 256)
    want = quantize(x, E4M3FN, granularity, dim=1, power_of_two=pow2).dequantize()
    x[3, 5] = bad
    want[3 // rows * rows : 3 // rows * rows + rows, :columns] = torch.nan
    back = quantize(x, E4M3FN, granularity, dim=1, power_of_two=pow2).dequantize()
    assert torch.equal(back.nan_to_num(1e9), want.nan_to_num(1e9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_left_alone(dtype: torch.dtype) -> None:
    """Oracle: a copy. A cast works in place on its own float32 product, never on what it was given."""
    x = torch.randn(64, 64).to(dtype) * 1000
    before = x.clone()
    for granularity in ("tensorwise", "rowwise", "1x32"):
        cast.scale_and_cast(x, E4M3FN, granularity)
    cast.cast_rowwise(x, E4M3FN, (1, 0))
    cast.cast_with_amax(x, E4M3FN, torch.tensor(1.0))
    cast.cast_saturating(x, E4M3FN)
    assert torch.equal(x, before)


@pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda f: f.name)
def test_what_exceeds_a_known_amax_saturates(fmt: Format) -> None:
    """Oracle: the largest code. The clamp may be left out only where the amax is x's own."""
    x = torch.tensor([-4.0, 4.0, torch.inf])
    codes, _ = cast.scale_and_cast(x, fmt, known_amax=torch.tensor(1.0))
    assert codes.float().tolist() == [-fmt.max, fmt.max, fmt.max]


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda f: f.name)
def test_rows_and_columns_are_two_clamped_casts(fmt: Format, dtype: torch.dtype, pow2: bool) -> None:
    """Oracle: each cast by itself, with the clamp. Rows of zeros, of either sign, and with Inf and NaN are among them."""
    x = (torch.randn(200, 300) * torch.randn(200, 1).exp()).to(dtype)
    x[2], x[3], x[5, 7], x[11, 13] = 0.0, -0.0, -torch.inf, torch.nan
    for part in (x, x[:0], x[:, :0]):
        found = [cast.cast_rowwise(part, fmt, dims, power_of_two=pow2) for dims in ((1, 0), (0,), (1,))]
        for (codes, scale_inv), dim in zip(itertools.chain(*found), (1, 0, 0, 1), strict=True):
            scale, want_inv = scaling.compute_scale(scaling.amax(part, "rowwise", dim), fmt, pow2)
            want = cast.cast_saturating(part.float() * scale, fmt)
            if dim == 0:
                want, want_inv = want.t(), want_inv.t()
            assert torch.equal(scale_inv.nan_to_num(-1.0), want_inv.nan_to_num(-1.0))
            nan = want.float().isnan()
            assert torch.equal(codes.float().isnan(), nan)
            assert torch.equal(codes.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])


def test_layouts_do_not_matter(inputs: dict[str, torch.Tensor]) -> None:
    """Oracle: the contiguous cast. Transposed and strided inputs keep their shape and strides."""
    x = inputs["bf16"].reshape(256, 256)
    want = cast.cast_saturating(x, E4M3FN).view(torch.uint8)
    got = cast.cast_saturating(x.t(), E4M3FN)
    assert got.stride() == (1, 256)
    assert torch.equal(got.view(torch.uint8).t(), want)
    assert torch.equal(cast.cast_saturating(x[::3, ::7], E4M3FN).view(torch.uint8), want[::3, ::7])
