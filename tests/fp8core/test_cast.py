"""cast: bit-equal to two independent libraries over every 16-bit input and every hard float32 input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hard_inputs import hard_inputs, mismatches

from fp8core import cast
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
    want = np.array(fmt.values) * scale_inv.double().numpy()
    got = cast.dequantize(codes.view(fmt.dtype), scale_inv, torch.float64).numpy()
    np.testing.assert_array_equal(got, want)
    got32 = cast.dequantize(codes.view(fmt.dtype), scale_inv).numpy()
    np.testing.assert_array_equal(got32, want.astype(np.float32))
