"""cast: bit-equal to two independent libraries over every 16-bit input and every hard float32 input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

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
SOURCES = ("bf16", "fp16", "fp32")


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def hard_float32() -> torch.Tensor:
    """For each format: every finite value, every midpoint of neighbours (ties), the overflow threshold and
    max, each with both float32 neighbours and both signs; besides, random bit patterns and special values."""
    points: list[np.ndarray] = []
    for fmt in ELEMENT_FORMATS:
        finite = np.unique(np.array([v for v in fmt.values if np.isfinite(v)]))
        points += [finite, (finite[1:] + finite[:-1]) / 2, np.array([1.0, -1.0]) * fmt.overflow_threshold]
    exact = np.unique(np.concatenate(points)).astype(np.float32)
    around = np.concatenate(
        [exact, np.nextafter(exact, np.float32(-np.inf)), np.nextafter(exact, np.float32(np.inf))]
    )
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 1e9], dtype=np.float32
    )
    bits = np.random.default_rng(0).integers(0, 2**32, 2**17, dtype=np.uint32).view(np.float32)
    return torch.from_numpy(np.concatenate([around, special, bits]))


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    return {
        "bf16": all_patterns(torch.bfloat16),
        "fp16": all_patterns(torch.float16),
        "fp32": hard_float32(),
    }


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """Convert to float32, which holds each bf16 and fp16 value exactly."""
    return x.float().numpy()


def mismatches(got: torch.Tensor, want: np.ndarray, fmt: Format) -> int:
    """Codes that differ, NaN compared as a class (its sign and payload are unspecified everywhere)."""
    values = np.array(fmt.values)
    codes = got.view(torch.uint8).numpy()
    both_nan = np.isnan(values[codes]) & np.isnan(values[want])
    return int(((codes != want) & ~both_nan).sum())


def ml_dtypes_codes(x: torch.Tensor, fmt: Format) -> np.ndarray:
    clipped = np.clip(to_numpy(x), -fmt.max, fmt.max)
    return clipped.astype(getattr(ml_dtypes, f"float8_{fmt.name}")).view(np.uint8)


def gfloat_codes(x: torch.Tensor, fmt: Format) -> np.ndarray:
    info = GFLOAT[fmt.name]
    rounded = gfloat.round_ndarray(
        info, to_numpy(x).astype(np.float64), gfloat.RoundMode.TiesToEven, sat=True
    )
    return gfloat.encode_ndarray(info, rounded).astype(np.uint8)


ORACLES: dict[str, Callable[[torch.Tensor, Format], np.ndarray]] = {
    "ml_dtypes": ml_dtypes_codes,
    "gfloat": gfloat_codes,
}


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda f: f.name)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy on NaN input
def test_eager_cast_is_bit_equal(
    inputs: dict[str, torch.Tensor], fmt: Format, source: str, oracle: str
) -> None:
    """Oracles: ml_dtypes of the clipped input; gfloat with sat=True. Both take Inf to the largest value."""
    x = inputs[source]
    assert mismatches(cast.cast_saturating(x, fmt), ORACLES[oracle](x, fmt), fmt) == 0


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy on NaN input
def test_the_hard_inputs_are_hard(inputs: dict[str, torch.Tensor]) -> None:
    """Negative controls: round-half-away, truncation and an unclamped e5m2 cast are all told apart."""
    x = inputs["fp32"]
    want = ml_dtypes_codes(x, E4M3FN)
    up = torch.nextafter(x, torch.sign(x) * torch.inf)  # moves each tie away from zero
    assert mismatches(cast.cast_saturating(up, E4M3FN), want, E4M3FN) > 100
    down = torch.nextafter(x, torch.zeros(()))  # moves each exact value below itself; ties toward zero
    assert mismatches(cast.cast_saturating(down, E4M3FN), want, E4M3FN) > 100
    assert mismatches(x.to(torch.float8_e5m2), ml_dtypes_codes(x, E5M2), E5M2) > 1000


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # torch's own
def test_compiled_casts_are_bit_equal_to_eager(inputs: dict[str, torch.Tensor]) -> None:
    """Oracle: the eager cast, itself checked above; one graph for 3 sources x 4 formats and the scaled casts."""

    def everything(bf16: torch.Tensor, fp16: torch.Tensor, fp32: torch.Tensor) -> list[torch.Tensor]:
        plain = [cast.cast_saturating(x, fmt) for x in (bf16, fp16, fp32) for fmt in ELEMENT_FORMATS]
        matrices = [x.reshape(256, -1).nan_to_num(0, 1e4, -1e4) for x in (bf16, fp16)]
        scaled = [
            part
            for x in matrices
            for fmt in (E4M3FN, E5M2)
            for granularity in ("tensorwise", "rowwise")
            for pow2 in (False, True)
            for part in cast.scale_and_cast(x, fmt, granularity, dim=1, power_of_two=pow2)
        ]
        return plain + scaled

    torch._dynamo.reset()
    eager = everything(*inputs.values())
    compiled = torch.compile(everything, fullgraph=True, dynamic=False)(*inputs.values())
    for want, got in zip(eager, compiled, strict=True):
        if want.dtype.itemsize == 1:
            fmt = next(f for f in ELEMENT_FORMATS if f.dtype == want.dtype)
            assert mismatches(got, want.view(torch.uint8).numpy(), fmt) == 0
        else:
            assert torch.equal(got, want)


def test_layouts_do_not_matter(inputs: dict[str, torch.Tensor]) -> None:
    """Oracle: the contiguous cast. Transposed, strided and empty inputs keep their shape and strides."""
    x = inputs["bf16"].reshape(256, 256)
    want = cast.cast_saturating(x, E4M3FN).view(torch.uint8)
    got = cast.cast_saturating(x.t(), E4M3FN)
    assert got.stride() == (1, 256)
    assert torch.equal(got.view(torch.uint8).t(), want)
    assert torch.equal(cast.cast_saturating(x[::3, ::7], E4M3FN).view(torch.uint8), want[::3, ::7])
    assert cast.cast_saturating(x[:0], E4M3FN).shape == (0, 256)


def test_negative_zero_and_underflow_keep_the_sign_where_the_format_has_one() -> None:
    """Oracle: the code tables of OFP8 and of the fnuz formats."""
    x = torch.tensor([-0.0, -1e-30, 1e-30])
    assert cast.cast_saturating(x, E4M3FN).view(torch.uint8).tolist() == [0x80, 0x80, 0]
    assert cast.cast_saturating(x, torch.float8_e4m3fnuz).view(torch.uint8).tolist() == [0, 0, 0]


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


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("pow2", [False, True])
def test_non_finite_input_never_comes_back_finite(granularity: str, bad: float, pow2: bool) -> None:
    """Oracle: the written rule: the whole scaling group comes back as NaN, other groups untouched."""
    x = torch.randn(4, 16)
    x[1, 3] = bad
    back = cast.dequantize(*cast.scale_and_cast(x, E4M3FN, granularity, dim=1, power_of_two=pow2))
    assert back[1].isnan().all()
    assert back[[0, 2, 3]].isnan().all() == (granularity == "tensorwise")
    if granularity == "rowwise":
        torch.testing.assert_close(back[[0, 2, 3]], x[[0, 2, 3]], rtol=2**-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0,), (0, 0)])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_empty_input(shape: tuple[int, ...], granularity: str) -> None:
    """Oracle: shapes; the scale of an empty group is that of amax 0."""
    codes, scale_inv = cast.scale_and_cast(torch.zeros(shape), E4M3FN, granularity, dim=-1)
    assert codes.shape == shape
    assert scale_inv.isfinite().all()
    assert scale_inv.shape == (() if granularity == "tensorwise" else (*shape[:-1], 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_input_dtypes_are_refused(dtype: torch.dtype) -> None:
    x = torch.zeros(4).to(dtype)
    for function in (lambda: cast.cast_saturating(x, E4M3FN), lambda: cast.scale_and_cast(x, E4M3FN)):
        with pytest.raises(TypeError, match="expected float32, bfloat16 or float16"):
            function()


def test_scale_formats_and_plain_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="e8m0fnu holds scales"):
        cast.cast_saturating(torch.ones(2), "e8m0fnu")
    with pytest.raises(ValueError, match="is no FP8 format"):
        cast.dequantize(torch.ones(2), torch.ones(()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_left_alone_and_temporaries_are_not(dtype: torch.dtype) -> None:
    """Oracle: a copy. A cast works in place on its own float32 product, never on what it was given."""
    x = torch.randn(64, 64).to(dtype) * 1000
    before = x.clone()
    for granularity in ("tensorwise", "rowwise", "1x32"):
        cast.scale_and_cast(x, E4M3FN, granularity)
    cast.cast_with_amax(x, E4M3FN, torch.tensor(1.0))
    want = cast.cast_saturating(x, E4M3FN)
    assert torch.equal(x, before)
    own = x.float().clone()
    got = cast.cast_saturating(own, E4M3FN, overwrite=True)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert own.abs().max() == 448
